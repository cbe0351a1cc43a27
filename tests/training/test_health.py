"""What a run answers over HTTP, while it trains, saves and validates."""

import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import rows, train
from torchtitan.checkpoint.manager import Checkpointer
from torchtitan.config import Context, PlannedWorld
from torchtitan.metrics import MetricsConfig
from torchtitan.metrics.health import LIMIT_IN_STEPS, Health
from torchtitan.optim.optimizer_group import Optimizers
from torchtitan.tools.cli import main
from torchtitan.validate import Validator

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docs/grafana.json"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def values(text: str) -> dict[str, float]:
    """The samples of Prometheus' text format, each of which has a help and a type."""
    found = {}
    lines = iter(text.splitlines())
    for line in lines:
        about = re.fullmatch(r"# HELP (\w+) .+", line)
        kind = re.fullmatch(r"# TYPE (\w+) (counter|gauge)", next(lines))
        sample = re.fullmatch(r"(\w+) (\S+)", next(lines))
        assert about
        assert kind
        assert sample
        assert about[1] == kind[1] == sample[1]
        assert (kind[2] == "counter") == sample[1].endswith("_total")
        found[sample[1]] = float(sample[2])
    return found


def asked(folder: str, port: int) -> dict[str, Any]:
    """Train, and ask at each of these moments."""
    found: dict[str, Any] = {}

    def asks(kind: type, method: str, name: str) -> None:
        usual: Callable[..., Any] = getattr(kind, method)

        def call(*arguments: Any, **keywords: Any) -> Any:
            answered = {path: ask(port, path) for path in ("/healthz", "/metrics", "/")}
            found.setdefault(name, []).append(answered)
            return usual(*arguments, **keywords)

        setattr(kind, method, call)

    asks(Validator, "run", "validation")
    asks(Checkpointer, "save", "checkpoint")
    asks(Checkpointer, "finish", "finishing")
    asks(Optimizers, "norm", "training")
    job = tiny.job(
        folder,
        metrics={"serve": f":{port}", "log_freq": 1},
        checkpoint={"enable": True, "interval": 2},
        validation={"enable": True, "freq": 2, "steps": 1},
        training={"steps": 5},
    )
    train(job)
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("health")
    [found] = run_ranks(asked, 1, str(folder), free_port())
    return found, folder


STEPS = {
    "training": [0, 1, 2, 3, 4],
    "validation": [2, 4, 5],
    "checkpoint": [2, 4, 5],
    "finishing": [5],
}
"""Steps that are done whenever it is asked."""


@pytest.mark.parametrize("phase", STEPS)
def test_a_probe_is_told_what_the_run_does(phase: str, answers: tuple[Any, Path]) -> None:
    asked = [each["/healthz"] for each in answers[0][phase]]
    found = [json.loads(body) for _, body in asked]
    assert {status for status, _ in asked} == {200}
    assert [each["step"] for each in found] == STEPS[phase]
    expected = ["starting" if phase == "training" and not n else phase for n in STEPS[phase]]
    assert [each["phase"] for each in found] == expected


def test_prometheus_gets_the_last_report(answers: tuple[Any, Path]) -> None:
    found, folder = answers
    status, text = found["finishing"][0]["/metrics"]
    seen, last = values(text), rows(folder)
    assert status == 200
    report = [row for row in last if "loss" in row][-1]
    validation = [row for row in last if "validation_loss" in row][-1]
    for name, expected in {
        "step": 5,
        "steps_wanted": 5,
        "loss": report["loss"],
        "grad_norm": report["grad_norm"],
        "learning_rate": report["lr"],
        "tokens_total": report["tokens"],
        "tokens_per_second_per_device": report["tps"],
        "memory_peak_gib": report["memory_gib"],
        "validation_loss": validation["validation_loss"],
        "skipped_steps_total": 0,
        "restarts_total": 0,
        "checkpoint_step": 4,
    }.items():
        assert seen[f"torchtitan_{name}"] == pytest.approx(expected, rel=1e-6), name
    assert found["finishing"][0]["/"][0] == 404
    first = values(found["training"][-1]["/metrics"][1])
    assert first["torchtitan_step"] == 4


def health(**changes: Any) -> tuple[Health, list[float]]:
    now = [100.0]
    given: dict[str, Any] = {
        "unit": "tokens",
        "rate": "tps",
        "total_steps": 9,
        "limit_seconds": 30.0,
        "restarts": 2,
        "phase": lambda: None,
        "saved_step": lambda: None,
        "is_finished": lambda: False,
        "clock": lambda: now[0],
    }
    return Health(":9090", **(given | changes)), now


def test_a_run_that_hangs_is_not_healthy_and_one_that_compiles_is() -> None:
    one, now = health()
    now[0] = 10_000.0  # the first step may take long
    assert one.health()["phase"] == "starting"
    assert one.answer("/healthz")[0] == 200
    one.after_step(1)
    now[0] += 29.0
    assert one.answer("/healthz")[0] == 200
    now[0] += 2.0
    status, body, _ = one.answer("/healthz")
    assert status == 503
    assert json.loads(body) == {
        "healthy": False,
        "phase": "training",
        "step": 1,
        "age_seconds": 31.0,
        "limit_seconds": 30.0,
    }
    saving, now = health(phase=lambda: "checkpoint")
    saving.after_step(1)
    now[0] += 1000.0
    assert saving.answer("/healthz")[0] == 200


def test_long_steps_have_more_time() -> None:
    one, now = health()
    for step in (1, 2):
        now[0] += 20.0
        one.after_step(step)
    assert one.health()["limit_seconds"] == LIMIT_IN_STEPS * 20.0


def test_skipped_steps_and_values_that_are_not_finite() -> None:
    one, _ = health(saved_step=lambda: 7)
    one.write(1, {"loss": float("nan"), "skipped": 1, "note": "x"})
    one.write(2, {"skipped": 2})
    one.after_step(2)
    text = one.text()
    assert "torchtitan_loss NaN\n" in text
    seen = values(text)
    assert seen["torchtitan_skipped_steps_total"] == 3
    assert seen["torchtitan_restarts_total"] == 2
    assert seen["torchtitan_checkpoint_step"] == 7


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_that_is_taken_is_refused(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ROOT / "train_configs/debug_model.toml")
    assert main(["train", recipe, "--metrics.serve", f":{taken}"]) == 2
    printed = capsys.readouterr().err
    assert "metrics.serve: got" in printed
    assert "it cannot be served here: Address already in use\n  use another port" in printed
    elsewhere = Context(world=PlannedWorld(1, "cpu"))
    assert not list(MetricsConfig(serve=f":{taken}").problems(elsewhere))


@pytest.mark.parametrize("serve", ["9090", ":0", ":99999", "http://a:1", "a:b"])
def test_an_address_without_a_port_is_refused(serve: str) -> None:
    [problem] = MetricsConfig(serve=serve).problems(Context(world=PlannedWorld(1, "cpu")))
    assert problem.path == "serve"
    assert 'wanted a port, as ":9090"' in problem.message


def test_the_dashboard_shows_what_there_is() -> None:
    named = set(re.findall(r"torchtitan_\w+", DASHBOARD.read_text(encoding="utf-8")))
    one, _ = health()
    assert named
    assert named <= {f"torchtitan_{name}" for name, *_ in one.rows()}
