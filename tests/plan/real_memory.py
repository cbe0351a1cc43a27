"""Peaks of the tensors of real ranks, by torch's memory tracker, and those of their plans."""

import gc
from contextlib import closing, contextmanager
from typing import NamedTuple
from unittest import mock

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from torchtitan.build import Observer, build
from torchtitan.device import Device
from torchtitan.parallel import Launch, open_world
from torchtitan.plan.expansion import expand
from torchtitan.plan.fake_rank import record
from torchtitan.plan.recording import IN_PARTS
from torchtitan.timeline import Timeline
from torchtitan.trainer import Trainer

MOMENTS = {"forward": "forward", "backward": "backward", "clip": "update", "optimizer": "update"}
"""Moment of a peak in each phase; other phases belong to what was before."""


class Peak(NamedTuple):
    """Largest sum of the bytes of a rank's tensors in a step."""

    bytes: int
    moment: str
    """`forward`, `backward` or `update`."""


class Tracker(MemTracker):
    """Torch's tracker, which counts each storage once, for modules that run several times a step.

    It is entered before anything is built, so that it knows all tensors of the process.
    """

    def __init__(self):
        super().__init__()
        self.phase, self.moment = "start", "start"
        self.is_measuring = False
        # Statistics by module, which torch refuses for several microbatches, are not needed.
        self._mod_tracker = mock.MagicMock(is_bw=False, parents=())

    def measure(self):
        """Find the peak from now on."""
        self._peak_mem, self._peak_mem_snap = {}, {}

    def peak(self):
        """Return the peak since `measure`."""
        return Peak(self._peak_mem[torch.device("cpu")], self.moment)

    def _update_peak_stats(self, peak_state):
        now = self._curr_mem_snap.get(torch.device("cpu"), {}).get("Total", 0)
        if now > self._peak_mem.get(torch.device("cpu"), 0):
            self.moment = self.phase
            self._peak_mem[torch.device("cpu")] = now

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(kind.__module__.startswith("torchao.") for kind in types):
            return NotImplemented  # such tensors first, for the operators that they are made of
        if (whole := IN_PARTS.get(str(function._overloadpacket))) is not None:
            with self:  # the operators in one of our own are tensors of the process too
                return whole(*args)
        return super().__torch_dispatch__(function, types, args, kwargs)


def measured(job):
    """Return the peak of this rank in a step after the first.

    It is the least of three: threads of gloo may hold a tensor for a moment after a collective.
    """
    tracker, enter = Tracker(), Timeline.phase

    @contextmanager
    def phase(timeline, name):
        tracker.phase = MOMENTS.get(name, tracker.phase)
        with enter(timeline, name):
            yield

    degrees, device = job.degrees(Launch.read().size), Device("cpu")
    with (
        open_world(degrees, job.comm, device) as world,
        mock.patch.object(Timeline, "phase", phase),
        tracker,
    ):
        run = build(job, world, Observer(sinks=[]))
        trainer, read = Trainer(run), type(run.batches).__next__

        def tracked(batches):
            found = read(batches)  # in part by threads, of which the tracker does not know
            tracker.track_external(*(t for each in found[0] for t in tensors_of(each)))
            return found

        with (
            closing(run.batches),
            run.meter,
            mock.patch.object(type(run.batches), "__next__", tracked),
        ):
            trainer.step()
            gc.collect()
            gc.disable()
            peaks = []
            for _ in range(3):
                tracker.phase = "start"
                tracker.measure()
                trainer.step()
                peaks.append(tracker.peak())
            gc.enable()
    return min(peaks)


def tensors_of(batch):
    """Yield the tensors of a batch."""
    return (each for each in vars(batch).values() if isinstance(each, torch.Tensor))


def planned(job, ranks, rank):
    """Return the peak of a rank in its plan."""
    step = expand(record(job, ranks, rank), job.accumulation(job.degrees(ranks)))
    moments, moment = ["start"], "start"  # the state before the step is first
    for part in step.parts:
        if part.action is not None:
            moment = "forward" if part.action.kind == "F" else "backward"
        for segment in part.segments:
            moment = "update" if segment.name == "norm" else moment
            moments.append(moment)
    levels = zip(step.levels(), moments, strict=True)
    found = (Peak(level.total(), moment) for (_, level), moment in levels)
    return max(found, key=lambda peak: peak.bytes)
