"""What a process records of itself, and what it writes when it fails."""

import json
import multiprocessing
import os
import resource
import signal
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.reliability.trials import wait_until
from torchtitan.checks import load_job
from torchtitan.config import ConfigError
from torchtitan.flight_recorder import Recorder, read_traces, recorded, report, rescue
from torchtitan.flight_recorder.recorder import Terminated
from torchtitan.parallel import CommConfig, Launch
from torchtitan.tools.cli import main

DEBUG = str(Path(__file__).parents[3] / "train_configs/debug_model.toml")
SMALL = ["--training.seq_len=32", "--training.steps=2", "--validation.steps=1"]


def recorder(folder, rank=0, world_size=1, **place):
    launch = Launch(rank, world_size, local_rank=0, by_launcher=True)._replace(**place)
    return Recorder(CommConfig(), folder, launch, "cpu", shared=(ConfigError,))


def names(folder):
    return {path.name for path in (folder / "comm_traces").iterdir()}


def in_memory(folder, rank=0):
    """The file of a rank's notes in memory, by the first note in the folder of the run."""
    return Path(json.loads((folder / f"comm_traces/{rank}.step").read_text())["kept_at"])


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_step_is_written_to_memory_alone_and_found_there(has_memory, tmp_path, monkeypatch):
    if not has_memory:
        monkeypatch.setattr("torchtitan.flight_recorder.notes.MEMORY", tmp_path / "none")
    with recorder(tmp_path / "run", world_size=2) as mine:
        first, kept_at = content(tmp_path / "run"), in_memory(tmp_path / "run")
        for state, step in (("starting", 0), ("training", 1), ("training", 1000)):
            if step:
                mine.step(step)
            (trace,) = read_traces(tmp_path / "run/comm_traces")
            assert (trace.state, trace.step, trace.world_size) == (state, step, 2)
            assert trace.pid == os.getpid()
        assert content(tmp_path / "run") == first
    assert not kept_at.exists()
    (trace,) = read_traces(tmp_path / "run/comm_traces")
    assert (trace.state, trace.step, trace.kept_at) == ("finished", 1000, "")


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_note_is_copied_on_request(tmp_path):
    with recorder(tmp_path) as mine:
        mine.step(7)
        mine.copy_note()
        mine.step(8)
        assert json.loads((tmp_path / "comm_traces/0.step").read_text())["step"] == 7
        (trace,) = read_traces(tmp_path / "comm_traces")
        assert trace.step == 8


def killed(folder, rank, step):
    """A rank of three on this machine that is killed in a step."""

    def die():
        with recorder(folder, rank, 3) as mine:
            mine.step(step)
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=die)
    process.start()
    return process


