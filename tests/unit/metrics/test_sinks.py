"""The sinks: what each writes, and which are used."""

import importlib.util
import io
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.ranks import free_port
from tests.unit.test_logging import Terminal
from tests.wandb_files import ended, offline_runs
from torchtitan.config import Context
from torchtitan.device import Device
from torchtitan.logging import QUIET_SECONDS, configure
from torchtitan.metrics import Meter, MetricsConfig, SinkContext, build_sinks, sinks
from torchtitan.metrics.sinks import Console, Jsonl, MLflow, TensorBoard, WandB, row_line

ROW = {"loss": 4.25, "grad_norm": 1.5, "lr": 3e-4, "tokens": 12_288, "tps": 12345.6, "mfu": 0.358}
ROW |= {"step_time": 0.5, "memory_gib": 12.3, "memory_pct": 15.4, "data_pct": 1.25}
ROW |= {"skipped": 0, "eta_s": 3723.4}
SUMMARY = {"step": 100, "total_steps": 100, "steps": 100, "skipped": 2, "tokens": 1_234_567}
SUMMARY |= {"seconds": 3723.4, "tps": 2345.6, "loss": 2.5, "memory_gib": 12.34}
SUMMARY |= {"best_validation_loss": None, "stopped_by": None}
METER = {"log_freq": 1, "total_steps": 2, "units_per_step": 4096, "flops_per_unit": 1e9}
METER |= {"peak_flops": None, "devices": 1, "device": Device("cpu")}


