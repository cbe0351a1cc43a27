"""Records the activity of this process, to explain a failure of it or of another rank.

A process that is killed can write nothing, so it records beforehand: each step into one line of a
file in memory, which costs microseconds, and each collective into the ring buffer of the Flight
Recorder of torch. At its end it copies that line to the folder of the run. The surviving ranks
write their buffers out. They notice soon: gloo raises an error in them, the watchdog of NCCL ends
them and writes the buffer itself, and a launcher sends them SIGTERM.

A thread watches the main one, which may never return to Python. It writes the traces of a rank that
makes no progress after SIGTERM, for much longer than a step takes or because another rank failed,
and ends one that waits too long in a send or receive of gloo, as torch cannot change the timeouts
of gloo after the group is made.

No other rank is asked for anything, since after a failure it may be gone: one listing of the folder
shows whose traceback is there.
"""

import faulthandler
import itertools
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import torch.distributed as dist

from torchtitan import parallel
from torchtitan.flight_recorder import notes
from torchtitan.flight_recorder.diagnosis import describe_rank
from torchtitan.flight_recorder.notes import NoteFile, note_path, read_note
from torchtitan.flight_recorder.records import place
from torchtitan.flight_recorder.traces import Failure, Kind, State, read_rank
from torchtitan.logging import logger
from torchtitan.parallel import CommConfig, Launch
from torchtitan.timeline import Timeline
from torchtitan.torch_private.distributed import flight_records, group_members

# Seconds after SIGTERM in which a rank should have reached its next step, or exited, unless steps
# are longer; a launcher, such as torchrun, waits 30 before it kills.
TERMINATION_TIMEOUT = 5.0
# A step that takes as many times the one before is not only slow.
LONG_STEPS = 3.0
# Seconds between two looks at the main thread.
POLL_INTERVAL = 1.0
# Seconds; gloo marks a collective as done after the program has continued.
COMPLETION_DELAY = 0.1
KINDS = ("step", "json", "stack", "gloo")
# Notes until the end of the first step: of the start and of that step.
FIRST_STEP = 2
# What functions that wait for a send or receive are called, in torch and here.
P2P = re.compile(r"send|recv|p2p|exchange", re.IGNORECASE)
COMMUNICATION = tuple(f"{Path(str(module.__file__)).parent}{os.sep}" for module in (dist, parallel))

Frames = Iterable[tuple[FrameType, int]]
"""Frames with their lines, innermost first."""


