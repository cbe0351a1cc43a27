"""A request to stop may come in two forms, also when the run has saved and is leaving."""

import re
import signal
import subprocess
import sys

import pytest

from torchtitan.resilience import exit_codes
from torchtitan.resilience.stop import SIGNALS, status_of_stop

SCRIPT = """
import os, signal, sys
from torchtitan.resilience.stop import StopSignal
first, *then = (getattr(signal, name) for name in sys.argv[1:])
with StopSignal() as stop:
    os.kill(os.getpid(), first)
    assert stop.requested
for number in then:
    os.kill(os.getpid(), number)
"""
CLOSED = """
import os, signal, sys
from torchtitan.resilience.stop import StopSignal
if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
with StopSignal() as stop:
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGHUP)
    assert stop.requested == ("nohup" not in sys.argv)
"""
SAVED = """
import os, signal
from torchtitan.resilience.stop import IS_LAST, SIGNALS, StopSignal
IS_LAST.set(True)
with StopSignal() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
for number in SIGNALS * 2:
    os.kill(os.getpid(), number)
"""
COMPILING = """
import os, signal, subprocess, sys, time
import torch
from torchtitan.resilience.stop import StopSignal, handled
from torchtitan.torch_private.compiler import compilers_spared

def backend(graph, inputs):
    program = subprocess.Popen(["sleep", "0.3"])  # a C++ compiler
    os.killpg(0, getattr(signal, sys.argv[1]))
    assert program.wait() == 0
    return graph.forward

with StopSignal() as stop, compilers_spared(handled()):
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(()))
    assert stop.requested
"""


def test_a_run_that_saved_is_requeued_unless_its_user_stopped_it():
    stopped = {by: status_of_stop(by, True) for by in (*SIGNALS, None)}
    requeued = {by for by, code in stopped.items() if code == 75}
    assert requeued == {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}
    assert set(stopped.values()) == {0, 75}
    assert status_of_stop(signal.SIGTERM, False) == 1
    codes = re.findall(r"^\| (\d.*?) \|", exit_codes.page(), re.MULTILINE)
    assert codes == ["0", "1", "2", "3", "75", "128 + n"]


@pytest.mark.gate  # it imports torch's compiler
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_programs_of_a_compilation_do_not_end_on_a_request(name):
    """A terminal sends it to all of them."""
    command = [sys.executable, "-c", COMPILING, name]
    done = subprocess.run(command, capture_output=True, start_new_session=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [(CLOSED,), (CLOSED, "nohup"), (SAVED,)],
    ids=["a closed terminal", "nohup", "after the last save"],
)
def test_signals_that_end_nothing(words):
    done = subprocess.run([sys.executable, "-c", *words], capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("names", "status"),
    [
        ("SIGUSR1 SIGTERM", 0),
        ("SIGTERM SIGUSR1", 0),
        ("SIGINT SIGUSR1", 0),
        ("SIGUSR1 SIGTERM SIGTERM", -signal.SIGTERM),
        ("SIGUSR1 SIGUSR1", -signal.SIGUSR1),
    ],
)
def test_the_other_form_of_a_request_may_come_late(names, status):
    done = subprocess.run([sys.executable, "-c", SCRIPT, *names.split()], capture_output=True)
    assert done.returncode == status, done.stderr