def wait_for_end(process):
    """Without taking its status, as a parent that is busy: it stays a zombie."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("by", ["another rank", "the launcher", "the next start"])
def test_who_outlives_a_killed_rank_copies_its_last_note(by, tmp_path):
    wait_for_end(process := killed(tmp_path, 1, 5))
    kept_at = in_memory(tmp_path, 1)
    assert kept_at.exists()
    if by == "another rank":
        with pytest.raises(ValueError), recorder(tmp_path, 0, 3, local_size=3):
            raise ValueError
    elif by == "the launcher":
        rescue(tmp_path / "comm_traces", [0, 1, 2])
    else:
        with pytest.raises(ConfigError), recorder(tmp_path, 1, 3):
            raise ConfigError("a mistake: this start is refused, and the last run is looked into")
    assert not kept_at.exists()
    trace = next(t for t in read_traces(tmp_path / "comm_traces") if t.rank == 1)
    assert (trace.step, trace.kept_at, trace.fate) == (5, "", "lost")
    process.join()


def test_notes_of_others_are_left_alone(tmp_path, monkeypatch):
    """Those of a rank that lives, of another run, and files that only look like notes."""
    wait_for_end(process := killed(tmp_path / "other", 1, 5))
    with recorder(tmp_path / "run", 1, 3) as mine:
        mine.step(4)
        for folder in ("run", "other"):
            kept_at = in_memory(tmp_path / folder, 1)
            rescue(tmp_path / "run/comm_traces", range(3))
            assert kept_at.exists()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    rescue(tmp_path / "other/comm_traces", range(3))
    assert kept_at.exists()
    kept_at.unlink()
    process.join()


def test_a_report_says_that_the_notes_of_a_machine_are_gone(tmp_path):
    wait_for_end(process := killed(tmp_path, 1, 5))
    in_memory(tmp_path, 1).unlink()
    (lost, *_) = report(read_traces(tmp_path / "comm_traces"))[1:]
    host = socket.gethostname()
    assert lost == (
        f"rank 1 died or froze at an unknown step (the notes of its steps are gone with {host}, "
        "or still there) and left no message"
    )
    process.join()


def test_a_rank_by_itself_records_no_collectives(tmp_path, monkeypatch):
    for ranks, entries in ((1, "0"), (2, "2000")):
        monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
        recorder(tmp_path, world_size=ranks)
        assert os.environ["TORCH_FR_BUFFER_SIZE"] == entries


def test_good_run_leaves_its_steps_alone(tmp_path):
    assert main(["train", DEBUG, f"--job.dump_folder={tmp_path}", *SMALL]) == 0
    assert names(tmp_path) == {"0.step"}
    assert report(read_traces(tmp_path / "comm_traces")) == ["rank 0 finished at step 2"]


def test_a_run_may_have_many_open_files(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 2000:
        pytest.skip("a process may not open so many files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            opened.enter_context(open(os.devnull))
        assert main(["train", DEBUG, f"--job.dump_folder={tmp_path}", *SMALL]) == 0


def test_a_start_removes_the_tracebacks_of_all_earlier_ones(tmp_path):
    for restart in range(3):
        again = recorder(tmp_path, 1, 2, restart=restart)
        with pytest.raises(ValueError, match="wrong"), again:
            raise ValueError("wrong")
    assert names(tmp_path) >= {"1.traceback", "1.1.traceback", "1.2.traceback"}
    with recorder(tmp_path, 1, 2):
        assert "traceback" not in " ".join(names(tmp_path))


def test_error_of_all_ranks_leaves_no_trace(tmp_path):
    mine = recorder(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(ConfigError))
        stack.enter_context(mine).step(1)
        raise ConfigError("a mistake in the data")
    assert names(tmp_path) == {"0.step"}


def test_a_refused_start_restores_the_traces_of_the_earlier_run(tmp_path):
    with pytest.raises(ConfigError), recorder(tmp_path / "run"):
        raise ConfigError("a mistake in the recipe")
    assert not (tmp_path / "run").exists()
    for rank in (0, 5):
        with pytest.raises(ValueError), recorder(tmp_path, rank, 6):
            raise ValueError
    before = {path: path.read_bytes() for path in (tmp_path / "comm_traces").iterdir()}
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(ConfigError))
        stack.enter_context(recorder(tmp_path, 0, 2))
        assert names(tmp_path) == {"0.step", "0.stack"}
        raise ConfigError("a mistake in the recipe")
    assert {path: path.read_bytes() for path in (tmp_path / "comm_traces").iterdir()} == before


def test_a_rank_that_waits_for_others_in_vain_leaves_a_note(tmp_path):
    recorder(tmp_path, 0, 2).leave(dist.DistError, dist.DistError("too few ranks"), None)
    assert report(read_traces(tmp_path / "comm_traces"))[0].startswith("rank 1 left no traces")


def test_traces_of_an_earlier_run_are_removed(tmp_path):
    for rank in (0, 5):
        with pytest.raises(ValueError), recorder(tmp_path, rank, 6):
            raise ValueError
    assert {"0.json", "0.stack", "rank_0", "5.json", "rank_5", "5.step"} <= names(tmp_path)
    with recorder(tmp_path, 0, 2):
        pass
    assert names(tmp_path) == {"0.step"}


def fail(folder):
    with recorder(folder, dist.get_rank(), 2) as mine:
        mine.step(3)
        dist.all_reduce(torch.zeros(7))
        raise ValueError("no")


def test_ring_is_written_on_gloo(tmp_path):
    with pytest.raises(AssertionError, match="ValueError: no"):
        run_ranks(fail, 2, tmp_path)
    written = json.loads((tmp_path / "comm_traces/0.json").read_text())
    assert {tuple(ranks) for _, ranks in written["groups"].values()} == {()}, "all ranks, in short"
    traces = read_traces(tmp_path / "comm_traces")
    assert traces
    for trace in traces:
        assert (trace.fate, trace.step) == ("raised", 3)
        assert "test_recorder.py" in report([trace])[0]
        last = trace.last_finished
        assert last is not None
        assert str(last) == "all_reduce #1 on all (ranks 0 and 1)"
        assert last.tensors == "float32 [7]"


def collectives():
    """One of each that a layout uses, on a group of all and on one called pair."""
    pair = dist.new_group(group_desc="pair")
    dist.all_reduce(torch.zeros(3, dtype=torch.bfloat16))
    dist.all_gather([torch.zeros(4, 5)] * 2, torch.zeros(4, 5), group=pair)
    half, whole = torch.zeros(6), torch.zeros(12)
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(half, whole, group=pair)
    dist.all_to_all_single(torch.zeros(8), torch.zeros(8), group=pair)
    dist.barrier()
    return recorded()


def received(collective):
    return sum(shape.bytes for shape in collective.outputs)


def test_collectives_of_this_process():
    for found in run_ranks(collectives, 2):
        told = [
            (c.operation, c.group.purpose, c.sequence, c.bytes_in, received(c), c.group.ranks)
            for c in found[-5:]
        ]
        assert told == [
            ("all_reduce", "all", 1, 6, 6, (0, 1)),
            ("all_gather", "pair", 1, 80, 160, (0, 1)),
            # Gloo carries it out as an all-reduce.
            ("reduce_scatter", "pair", 2, 48, 48, (0, 1)),
            ("all_to_all", "pair", 3, 32, 32, (0, 1)),
            ("barrier", "all", 2, 0, 0, (0, 1)),
        ]
        assert found[-3].carried_out == "all_reduce"
        assert all("test_recorder.py" in c.caller for c in found[-5:])


def test_sigterm_outside_the_loop_ends_the_process_with_traces(tmp_path):
    with pytest.raises(Terminated) as raised, recorder(tmp_path):
        os.kill(os.getpid(), signal.SIGTERM)
    assert raised.value.code == 128 + signal.SIGTERM
    (trace,) = read_traces(tmp_path / "comm_traces")
    assert trace.fate == "terminated"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_rank_that_makes_no_progress_after_sigterm_says_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("torchtitan.flight_recorder.recorder.POLL_INTERVAL", 0.01)
    monkeypatch.setattr("torchtitan.flight_recorder.recorder.TERMINATION_TIMEOUT", 0.05)
    moved_on = signal.signal(signal.SIGTERM, lambda number, frame: None)
    with recorder(tmp_path) as mine:
        # As in the loop, where the signal is a request.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        for step in (3, 4):
            mine.step(step)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until((tmp_path / "comm_traces/0.json").exists)
        (trace,) = read_traces(tmp_path / "comm_traces")
        assert (trace.fate, trace.step) == ("stuck", 4)
        assert "hung at step 4 outside communication" in report([trace])[0]
    # It was slow and no more: a good end takes that back.
    assert names(tmp_path) == {"0.step"}
    signal.signal(signal.SIGTERM, moved_on)


@pytest.mark.parametrize(
    ("starts", "pause", "slow", "stuck"),
    [
        ([0.0, 13.0, 26.0], None, [46.0, 64.0], 66.0),
        ([0.0], None, [299.0], 301.0),
        ([0.0, 13.0, 26.0], "validation", [66.0, 325.0], 327.0),
    ],
)
def test_a_request_to_stop_in_a_long_step_is_no_failure(
    tmp_path, monkeypatch, starts, pause, slow, stuck
):
    """It is as long as the step before; a step that is far longer is a failure all the same."""
    monkeypatch.setattr("torchtitan.flight_recorder.recorder.POLL_INTERVAL", 0.01)
    monkeypatch.setattr("torchtitan.flight_recorder.recorder.TERMINATION_TIMEOUT", 0.05)
    now, looks = [0.0], [0]

    def clock():
        looks[0] += threading.current_thread().name == "flight recorder"
        return now[0]

    def wait_for_a_look():
        """The next one is over when the one after it begins."""
        until = looks[0] + 2
        wait_until(lambda: looks[0] >= until)

    monkeypatch.setattr("torchtitan.flight_recorder.recorder.time.monotonic", clock)
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    with recorder(tmp_path, 0, 1024) as mine:
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        for number, at in enumerate(starts, 1):
            now[0] = at
            mine.step(number)
        mine.timeline = SimpleNamespace(paused_in=pause)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_a_look()
        for now[0] in slow:
            wait_for_a_look()
            assert not (tmp_path / "comm_traces/0.json").exists()
        now[0] = stuck
        wait_until((tmp_path / "comm_traces/0.json").exists)
    signal.signal(signal.SIGTERM, before)


def test_a_rank_that_is_asked_to_stop_sees_at_one_look_who_failed(tmp_path, monkeypatch):
    mine = recorder(tmp_path, 0, 1024)
    slow, failed = recorder(tmp_path, 1, 1024), recorder(tmp_path, 700, 1024)
    (tmp_path / "comm_traces").mkdir()
    slow._write("", "other", [])
    assert not mine._others_failed()
    with pytest.raises(ValueError), failed:
        raise ValueError
    opened = []
    monkeypatch.setattr(Path, "open", lambda path, *_: opened.append(str(path)))
    monkeypatch.setattr(Path, "exists", lambda path: opened.append(str(path)))
    assert mine._others_failed()
    assert opened == []


def test_a_rank_that_is_asked_for_a_trace_is_not_terminated(tmp_path, monkeypatch):
    monkeypatch.setattr("torchtitan.flight_recorder.recorder.POLL_INTERVAL", 0.01)
    monkeypatch.setattr("torchtitan.flight_recorder.recorder.TERMINATION_TIMEOUT", 0.05)
    before = signal.signal(signal.SIGPROF, lambda number, frame: None)
    with recorder(tmp_path) as mine:
        mine.step(4)
        os.kill(os.getpid(), signal.SIGPROF)
        threading.Event().wait(0.3)
        assert not (tmp_path / "comm_traces/0.json").exists()
    signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize("prefix", ["rank_1", "elsewhere/rank_"])
def test_prefix_that_hides_the_rank_is_refused(prefix):
    with pytest.raises(
        ConfigError, match=r"comm.save_traces_file_prefix: .* wanted the start of a file name"
    ):
        load_job(None, [f"--comm.save_traces_file_prefix={prefix}"], 1, "cpu")