def rows(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def steps(path):
    return [row["step"] for row in rows(path)]


def write(sink, losses, start_step=0):
    """A run that begins after `start_step`, and is rolled back where a loss is None."""
    sink.open(start_step)
    try:
        for step, loss in losses:
            if loss is None:
                sink.open(step)
            else:
                sink.write(step, {"loss": loss, "mfu": None, "note": "text", "tokens": step})
    finally:
        sink.close(SUMMARY)
    return sink


def write_jsonl(folder, written, start_step=0, rank=0):
    losses = [(step, float(step)) for step in written]
    write(Jsonl(SinkContext(folder, rank=rank)), losses, start_step)


@contextmanager
def limited(what, most):
    """Let this process have no more of a resource."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


SPEED, LEFT = "12,346 tok/s/device", "eta 1h02m"
KNOWN = f"step   12/1000  loss  4.2500  norm  1.50  lr 3.0e-04  {SPEED}  mfu 36%  12.3 GiB  {LEFT}"
UNKNOWN = f"step 1000/1000  loss  4.2500  norm   n/a  lr     n/a  {SPEED}  12.3 GiB  {LEFT}"
NO_STEP = {"grad_norm": None, "lr": None}
PER_BYTE = "bits per byte 9.6211  perplexity per byte 787.4686"
HELD_OUT = {"validation_loss": 3.21, "validation_bits_per_byte": 9.6211}
HELD_OUT |= {"validation_perplexity_per_byte": 787.4686}
LINES = {
    KNOWN: (12, 1000, ROW | {"data_pct": 9.0}),
    f"{KNOWN}  data 12%": (12, 1000, ROW | {"data_pct": 12.0}),
    f"{KNOWN}  padding 0.0%": (12, 1000, ROW | {"data_padding_pct": 0.02}),
    f"{UNKNOWN}  skipped 3": (1000, 1000, {**ROW, "skipped": 3, "mfu": None, **NO_STEP}),
    "step  20/100  validation loss 3.2100": (20, 100, {"validation_loss": 3.21}),
    f"step 100/100  validation loss 3.2100  {PER_BYTE}": (100, 100, HELD_OUT),
}
LEFT_IN = {59.6: "1m00s", 3599: "59m59s", 3723.4: "1h02m", 86_390: "1d00h", 273_600: "3d04h"}


@pytest.mark.parametrize("line", LINES)
def test_console_row_has_what_is_known_and_matters(line):
    assert row_line(*LINES[line]) == line


@pytest.mark.parametrize("seconds", LEFT_IN)
def test_time_left_is_short(seconds):
    assert row_line(12, 1000, ROW | {"eta_s": seconds}).endswith(f"  eta {LEFT_IN[seconds]}")


@pytest.mark.parametrize("more", [{}, {"tps": 123_456.0}, {"loss": 11.9, "data_pct": 100.0}])
def test_console_row_fits_with_the_clock_before_it(more):
    row = ROW | {"grad_norm": 123.456, "mfu": None, "memory_gib": 0.39} | more
    assert len(f"12:34:56 {row_line(9_999, 10_000, row)}") <= 120
    assert len(row_line(9_999, 10_000, row | {"mfu": 0.41})) <= 120


def test_console_leaves_an_event_to_the_log_that_told_it(caplog, tmp_path):
    caplog.set_level(logging.INFO, "torchtitan")
    sink = Console(SinkContext(tmp_path, total_steps=100))
    sink.write(20, {"event": "rollback", "from_step": 24})
    assert not caplog.messages


def test_console_summary():
    assert sinks.summary_text(SUMMARY).splitlines() == [
        "finished at step 100 of 100",
        "  steps done            100; 2 skipped",
        "  tokens                1,234,567",
        "  time                  1:02:03",
        "  mean tokens/s/device  2,346",
        "  final loss            2.5000",
        "  peak memory           12.34 GiB",
    ]
    assert sinks.summary_text(SUMMARY | {"steps": 60}).splitlines() == [
        "finished at step 100 of 100",
        "  steps done            60 in this launch, which resumed from step 40; 2 skipped",
        "  tokens                1,234,567 in the whole run",
        "  time                  1:02:03 in this launch",
        "  mean tokens/s/device  2,346 in this launch",
        "  final loss            2.5000",
        "  peak memory           12.34 GiB in this launch",
    ]
    for line, changes in {
        "  best validation loss  3.2500": {"best_validation_loss": 3.25},
        "  sinks that failed     W (at step 1: gone)": {"failed_sinks": "W (at step 1: gone)"},
        "stopped at step 37 of 100": {"step": 37},
        "stopped at step 38 of 100": {"step": 38, "stopped_by": "KeyboardInterrupt"},
        "failed at step 39 of 100": {"step": 39, "stopped_by": "ValueError"},
    }.items():
        assert line in sinks.summary_text(SUMMARY | changes).splitlines()


def test_console_writes_plain_lines_elsewhere_than_on_a_terminal(caplog, capfd, tmp_path):
    caplog.set_level(logging.INFO, "torchtitan")
    times = [0.0]
    sink = Console(SinkContext(tmp_path, total_steps=2))
    meter = Meter([sink], **METER, clock=lambda: times[-1])

    def fail():
        with meter:
            times.append(2.0)
            meter.record(loss=4.25, grad_norm=1.0, lr=1e-3, units=4096)
            meter.flush(1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    _, row, summary = caplog.messages
    assert row.startswith("step 1/2  loss  4.2500  norm  1.00  lr 1.0e-03   2,048 tok/s/device  ")
    assert row.endswith(" GiB  eta 0m02s")
    assert summary.startswith("failed at step 1 of 2\n")
    assert "\033" not in caplog.text
    assert sink.bar is None
    assert capfd.readouterr() == ("", "")


def test_console_says_that_a_run_is_alive(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    now = [0.0]
    sink = Console(SinkContext(tmp_path, total_steps=100))
    sink.clock, sink.spoke = lambda: now[0], 0.0
    caplog.set_level("INFO", "torchtitan")
    sink.open(0)
    for step in range(1, 8):
        now[0] += QUIET_SECONDS / 3
        sink.after_step(step)
    assert caplog.messages == ["step   3/100", "step   6/100"]


def test_console_shows_a_bar_below_the_lines_on_a_terminal(monkeypatch, tmp_path):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    configure(color=False)
    sink = Console(SinkContext(tmp_path, total_steps=100, color=False))
    sink.open(10)
    sink.write(12, ROW)
    sink.bar.refresh()
    shown = terminal.getvalue()
    sink.after_step(13)
    assert sink.bar.tasks[0].completed == 13
    sink.open(8)
    assert sink.bar.tasks[0].completed == 8
    sink.close(SUMMARY)
    assert f"{row_line(12, 100, ROW)}\n" in shown
    assert " 12/100 eta 1:02:03" in shown
    assert sys.stderr is terminal
    assert terminal.getvalue().endswith("peak memory           12.34 GiB\n")


def test_jsonl_is_written_out_row_by_row(tmp_path):
    sink = Jsonl(SinkContext(tmp_path / "new" / "folder"))
    sink.open(0)
    sink.write(7, ROW)
    [row] = rows(sink.path)
    assert row.pop("time") > 1.7e9
    assert row == {"step": 7, **ROW}
    sink.close(SUMMARY)


def test_jsonl_is_strict(tmp_path):
    sink = Jsonl(SinkContext(tmp_path))
    sink.open(0)
    sink.write(1, {"loss": float("nan"), "grad_norm": float("inf"), "lr": 1e-3, "mfu": None})
    sink.close(SUMMARY)
    [row] = rows(sink.path)
    del row["time"]
    empty, non_finite = dict.fromkeys(("loss", "grad_norm", "mfu")), {"loss": "nan"}
    assert row == {"step": 1, "lr": 1e-3, **empty, "non_finite": {**non_finite, "grad_norm": "inf"}}


def test_jsonl_of_a_fresh_run_sets_older_files_aside(tmp_path, caplog):
    caplog.set_level(logging.INFO, "torchtitan")
    for run in range(3):
        write_jsonl(tmp_path, [run + 1])
    assert steps(tmp_path / "metrics.1.jsonl") == [1]
    assert steps(tmp_path / "metrics.2.jsonl") == [2]
    assert steps(tmp_path / "metrics.jsonl") == [3]
    assert len(caplog.messages) == 2
    told = "metrics.jsonl: an earlier run's file, renamed metrics.2.jsonl"
    assert caplog.messages[1].endswith(told)


def test_jsonl_of_a_resumed_run_goes_on_where_the_checkpoint_was(tmp_path, caplog):
    caplog.set_level(logging.INFO, "torchtitan")
    write_jsonl(tmp_path, [10, 20, 30, 40])
    write_jsonl(tmp_path, [21, 30], start_step=20)
    assert steps(tmp_path / "metrics.jsonl") == [10, 20, 21, 30]
    assert steps(tmp_path / "metrics.superseded.jsonl") == [30, 40]
    assert caplog.messages[0].endswith("2 rows past step 20 moved to metrics.superseded.jsonl")
    write_jsonl(tmp_path, [22], start_step=21)
    assert steps(tmp_path / "metrics.jsonl") == [10, 20, 21, 22]
    assert steps(tmp_path / "metrics.superseded.jsonl") == [30, 40, 30]
    assert caplog.messages[1].endswith("1 row past step 21 moved to metrics.superseded.jsonl")


def test_jsonl_that_is_rolled_back_is_as_that_of_a_resumed_run(tmp_path):
    write(Jsonl(SinkContext(tmp_path)), [(10, 1.0), (20, 2.0), (30, 3.0), (20, None), (21, 2.1)])
    assert steps(tmp_path / "metrics.jsonl") == [10, 20, 21]
    assert steps(tmp_path / "metrics.superseded.jsonl") == [30]


def test_jsonl_survives_a_torn_last_line(tmp_path, caplog):
    write_jsonl(tmp_path, [10, 20])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 30, "lo')
    write_jsonl(tmp_path, [21], start_step=20)
    assert steps(path) == [10, 20, 21]
    assert "dropped an incomplete line" in caplog.text
    assert not (tmp_path / "metrics.superseded.jsonl").exists()


def test_jsonl_completes_a_last_line_without_its_newline(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10}')
    write_jsonl(tmp_path, [11], start_step=10)
    assert steps(path) == [10, 11]


def test_jsonl_of_other_ranks_has_its_own_name(tmp_path):
    write_jsonl(tmp_path, [1, 2], rank=3)
    write_jsonl(tmp_path, [2], start_step=1, rank=3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["metrics.rank3.jsonl", "metrics.rank3.superseded.jsonl"]


def points(folder, name="loss"):
    """Steps and values of a scalar, as they are read back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def texts(folder):
    """The same of the text, by the reader that TensorBoard itself uses; the other forgets none."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    found = events.Tensors("run/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]


def write_tensorboard(folder, start_step, written, **about):
    sink = TensorBoard(SinkContext(folder, tensorboard_folder="boards", **about))
    write(sink, written.items(), start_step)


def test_tensorboard_holds_each_step_once_after_a_resume(tmp_path):
    write_tensorboard(tmp_path, 0, {10: 1.0, 20: 2.0, 30: 3.0, 40: 4.0})
    write_tensorboard(tmp_path, 20, {25: 2.5, 30: 7.0})
    assert points(tmp_path / "boards") == [(10, 1.0), (20, 2.0), (25, 2.5), (30, 7.0)]
    assert points(tmp_path / "boards", "tokens") == [(s, s) for s in (10, 20, 25, 30)]


def test_tensorboard_of_a_fresh_run_forgets_an_earlier_one(tmp_path):
    write_tensorboard(tmp_path, 0, {0: 9.0, 10: 1.0, 20: 2.0})
    write_tensorboard(tmp_path, 0, {5: 5.0})
    assert points(tmp_path / "boards") == [(5, 5.0)]


def test_tensorboard_that_is_rolled_back_forgets_later_points(tmp_path):
    losses = [(10, 1.0), (20, 2.0), (30, 3.0), (20, None), (25, 2.5)]
    write(TensorBoard(SinkContext(tmp_path)), losses)
    assert points(tmp_path / "tb") == [(10, 1.0), (20, 2.0), (25, 2.5)]


def test_tensorboard_shows_name_tags_and_recipe(tmp_path):
    about = {"run_name": "long", "tags": ("a", "b")}
    write_tensorboard(tmp_path, 0, {10: 1.0}, recipe={"training.steps": 30}, **about)
    for _ in range(2):  # resumed twice from the same step
        write_tensorboard(tmp_path, 10, {20: 1.0}, recipe={"data.note": "x|y\nz"}, run_name="short")
    assert texts(tmp_path / "boards") == [
        (1, "**long**\n\nTags: a, b\n\n| key | value |\n|---|---|\n| training.steps | 30 |"),
        (11, "**short**\n\n| key | value |\n|---|---|\n| data.note | x\\|y z |"),
    ]


def test_tensorboard_on_a_full_disk_says_so_and_does_not_hang(tmp_path, monkeypatch):
    # It writes in a thread of its own, which ends by the error that the caller is told of.
    monkeypatch.setattr(threading, "excepthook", lambda ended: None)
    sink = TensorBoard(SinkContext(tmp_path))
    sink.open(0)

    def fill():
        for step in range(1000):
            sink.write(step, ROW)

    with limited(resource.RLIMIT_FSIZE, 1000):  # as on a disk that is full
        with pytest.raises(OSError, match="File too large"):
            fill()
        with pytest.raises(OSError, match="File too large"):
            sink.close(SUMMARY)


def write_wandb(folder, start_step, written, **about):
    return write(WandB(SinkContext(folder, **about)), written.items(), start_step).run


@pytest.mark.gate
@pytest.mark.costs("starts the service of Weights & Biases")
def test_wandb_writes_an_offline_run(tmp_path, offline, monkeypatch):
    about = {"recipe": {"training": {"steps": 3}}, "tags": ("a", "b")}
    write_wandb(tmp_path / "run", 0, {1: 4.5, 2: 3.5}, **about)
    [(run, history)] = offline_runs(tmp_path / "run")
    assert run.project == "torchtitan"
    assert run.display_name == "run"
    assert list(run.tags) == ["a", "b"]
    assert not run.resume
    config = {update.key: update.value_json for update in run.config.update}
    assert json.loads(config["training"]) == {"steps": 3}
    assert history == [(1, 4.5), (2, 3.5)]
    # Everything is drawn over the step.
    [path] = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
    metrics = [record.metric for record in ended(path) if record.HasField("metric")]
    names = [(m.name or m.glob_name, m.step_metric) for m in metrics]
    assert names == [("step", ""), ("*", "step")]


def test_wandb_that_is_resumed_goes_on_with_the_same_run(tmp_path, offline):
    write_wandb(tmp_path, 0, {10: 1.0, 20: 2.0, 30: 3.0})
    write_wandb(tmp_path, 20, {30: 7.0, 40: 4.0})
    (first, before), (second, after) = offline_runs(tmp_path)
    assert first.run_id == second.run_id == (tmp_path / "wandb_run_id").read_text().strip()
    assert second.resume
    # Steps that come again are kept: W&B would drop them if they were its own steps.
    assert before + after == [(10, 1.0), (20, 2.0), (30, 3.0), (30, 7.0), (40, 4.0)]


def test_wandb_that_starts_afresh_is_another_run(tmp_path, offline):
    ids = [write_wandb(tmp_path, 0, {10: 1.0}).id for _ in range(2)]
    assert ids[0] != ids[1] == (tmp_path / "wandb_run_id").read_text().strip()


def test_wandb_that_is_rolled_back_keeps_the_steps_that_come_again(tmp_path, offline):
    write(WandB(SinkContext(tmp_path)), [(20, 2.0), (10, None), (11, 1.5), (20, 1.0)])
    assert [history for _, history in offline_runs(tmp_path)] == [[(20, 2.0), (11, 1.5), (20, 1.0)]]


def test_variables_of_wandb_win(tmp_path, offline, monkeypatch):
    import wandb

    words = {"RUN_ID": "mine", "NAME": "called", "TAGS": "x,y", "PROJECT": "shelf"}
    for name, value in words.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    (tmp_path / "wandb_run_id").write_text("earlier")
    wandb.teardown()  # it reads its variables once in a process
    write_wandb(tmp_path, 20, {21: 1.0}, run_name="other", tags=("a",))
    wandb.teardown()
    [(run, _)] = offline_runs(tmp_path)
    assert (run.run_id, run.display_name, list(run.tags)) == ("mine", "called", ["x", "y"])
    assert run.project == "shelf"
    assert run.resume


def mlflow_runs(folder):
    """The client of MLflow's file store in a folder, and its runs, the oldest first."""
    from mlflow import MlflowClient

    client = MlflowClient(folder.as_uri())
    experiment = client.get_experiment_by_name("torchtitan").experiment_id
    return client, client.search_runs([experiment], order_by=["attributes.start_time"])


def write_mlflow(folder, start_step, losses, **facts):
    write(MLflow(SinkContext(folder, **facts)), losses.items(), start_step)


def test_mlflow_keeps_one_run_through_a_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    recipe = {f"section.key_{number}": number for number in range(150)}
    out = tmp_path / "out"
    write_mlflow(out, 0, {1: 3.5, 2: float("nan")}, recipe=recipe, tags=("a",), run_name="first")
    write_mlflow(out, 1, {2: 3.25}, recipe=recipe, run_name="first")
    client, [run] = mlflow_runs(tmp_path / "store")
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params == {key: str(value) for key, value in recipe.items()}
    assert run.data.tags.keys() >= {"a", "summary/tps"}
    assert run.data.metrics["tokens"] == 2
    losses = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")]
    assert losses == [(1, 3.5), (2, pytest.approx(float("nan"), nan_ok=True)), (2, 3.25)]
    sink = write(MLflow(SinkContext(out)), [(1, 2.0)])  # afresh
    sink.write(1, {"validation_loss//a/../b@c.jsonl": 2.0})
    assert len(mlflow_runs(tmp_path / "store")[1]) == 2


@pytest.mark.slow  # needs a server that is not installed with this package
def test_mlflow_writes_to_its_server_and_outlives_it(tmp_path, monkeypatch, caplog):
    python = os.environ.get("TORCHTITAN_ORACLES", sys.executable)
    if subprocess.run([python, "-c", "import flask, mlflow"], capture_output=True).returncode:
        pytest.skip("no server of MLflow; TORCHTITAN_ORACLES may name a Python that has it")
    port = free_port()
    command = [python, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db"]
    monkeypatch.delenv("PYTHONPATH", raising=False)
    server = subprocess.Popen([*command, *store], cwd=tmp_path, start_new_session=True)
    try:
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None
            time.sleep(0.1)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        sink = MLflow(SinkContext(tmp_path / "out", recipe={"training.steps": 2}))
        with Meter([sink], **METER) as meter:
            meter.record(loss=4.5, units=1)
            meter.flush(1)
            run = sink.client.get_run(sink.run_id)
            assert (run.data.metrics["loss"], run.data.params) == (4.5, {"training.steps": "2"})
            os.killpg(server.pid, signal.SIGKILL)
            meter.flush(2)
        assert meter.summary()["failed_sinks"].startswith("MLflow (at step 2: ")
        assert caplog.text.count("the run continues without it") == 1
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(url):
    try:
        return urlopen(url, timeout=60).status == 200
    except OSError:
        return False


def test_sinks_of_rank_0_follow_the_settings(tmp_path):
    def names(**settings):
        return [type(s) for s in build_sinks(MetricsConfig(**settings), SinkContext(tmp_path))]

    assert names() == [Jsonl, Console]
    assert names(enable_tensorboard=True) == [Jsonl, TensorBoard, Console]
    assert names(enable_wandb=True, sinks=("mlflow", "wandb")) == [Jsonl, MLflow, WandB, Console]


MINE = """
class Own:
    def __init__(self, context): self.path = context.folder / "own"
    def open(self, start_step): self.path.write_text("open")
    def write(self, step, metrics): raise OSError("gone")
    def close(self, summary): self.path.write_text("closed")

class Broken(Own):
    def __init__(self, context): raise OSError("no credentials")

class Half:
    def open(self, start_step): pass
"""


@pytest.fixture
def mine(in_empty_folder, monkeypatch):
    """A module with sinks, and a package that offers one of them."""
    monkeypatch.syspath_prepend(".")
    Path("my_sinks.py").write_text(MINE)
    Path("offer-1.0.dist-info").mkdir()
    Path("offer-1.0.dist-info/METADATA").write_text("Name: offer\nVersion: 1.0\n")
    offered = "[torchtitan.sinks]\noffered = my_sinks:Own\n"
    Path("offer-1.0.dist-info/entry_points.txt").write_text(offered)
    yield
    sys.modules.pop("my_sinks", None)


@pytest.mark.parametrize("name", ["offered", "my_sinks:Own"])
def test_a_sink_of_ones_own_is_found_by_its_name(name, mine, tmp_path):
    assert missing(MetricsConfig(sinks=(name,))) == []
    [_, own, _] = build_sinks(MetricsConfig(sinks=(name,)), SinkContext(tmp_path))
    with Meter([own], **METER) as meter:
        for step in (1, 2):
            meter.flush(step)
    assert (tmp_path / "own").read_text() == "closed"
    assert meter.summary()["failed_sinks"].startswith("Own (at step 1: OSError: gone)")


def test_a_sink_that_cannot_be_made_is_left_out(mine, tmp_path, caplog):
    found = build_sinks(MetricsConfig(sinks=("my_sinks:Broken",)), SinkContext(tmp_path))
    assert [type(sink) for sink in found] == [Jsonl, Console]
    assert "Broken failed to start: no credentials; the run continues without it" in caplog.text


NO_SINKS = {
    "wandbb": "allowed: tensorboard, wandb, mlflow, offered; did you mean wandb?",
    "nowhere:Sink": "it cannot be imported: No module named 'nowhere'",
    "my_sinks:Sink": "my_sinks: it has no Sink",
    "my_sinks:Half": "it has no close and no write; add what torchtitan.metrics.sinks.Sink has",
}


@pytest.mark.parametrize("name", NO_SINKS)
def test_a_sink_that_does_not_exist_or_lacks_a_method_is_refused(name, mine):
    [(key, found)] = missing(MetricsConfig(sinks=(name,)))
    assert (key, f"{name}: {NO_SINKS[name]}" in found) == ("sinks", True), found


def test_sinks_of_other_ranks_are_a_file_or_none(tmp_path):
    context = SinkContext(tmp_path, rank=2)
    everything = MetricsConfig(enable_tensorboard=True, enable_wandb=True)
    assert build_sinks(everything, context) == []
    [sink] = build_sinks(MetricsConfig(save_for_all_ranks=True), context)
    assert sink.path == tmp_path / "metrics.rank2.jsonl"


def missing(config):
    return [problem[:2] for problem in config.problems(Context())]


def test_a_missing_package_is_found_before_the_run(monkeypatch):
    both = MetricsConfig(enable_tensorboard=True, enable_wandb=True)
    assert missing(both) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert missing(MetricsConfig()) == []
    assert missing(both) == [
        ("enable_tensorboard", 'TensorBoard is not installed: pip install "tensorboard>=2.18"'),
        ("enable_wandb", 'Weights & Biases is not installed: pip install "wandb>=0.19"'),
    ]


def test_a_folder_called_wandb_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    real = Path(importlib.util.find_spec("wandb").origin).parents[1]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if Path(p) != real)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    [(key, _)] = missing(MetricsConfig(enable_wandb=True))
    assert key == "enable_wandb"


def test_jsonl_keeps_rows_that_the_disk_has_no_room_for(tmp_path, caplog):
    sink = Jsonl(SinkContext(tmp_path))
    sink.open(0)
    sink.write(1, ROW)
    with limited(resource.RLIMIT_FSIZE, sink.path.stat().st_size + 9):
        sink.write(2, ROW)
        sink.write(3, ROW)
    told = f"{sink.path}: File too large; unwritten rows are kept in memory"
    assert caplog.messages == [told, told]
    sink.write(4, ROW)
    assert steps(sink.path) == [1, 2, 3, 4]
    sink.close(SUMMARY)
