"""Progress that is pushed to a TrainJob: to a server that speaks Kubeflow Trainer's protocol."""

import json
import logging
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import losses, train
from torchtitan.metrics import MetricsConfig, SinkContext, build_sinks, trainjob
from torchtitan.metrics.trainjob import TrainJob, is_trainjob

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/llama/status"
ROW = {"loss": 4.25, "grad_norm": 1.5, "lr": 3e-4, "tokens": 12_288, "tps": 12345.67, "mfu": None}
ROW |= {"memory_gib": 12.3, "time/data": 0.1, "eta_s": 3723.4}


@dataclass
class Server:
    """A server of status, with the requests that it got."""

    variables: dict[str, str]
    found: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    """Time, token and body of each."""
    status: int = 200
    seconds: float = 0.0
    """Time until it answers."""

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [body["trainerStatus"] for _, _, body in self.found]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of this machine that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("certificate")
    own, key = folder / "ca.crt", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    words += ["-keyout", str(key), "-out", str(own)]
    subprocess.run(words, check=True, capture_output=True)
    return own, key


@pytest.fixture
def server(certificate: tuple[Path, Path], tmp_path: Path) -> Iterator[Server]:
    own, key = certificate
    token = tmp_path / "token"
    token.write_text("first\n")
    with serving(own, key, token) as found:
        yield found


@contextmanager
def serving(own: Path, key: Path, token: Path) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == PATH
            body = self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(server.seconds)
            who = self.headers["Authorization"]
            server.found.append((time.monotonic(), who, json.loads(body)))
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class QuietServer(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # of a client that did not wait

    with QuietServer(("127.0.0.1", 0), Handler) as http:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(own, key)
        http.socket = context.wrap_socket(http.socket, server_side=True)
        variables = {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{http.server_port}{PATH}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(own),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(token),
        }
        server = Server(variables)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield server
        http.shutdown()


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def opened(server: Server, start_step: int = 0) -> TrainJob:
    sink = TrainJob(SinkContext(Path("run"), total_steps=1000), server.variables)
    sink.open(start_step)
    return sink


def test_a_report_has_the_fields_of_the_protocol(server: Server, tmp_path: Path) -> None:
    sink = opened(server, start_step=100)
    until(lambda: len(server.found) == 1)
    (tmp_path / "token").write_text("second\n")  # Kubernetes replaces it
    sink.write(456, ROW)
    sink.write(456, {"validation_loss": 2.5, "x" * 65: 1.0})
    sink.write(456, {"event": "restart", "ranks": 2})
    sink.close({"step": 456})
    first, last = server.reports
    assert [who for _, who, _ in server.found] == ["Bearer first", "Bearer second"]
    assert first["progressPercentage"] == 10
    assert "estimatedRemainingSeconds" not in first
    assert last["progressPercentage"] == 45
    assert last["estimatedRemainingSeconds"] == 3723
    assert {each["name"]: each["value"] for each in last["metrics"]} == {
        "step": "456",
        "loss": "4.25",
        "grad_norm": "1.5",
        "lr": "0.0003",
        "tokens": "12288",
        "tps": "12345.7",
        "memory_gib": "12.3",
        "validation_loss": "2.5",
    }
    assert datetime.fromisoformat(last["lastUpdatedTime"]).tzinfo is not None


def test_reports_are_few_and_the_last_one_is_of_the_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainjob, "INTERVAL", 0.4)
    began = time.monotonic()
    sink = opened(server)
    for step in range(1, 101):
        sink.write(step, ROW)
        time.sleep(0.01)
    sink.close({"step": 1000})
    # One at once, one for each interval that has passed, and the last.
    assert 3 <= len(server.found) <= 2 + (time.monotonic() - began) / 0.4
    assert server.reports[-1]["progressPercentage"] == 100
    assert server.reports[-1]["estimatedRemainingSeconds"] == 0


def test_a_failure_is_logged_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainjob, "INTERVAL", 0.0)
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    server.status = 403
    sink = opened(server)
    for count in (1, 2, 3):
        until(lambda count=count: len(server.found) == count)
        sink.write(count, ROW)
    until(lambda: len(server.found) == 4)
    server.status = 200
    sink.close({"step": 3})
    assert len(server.found) == 5
    told = "progress could not be reported to the TrainJob: HTTP Error 403: Forbidden; trying again"
    assert caplog.messages == [told]


def test_a_server_that_hangs_delays_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainjob, "TIMEOUT", 0.5)
    server.seconds = 3.0
    began = time.monotonic()
    sink = opened(server)
    for step in range(1, 1000):
        sink.write(step, ROW)
    assert time.monotonic() - began < 0.4
    sink.close({"step": 1000})
    assert time.monotonic() - began < 2.5
    until(lambda: not sink._thread.is_alive())


def test_it_is_used_where_all_variables_are_set(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def names(rank: int) -> list[str]:
        found = build_sinks(MetricsConfig(), SinkContext(tmp_path, rank))
        return [type(sink).__name__ for sink in found]

    assert names(0) == ["Jsonl", "Console"]
    for name, value in server.variables.items():
        assert not is_trainjob({name: value})
        monkeypatch.setenv(name, value)
    assert names(0) == ["TrainJob", "Jsonl", "Console"]
    assert names(1) == []


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_reports_to_its_trainjob(
    is_there: bool, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables = server.variables
    if not is_there:
        variables |= {"KUBEFLOW_TRAINER_SERVER_URL": "https://127.0.0.1:9/none"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run_ranks(train, 2, tiny.job(tmp_path / "run", training={"steps": 5}))
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]
    if is_there:
        assert server.reports[-1]["progressPercentage"] == 100
        assert server.reports[-1]["metrics"][0] == {"name": "step", "value": "5"}
    else:
        assert not server.found
