"""A launcher as a forked child of this process, and its ranks as forked children of that."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
    SubprocessHandler,
)

from tests.forked import child
from torchtitan.tools.cli import act

ROOT = Path(__file__).parent.parent
OURS = [sys.executable, "-m", "torchtitan"]
CLONE_NEWNS = 0x00020000
"""A namespace of mounts, in linux/sched.h."""


class Forked:
    """A process that runs a function and leaves with what it returns, used like a Popen."""

    def __init__(self, function, environment, stdout, stderr):

        def act():
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.clear()
            os.environ.update(environment)
            torch.set_num_threads(1)  # else its autograd threads race to replace the parent's pool
            try:
                return function()
            except Exception as error:
                sys.excepthook(type(error), error, error.__traceback__)
                return 1

        self._output, words = stdout, (act, ROOT, stdout, stderr)
        self._process = multiprocessing.get_context("fork").Process(target=child, args=words)
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout=None):
        self.wait(timeout)
        return self._output.read_text(), ""

    def send_signal(self, number):
        os.kill(self.pid, number)


def start(words, environment, stdout, stderr=None, before=lambda: None):
    """Start a command in the root: forked if it is ours, `python -m torchtitan`, else as it is.

    Args:
        stdout: file to which its output is added; errors too, unless there is `stderr`.
        before: called in the forked process, before the command.
    """
    stderr = stderr or stdout
    if [*words[:3]] != OURS:
        own = {"env": environment, "text": True, "start_new_session": True}
        with stdout.open("a") as output, stderr.open("a") as errors:
            return subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=errors, **own)

    def command():
        SubprocessHandler._popen = _start_rank
        before()
        return act(words[3:])

    return Forked(command, environment, stdout, stderr)


def _start_rank(handler, words, environment):
    python, *options, module = words[:4]
    assert [python, *options] == [sys.executable, "-u", "-m"]
    verb = {"torchtitan.train": ["train"], "torchtitan": []}[module]
    output, errors = (Path(file.name) for file in (handler._stdout, handler._stderr))
    return Forked(lambda: act([*verb, *words[4:]]), environment, output, errors)


def mount(*words):
    """Mount something that only this process and those that it starts see."""
    call("unshare", CLONE_NEWNS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", *words], check=True)


def call(name, *arguments):
    """Call a function of the C library that returns 0, as Python has it since 3.12."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), name)