class Recorder:
    """A recorder to make before the process group and to enter while the group exists.

    It writes nothing before that, when the run may still be refused; the files of an earlier run
    are restored if it is refused later.
    """

    def __init__(
        self,
        config: CommConfig,
        dump_folder: Path,
        launch: Launch,
        device_type: str,
        shared: tuple[type[BaseException], ...] = (),
    ) -> None:
        """Errors of the types `shared` are raised by all ranks alike, so they leave no trace."""
        self.launch, self.rank, self.world_size = launch, launch.rank, launch.size
        # Tracebacks of earlier starts are kept.
        restart = f".{launch.restart}" if launch.restart else ""
        self.traceback_suffix = f"{restart}.traceback"
        self.traceback_file = f"{self.rank}{self.traceback_suffix}"
        self.folder = dump_folder / config.save_traces_folder
        # A single rank never waits for others.
        entries = config.trace_buf_size if launch.size > 1 else 0
        self.prefix, self.has_ring = config.save_traces_file_prefix, entries > 0
        self.device_type, self.shared, self.host = device_type, shared, socket.gethostname()
        self.at = self.notes = 0
        self.first_limit, self.limit = config.init_timeout_seconds, config.train_timeout_seconds
        self.timeline: Timeline | None = None
        """Timeline of the run, once it is built; it tells of pauses."""
        self._over = threading.Event()
        self._began = self._took = 0.0
        self.is_failure_logged = False
        """Whether the log names the error of this rank, and the file of its traceback."""

        # Torch reads these when the first process group is made.
        os.environ["TORCH_FR_BUFFER_SIZE"] = str(entries)
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{self.folder}/{self.prefix}"
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"

    def leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process after an error that is logged already, or before all ranks have joined.

        This is an exit callback, for the time from joining the other ranks to leaving them.
        """
        if error is not None and not self.notes:
            self._begin()
            self._keep_note()
        elif self.is_failure_logged:
            raise SystemExit(1) from error

    def _begin(self) -> None:
        """Replace the files of an earlier run by the first note of this one."""
        self._made = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        notes.settle(note_path(self.folder, self.rank))
        self._found = {path: path.read_bytes() for path in self._files(self.rank)}
        if self.rank == 0:
            found = [path.stem for path in self.folder.glob("*.step")]
            for other in [int(stem) for stem in found if stem.isdecimal()]:
                if other >= self.world_size:
                    notes.settle(note_path(self.folder, other))
                    self._found |= {path: path.read_bytes() for path in self._files(other)}
        for path in self._found:
            path.unlink(missing_ok=True)
        self._file = NoteFile()
        self._note("starting", 0)
        self.copy_note()

    def _undo(self) -> None:
        """Restore the files of the earlier run, as this one was refused."""
        self._file.remove()
        for path in self._files(self.rank):
            path.unlink()
        for path, content in self._found.items():
            path.write_bytes(content)
        for path in self._made:
            with suppress(OSError):  # another rank has files there
                path.rmdir()

    def __enter__(self) -> Self:
        self._begin()
        self._crash = open(self.folder / f"{self.rank}.stack", "w", encoding="utf-8")
        self._handles_crashes = not faulthandler.is_enabled()
        if self._handles_crashes:
            faulthandler.enable(self._crash)
        # A handler in Python runs when the main thread is back there; this pipe is written at once.
        self._handler = signal.signal(signal.SIGTERM, end)
        self._signals, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._previous = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, name="flight recorder", daemon=True)
        self._watcher.start()
        return self

    def step(self, step: int) -> None:
        """Note that this rank is in `step` from now on."""
        now = time.monotonic()
        # Before the first step there is none whose time is known.
        self._took, self._began = now - self._began if self.at else 0.0, now
        self._note("training", step)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        signal.set_wakeup_fd(self._previous)
        self._watcher.join()
        os.close(self._wake)
        os.close(self._signals)
        if self._handles_crashes:
            faulthandler.disable()
        self._crash.close()
        if isinstance(error, self.shared) and not self.at:
            self._undo()
        elif error is None or isinstance(error, self.shared):
            for path in self._files(self.rank):
                if path.suffix != ".step":
                    path.unlink()
            self._note("ended" if error else "finished", self.at)
            self._keep_note()
        else:
            self._write(*evidence(error))
            if not isinstance(error, Terminated):
                text = "".join(traceback.format_exception(error))
                notes.save(self.folder / self.traceback_file, text.encode())
            self._keep_note()
            self._log_failure()
            notes.rescue(self.folder, self.launch.neighbors)
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, self._handler)

    def _watch(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        asked_at = asked_in = since = 0.0
        has_looked = False
        waiting: FrameType | None = None
        signals = select.poll()  # `select.select` refuses descriptors from 1,024 on
        signals.register(self._signals, select.POLLIN)
        while not self._over.wait(POLL_INTERVAL):
            top, now = sys._current_frames()[main], time.monotonic()
            if signals.poll(0):
                # SIGPROF asks for a trace of torch's profiler, and the run continues.
                if os.read(self._signals, 1)[0] != signal.SIGPROF:
                    asked_at, asked_in, has_looked = now, self.notes, False
            elif asked_in == self.notes and now - asked_at > TERMINATION_TIMEOUT:
                others_failed, has_looked = not has_looked and self._others_failed(), True
                if others_failed or now - self._began > self._patience():
                    frames = list(traceback.walk_stack(top))
                    self._write("", "p2p" if waits_in_p2p(frames) else "other", frames)
                    asked_in = 0
                if others_failed:
                    self._keep_note()
                    os._exit(1)  # there is nothing to wait for
            # A frame that is held is not made again, so the same one is the same call.
            held, waiting = waiting, top if waits_in_p2p(traceback.walk_stack(top)) else None
            if waiting is None or waiting is not held:
                since = now
            elif now - since > self._limit():
                error = f"TimeoutError: nothing arrived within {self._limit()} seconds"
                self._write(error, "p2p", traceback.walk_stack(top))
                where = "".join(traceback.format_stack(top))
                notes.save(self.folder / self.traceback_file, f"{where}{error}\n".encode())
                self._keep_note()
                self._log_failure()
                os._exit(1)

    def _others_failed(self) -> bool:
        with os.scandir(self.folder) as found:
            names = {entry.name for entry in found} - {self.traceback_file}
        written = [name for name in names if name.endswith(self.traceback_suffix)]
        return any(name.removesuffix(self.traceback_suffix).isdecimal() for name in written)

    def _limit(self) -> int:
        """The timeout in seconds, which is a different one until the end of the first step."""
        return self.limit if self.notes > FIRST_STEP else self.first_limit

    def _patience(self) -> float:
        """Seconds after which a step is not only slow.

        Nothing is known of the first one, or of a pause: a validation, a save.
        """
        is_paused = self.timeline is not None and self.timeline.paused_in
        known = LONG_STEPS * self._took
        return max(self.first_limit, known) if is_paused or self.notes == FIRST_STEP else known

    def copy_note(self) -> None:
        """Copy the newest note to the folder of the run, while later ones are in memory."""
        kept_at = {"kept_at": str(self._file.path)}
        notes.save_note(note_path(self.folder, self.rank), self._newest | kept_at)

    def _keep_note(self) -> None:
        """Move the last note to the folder of the run; if the disk is full, it stays in memory."""
        if notes.save_note(note_path(self.folder, self.rank), self._newest):
            self._file.remove()

    def _note(self, state: State, step: int) -> None:
        self._newest = {
            "state": state,
            "step": step,
            "world_size": self.world_size,
            "time": time.time(),
            "pid": os.getpid(),
            "host": self.host,
            "restart": self.launch.restart,
        }
        self._file.write(self._newest)
        self.at, self.notes = step, self.notes + 1

    def _write(self, error: str, kind: Kind, frames: Frames) -> None:
        """Write the evidence of a failure; `frames` innermost first."""
        where = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in frames]
        # All ranks write this: a group of all ranks, in each of them, would be their square.
        groups = {
            name: (purpose, [] if len(ranks) == self.world_size else ranks)
            for name, (purpose, ranks) in group_members().items()
        }
        failure = Failure(time.time(), error, kind, place(where), groups)
        notes.save(self.folder / f"{self.rank}.json", json.dumps(vars(failure)).encode())
        if self.has_ring:
            time.sleep(COMPLETION_DELAY)
            rings = flight_records(self.device_type)
            names = (f"{self.prefix}{self.rank}", f"{self.rank}.gloo")
            for name, ring in zip(names, rings, strict=False):
                notes.save(self.folder / name, ring)

    def _log_failure(self) -> None:
        if self.world_size > 1:
            message = describe_rank(read_rank(self.folder, self.rank, self.prefix))
            where = self.folder / self.traceback_file
            found = f"; traceback: {where}" if where.exists() else ""
            self.is_failure_logged = where.exists()
            logger.error("%s%s; for all ranks: torchtitan trace %s", message, found, self.folder)

    def _files(self, rank: int) -> list[Path]:
        """Return the files of a rank, from this run or an earlier one."""
        names = [f"{self.prefix}{rank}", *(f"{rank}.{kind}" for kind in KINDS)]
        found = [path for name in names if (path := self.folder / name).exists()]
        note = note_path(self.folder, rank)
        if self.launch.restart or note not in found:
            return found
        # The note tells their names: a look at the files of all ranks would grow with the ranks.
        restart = read_note(note).get("restart", 0)
        names = [f"{rank}.traceback", *(f"{rank}.{n}.traceback" for n in range(1, restart + 1))]
        return [*found, *(path for name in names if (path := self.folder / name).exists())]


class Terminated(SystemExit):
    """SIGTERM arrived outside of the loop, where nothing is lost by exiting."""


def end(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM; a process that is failing already has its traces to write."""
    if sys.exception() is None:
        raise Terminated(128 + number)


def evidence(error: BaseException) -> tuple[str, Kind, Frames]:
    """The message, kind and frames of an error; for a chain of errors, of the root cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = list(traceback.walk_tb(error.__traceback__))[::-1]
    words = " ".join(f"{type(error).__name__}: {error}".strip(": ").split())
    # Errors of gloo have no type of their own.
    of_gloo = isinstance(error, RuntimeError) and "gloo" in words.lower()
    if isinstance(error, Terminated):
        return words, "terminated", frames
    if of_gloo or isinstance(error, dist.DistError):
        return words, "p2p" if waits_in_p2p(frames) else "collective", frames
    return words, "other", frames


def waits_in_p2p(frames: Frames) -> bool:
    """Whether one of the innermost frames is a function that waits for a send or receive."""
    codes = [frame.f_code for frame, _ in itertools.islice(frames, 4)]
    return any(
        P2P.search(code.co_qualname) and code.co_filename.startswith(COMMUNICATION)
        for code in codes
    )
