"""What a run answers over HTTP, while it trains, saves and validates."""

import json
import multiprocessing
import re
import socket
import struct
import sys
import time
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests import tiny
from tests.ranks import free_port, run_ranks
from tests.reliability.trials import at_call, play
from tests.runs import rows
from torchtitan.checkpoint.manager import Checkpointer
from torchtitan.cluster.health import LIMIT_IN_STEPS, Health, open_health
from torchtitan.device import Device
from torchtitan.metrics import parse_address
from torchtitan.optim.optimizer_group import Optimizers
from torchtitan.provenance import to_toml
from torchtitan.resilience.divergence import Divergence
from torchtitan.timeline import Timeline
from torchtitan.trainer import main as train_main
from torchtitan.validate import Validator

ROOT = Path(__file__).parents[2]
FORK = multiprocessing.get_context("fork")
DASHBOARD = ROOT / "docs/grafana.json"


def ask(port, path):
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def recipe(folder, port, **sections):
    """Of a run that answers at a port."""
    return tiny.job(
        folder,
        **{
            "job": {"imports": ["tests.tiny"]},
            "metrics": {"serve": f":{port}", "log_freq": 1},
            "checkpoint": {"enable": True, "interval": 2},
            "validation": {"enable": True, "freq": 2, "steps": 1},
            "training": {"steps": 5},
            **sections,
        },
    )


def write_recipe(folder, port, **sections):
    """The arguments of such a run."""
    folder.mkdir(exist_ok=True)
    (folder / "asked.toml").write_text(to_toml(recipe(folder, port, **sections)))
    return ["--job.config_file", str(folder / "asked.toml")]


def values(text):
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


def asked(folder, port, **sections):
    """Train, and ask at each of these moments."""
    found = {}

    def asks(kind, method, name):
        usual = getattr(kind, method)

        def call(*arguments, **keywords):
            answered = {path: ask(port, path) for path in ("/healthz", "/metrics", "/")}
            found.setdefault(name, []).append(answered)
            return usual(*arguments, **keywords)

        setattr(kind, method, call)

    asks(Divergence, "__init__", "starting")
    asks(Validator, "run", "validation")
    asks(Checkpointer, "save", "checkpoint")
    asks(Checkpointer, "finish", "finishing")
    asks(Optimizers, "norm", "training")
    assert train_main(write_recipe(Path(folder), port, **sections)) == 0
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("health")
    [found] = run_ranks(asked, 1, str(folder), free_port())
    return found, folder


STEPS = {
    "starting": [0],
    "training": [0, 1, 2, 3, 4],
    "validation": [2, 4, 5],
    "checkpoint": [2, 4, 5],
    "finishing": [5],
}
"""Steps that are done whenever it is asked."""


@pytest.mark.parametrize("phase", STEPS)
def test_a_probe_is_told_what_the_run_does(phase, answers):
    asked = [each["/healthz"] for each in answers[0][phase]]
    found = [json.loads(body) for _, body in asked]
    assert {status for status, _ in asked} == {200}
    assert [each["step"] for each in found] == STEPS[phase]
    expected = ["starting" if phase == "training" and not n else phase for n in STEPS[phase]]
    assert [each["phase"] for each in found] == expected


def test_prometheus_gets_the_last_report(answers):
    found, folder = answers
    status, text = found["finishing"][0]["/metrics"]
    seen, last = values(text), rows(folder)
    assert status == 200
    report = [row for row in last if "loss" in row][-1]
    validation = [row for row in last if "validation_loss" in row][-1]
    names = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}
    names |= {"tokens": "tokens_total", "tps": "tokens_per_second_per_device"}
    wanted = {name: report[key] for key, name in names.items()}
    wanted |= {"step": 5, "steps_wanted": 5, "skipped_steps_total": 0, "restarts_total": 0}
    wanted |= {"memory_peak_gib": report["memory_gib"], "checkpoint_step": 4}
    wanted |= {"validation_loss": validation["validation_loss"]}
    for name, expected in wanted.items():
        assert seen[f"torchtitan_{name}"] == pytest.approx(expected, rel=1e-6), name
    assert found["finishing"][0]["/"][0] == 404
    assert values(found["training"][-1]["/metrics"][1])["torchtitan_step"] == 4


def health(saved_step=None):
    now = [100.0]
    one = Health(limit_seconds=30.0, restarts=2, clock=lambda: now[0])
    timeline = Timeline(Device("cpu"), clock=lambda: now[0])
    about = {"unit": "tokens", "rate": "tps", "total_steps": 9}
    one.watch(timeline, **about, saved_step=lambda: saved_step, is_finished=lambda: False)
    return one, now, timeline


def test_a_run_that_hangs_is_not_healthy_and_one_that_compiles_is():
    one, now, timeline = health()
    now[0] = 10_000.0  # the first step may take long
    assert one.health()["phase"] == "starting"
    assert one.answer("/healthz")[0] == 200
    one.after_step(1)
    now[0] += 29.0
    assert one.answer("/healthz")[0] == 200
    now[0] += 2.0
    status, body, _ = one.answer("/healthz")
    assert status == 503
    told = {"healthy": False, "phase": "training", "step": 1, "age_seconds": 31.0}
    assert json.loads(body) == told | {"limit_seconds": 30.0}
    with timeline.pause("checkpoint"):
        assert one.answer("/healthz")[0] == 200
        now[0] += 1000.0
    # The step after a save has as much time as any other.
    assert one.health()["phase"] == "training"
    now[0] += 29.0
    assert one.answer("/healthz")[0] == 200
    now[0] += 2.0
    assert one.answer("/healthz")[0] == 503


