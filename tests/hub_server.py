"""The protocol of the Hugging Face hub, as far as huggingface_hub needs it, on this machine."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ABOUT = re.compile(r"/api/(?:models|datasets)/([^/]+/[^/]+)/(revision|tree)/([^/]+)")
FILE = re.compile(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
REGULAR = {"uploadMode": "regular", "shouldIgnore": False}
WRITE = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main")


def commit_of(files):
    """The commit of a repository with these files, by name."""
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class Hub(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path, repositories = self.path.partition("?")[0], self.server.repositories
        self.server.asked.append((self.command, path))
        found = ABOUT.fullmatch(path) or FILE.fullmatch(path)
        if found is None or found[1] not in repositories:
            error = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            return self.answer(b"", 404, error)
        files = repositories[found[1]]
        commits = {commit_of(version): version for version in (files, *self.server.earlier)}
        commit = commit_of(files) if "main" in found.groups() else found[3 - (found.re is FILE)]
        if commit not in commits:
            return self.answer(b"", 404, {"X-Error-Code": "RevisionNotFound"})
        files = commits[commit]
        if found.re is FILE:
            content = files[found[3]]
            tag = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
            return self.answer(content, 200, tag)
        tree = [
            {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
            for n, c in files.items()
        ]
        about = {"id": found[1], "sha": commit, "siblings": [{"rfilename": n} for n in files]}
        return self.answer(about if found[2] == "revision" else tree)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.command, self.path))
        if self.headers.get("Authorization") != "Bearer right":
            return self.answer({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            about = json.loads(body)
            name = f"{about['organization']}/{about['name']}"
            self.server.repositories.setdefault(name, {})
            return self.answer({"url": f"{self.server.url}/{name}", "id": name})
        found = WRITE.fullmatch(self.path.partition("?")[0])
        if found[2] == "preupload":
            names = [each["path"] for each in json.loads(body)["files"]]
            return self.answer({"files": [{"path": n, **REGULAR} for n in names]})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.server.repositories[found[1]][line["value"]["path"]] = content
        commit = commit_of(self.server.repositories[found[1]])
        url = f"{self.server.url}/{found[1]}/commit/{commit}"
        return self.answer({"success": True, "commitOid": commit, "commitUrl": url})

    def answer(self, content, status=200, headers=()):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serving(repositories):
    """A server of repositories, each a mapping from the name of a file to its content."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.repositories, server.asked, server.earlier = repositories, [], []
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
