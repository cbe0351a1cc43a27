"""Asking a run for a trace, and what is said where it does not answer."""

import json
import threading

import pytest

from tests.run_folders import note, row, write_run
from torchtitan.config import ConfigError
from torchtitan.profiling import REQUEST_FILE
from torchtitan.tools.history import RunHistory
from torchtitan.tools.profile import NoAnswer, request_trace

# More than a process number can be.
NOBODY = 2**22 + 1


def alive(folder):
    write_run(folder, [row(1)])
    for rank in range(2):
        note(folder, rank, "training", 7)
    return folder


def test_the_traces_of_all_ranks_are_waited_for(tmp_path):
    folder, told = alive(tmp_path / "run"), []
    (folder / "profile_traces/iteration_3_on_request").mkdir(parents=True)
    (folder / "profile_traces/iteration_3_on_request/rank0_trace.json").touch()

    def answer():
        asked = folder / REQUEST_FILE
        while not asked.exists():
            pass
        assert json.loads(asked.read_text()) == {"steps": 3}
        asked.unlink()
        new = folder / "profile_traces/iteration_11_on_request"
        new.mkdir()
        for rank in range(2):
            (new / f"rank{rank}_trace.json").touch()

    run = threading.Thread(target=answer)
    run.start()
    found = request_trace(folder, 3, 20, told.append)
    run.join()
    assert found == folder / "profile_traces/iteration_11_on_request"
    assert told[0].startswith(f"requested from {folder} a trace of 3 steps; it is in step 7")
    assert told[-1].startswith("2 of 2 ranks wrote their traces")


def test_a_run_that_does_not_answer_is_given_up(tmp_path):
    folder = alive(tmp_path)
    with pytest.raises(NoAnswer, match=r"no traces of all ranks in 0\.1 seconds; the run is in st"):
        request_trace(folder, 1, 0.1, lambda line: None)
    assert not (folder / REQUEST_FILE).exists()


def test_a_run_that_ends_meanwhile_is_told(tmp_path):
    folder = alive(tmp_path)

    def end(line):
        for rank in range(2):
            note(folder, rank, "finished", 9)

    with pytest.raises(NoAnswer, match=r"the run ended before .*: it finished at step 9"):
        request_trace(folder, 1, 20, end)


def test_who_asks_twice_is_refused(tmp_path):
    folder = alive(tmp_path)
    (folder / REQUEST_FILE).write_text("{}")
    with pytest.raises(ConfigError, match="a trace was already requested"):
        request_trace(folder, 1, 1)


def test_a_run_that_is_over_is_refused(tmp_path):
    folder = write_run(tmp_path, [row(1)])
    with pytest.raises(ConfigError, match="there is no run to trace; the last one unknown: its r"):
        request_trace(folder, 1, 1)
    note(folder, 0, "finished", 9)
    with pytest.raises(ConfigError, match="the last one finished at step 9"):
        request_trace(folder, 1, 1)
    note(folder, 0, "training", 9, pid=NOBODY)
    with pytest.raises(ConfigError, match="stopped without a message at step 9: rank 0 is gone"):
        request_trace(folder, 1, 1)


def test_processes_of_another_machine_may_be_alive(tmp_path):
    note(tmp_path, 0, "training", 9, pid=NOBODY)
    path = tmp_path / "comm_traces/0.step"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "elsewhere"}))
    assert RunHistory(tmp_path).state().is_alive