def test_long_steps_have_more_time():
    one, now, _ = health()
    for step in (1, 2):
        now[0] += 20.0
        one.after_step(step)
    assert one.health()["limit_seconds"] == LIMIT_IN_STEPS * 20.0


def test_skipped_steps_and_values_that_are_not_finite():
    one, _, _ = health(saved_step=7)
    one.write(1, {"loss": float("nan"), "grad_norm": float("inf"), "skipped": 1, "note": "x"})
    one.write(2, {"skipped": 2})
    one.after_step(2)
    text = one.text()
    assert "torchtitan_loss NaN\n" in text
    assert "torchtitan_grad_norm +Inf\n" in text
    wanted = {"skipped_steps_total": 3, "restarts_total": 2, "checkpoint_step": 7}
    assert {name: values(text)[f"torchtitan_{name}"] for name in wanted} == wanted


@pytest.fixture
def taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_port_that_is_taken_is_refused(ranks, taken, tmp_path):
    job = recipe(tmp_path / "run", taken, parallelism={"data_parallel_shard_degree": -1})
    done = play(job, ranks, status=2)
    assert "Traceback" not in done.log
    told = f'metrics.serve: got ":{taken}"; it cannot be served here: Address already in use\n'
    assert told in done.log
    assert "  use another port\n" in done.log
    assert not (tmp_path / "run/metrics.jsonl").exists()
    # Whether it is taken on another machine, `check` cannot know.
    assert [each for each in tiny.problems(job) if "serve" in each.path] == []


def test_an_address_is_split():
    assert parse_address(":9090") == ("127.0.0.1", 9090)
    assert parse_address("0.0.0.0:9090") == ("0.0.0.0", 9090)
    assert parse_address("[::]:9090") == ("::", 9090)


def test_a_client_that_leaves_is_not_in_the_log(capfd):
    port = free_port()
    with open_health(f":{port}", 5.0, 0):
        with socket.socket() as client:
            client.connect(("127.0.0.1", port))
            # Closed at once, by a reset.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET /metrics HTTP/1.0\r\n")
        assert ask(port, "/healthz?from=probe")[0] == 200
    assert capfd.readouterr().err == ""
    # A restarted run can serve the port at once.
    with open_health(f":{port}", 5.0, 0):
        assert ask(port, "/healthz")[0] == 200


@pytest.mark.gate
def test_a_second_run_waits_for_the_first_that_ends_in_its_folder(tmp_path):
    """A requeued run starts while the last one saves, and has the same address."""
    words = write_recipe(tmp_path / "run", free_port(), training={"steps": 2})
    runs = {"ending": end_when_waited_for, "waiting": tell_of_waiting}
    processes = []
    for moment, run in runs.items():
        processes.append(FORK.Process(target=run, args=(words, tmp_path), daemon=True))
        processes[-1].start()
        while not (tmp_path / moment).exists():
            assert processes[-1].is_alive(), moment
            time.sleep(0.01)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert [row["step"] for row in rows(tmp_path / "run") if "loss" in row] == [1, 2, 3]


def end_when_waited_for(words, folder):
    def finish(usual, checkpointer):
        (folder / "ending").touch()
        while not (folder / "waiting").exists():
            time.sleep(0.01)
        usual(checkpointer)

    at_call("torchtitan.checkpoint.manager:Checkpointer.finish", 0, finish)()
    assert train_main(words) == 0


def tell_of_waiting(words, folder):
    def sleep(usual, seconds):
        (folder / "waiting").touch()
        usual(seconds)

    at_call("time:sleep", 0, sleep)()
    assert train_main([*words, "--training.steps=3"]) == 0


def test_the_first_rank_of_a_node_answers_for_all(tmp_path):
    shards = {"data_parallel_shard_degree": -1}
    ask = partial(asked, parallelism=shards)
    found = run_ranks(ask, 2, str(tmp_path / "run"), free_port())
    assert [each["checkpoint"][-1]["/healthz"][0] for each in found] == [200, 200]


def test_a_run_that_answers_nothing_imports_no_server(tmp_path):
    words = [*write_recipe(tmp_path, 1), "--metrics.serve=", "--training.steps=1"]
    assert run_ranks(imports_a_server, 1, words) == [False]


def imports_a_server(words):
    """Whether a run imports the module that would serve."""
    name = Health.__module__
    sys.modules.pop(name)
    assert train_main(words) == 0
    return name in sys.modules


def test_the_dashboard_shows_what_there_is():
    named = set(re.findall(r"torchtitan_\w+", DASHBOARD.read_text(encoding="utf-8")))
    one, _, _ = health()
    assert named
    assert named <= {f"torchtitan_{name}" for name, *_ in one.rows()}
