"""A request to stop may come in two forms, also when the run has saved and is leaving."""

import signal
import subprocess
import sys

import pytest

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
