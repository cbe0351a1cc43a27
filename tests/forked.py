"""Commands in a forked child of this process, which has imported torch already."""

import faulthandler
import multiprocessing
import os
import shutil
import sys
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from torchtitan.torch_private.compiler import forget_compiler_threads


class Done(NamedTuple):
    """How a child ended; a negative status is that of the signal that killed it."""

    status: int
    stdout: str
    stderr: str


class Started(NamedTuple):
    """A child that runs, and the folder of what it prints."""

    process: BaseProcess
    streams: Path

    def wait(self):
        self.process.join()
        out, err = ((self.streams / name).read_text() for name in ("out", "err"))
        shutil.rmtree(self.streams)
        return Done(self.process.exitcode or 0, out, err)


def start(action, folder):
    """Start an action in `folder`, in a process that leaves nothing behind in this one.

    Call this from the main thread only: a fork drops what other threads are in the middle of.
    """
    streams = Path(mkdtemp())
    words = (action, folder, streams / "out", streams / "err")
    process = multiprocessing.get_context("fork").Process(target=child, args=words)
    process.start()
    return Started(process, streams)


def run(action, folder):
    """Run an action in a child; what it and the processes that it starts print is returned, too."""
    return start(action, folder).wait()


def child(action, folder, out, err):
    """Run an action in this process, which was forked, with its output added to files; leave."""
    # Would wait for the thread of pytest's `faulthandler_timeout`, which a fork does not have.
    faulthandler.cancel_dump_traceback_later = lambda: None
    forget_compiler_threads()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for path, stream in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    # Those of the parent may be captured by pytest, and are not of this process.
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
    status = 1
    try:
        status = action()
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else leaving.code is not None
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Skips the exit handlers of pytest, which belong to the parent.
        os._exit(int(status or 0))
