"""Runs the recorded segments of a rank on a model of its device: what waits for what.

A rank has a host that issues work, a stream that computes, and streams that send. The recording has
the order of issue; the rest is known of PyTorch on a CUDA device:

    kernels         start when issued, after those before them; the host takes `Hardware.host_us`
                    for each, and `Hardware.dispatch_us` for an operator on a DTensor
    FSDP's gathers  are issued a block ahead: in the forward as the host is ahead of the device, in
                    the backward as FSDP prefetches. At most two are held.
    its reductions  start when the gradients are there, and overlap with the backward of the next
                    block. A reduce-scatter waits for the one before, the end of a backward for all.
    sends           of ring attention overlap with the next kernel
    all others      are waited for at once; with asynchronous tensor parallelism, for the first
                    chunk alone if the product next to them takes longer than they do

Collectives that overlap with kernels share a link, so they follow each other. They also take
multiprocessors and memory bandwidth from these kernels, which `CONTENTION` slows down meanwhile. On
a CPU the host computes, and nothing overlaps.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from torchtitan.plan.expansion import StepSegment
from torchtitan.plan.fake_rank import REDUCED, RankRecording
from torchtitan.plan.hardware import Hardware
from torchtitan.plan.kernel_time import kernel_seconds
from torchtitan.plan.messages import message_seconds, nodes
from torchtitan.plan.recording import DISPATCH, Kernel, Message

COMPUTE, HOST = "compute", "host"
CONTENTION: Final = 1.35
"""Time of kernels during a collective of NCCL, relative to the same kernels alone: products on H100
become 30 to 40 % slower (pytorch/pytorch, pull request 179937)."""


class Interval(NamedTuple):
    """Work in a lane of a picture of a step, in seconds since its start."""

    start: float
    end: float
    name: str


@dataclass
class _Piece:
    """Message, or kernels that are issued one after the other."""

    seconds: float
    issue: float = 0.0
    """Seconds of the host."""
    message: Message | None = None


class DeviceStreams:
    """Host and streams of a rank; all times are seconds."""

    def __init__(
        self, source: RankRecording, hardware: Hardware, *, chunks: bool, turns: float = 1.0
    ) -> None:
        """
        Args:
            turns: number of ranks that take turns on a core.
            chunks: whether tensor-parallel collectives overlap with products, chunk by chunk.
        """
        self.source, self.hardware, self.chunks = source, hardware, chunks
        self.turns = turns
        self.issue, self.dispatch = (
            turns * each * 1e-6 for each in (hardware.host_us, hardware.dispatch_us)
        )
        self.overlaps = hardware.device_type != "cpu"
        self.clock = 0.0
        """Moment at which the device is done with what was issued."""
        self.host = 0.0
        self.spent: dict[str, float] = defaultdict(float)
        """Time of the device: COMPUTE, waiting for the HOST, or for an axis."""
        self.lanes: dict[str, list[Interval]] = defaultdict(list)
        self._links: dict[bool, float] = defaultdict(float)
        """Moment until which overlapping collectives use a link; True: the network."""
        self._gathers: list[tuple[int, str, float]] = []
        """Gathers in flight: number of block backwards before, axis, end."""
        self._reductions: list[tuple[Message, str, float]] = []
        self._sends: list[tuple[str, float]] = []
        self._used = [0.0, 0.0]
        """Moments at which the latest two gathers were used."""
        self._backwards = 0
        self._is_backward = False
        self._pieces: dict[int, list[_Piece]] = {}
        self._seconds: dict[Message, float] = {}

    def run(self, segments: Iterable[StepSegment]) -> None:
        """Run segments after those before."""
        for segment in segments:
            started = self.clock
            self._enter(segment.name)
            if id(segment) not in self._pieces:
                self._pieces[id(segment)] = self._cut(segment)
            for piece in self._pieces[id(segment)]:
                if piece.message is not None:
                    self._send(piece.message, piece.seconds)
                else:
                    self._compute(piece)
            if self.clock > started:
                self.lanes[COMPUTE].append(Interval(started, self.clock, segment.name))

    def _enter(self, mark: str) -> None:
        """Wait for what a segment needs."""
        if mark in ("forward", "backward"):
            self._use_gathers()
            self._is_backward = mark == "backward"
        elif mark[:1].isdigit():  # an action of a pipeline, such as 2F0
            self._is_backward = "F" not in mark
        elif mark.startswith("backward of"):
            self._backwards += 1
            self._use_gathers(before=self._backwards - 1)
        elif mark in ("end of backward", "norm"):
            self._use_gathers()
            self._finish_reductions()
        elif mark == REDUCED:
            self._finish_reductions()
        elif mark == "update":  # the host reads the status of the step
            self.host = max(self.host, self.clock)

    def _compute(self, piece: _Piece) -> None:
        seconds = piece.seconds
        if self.overlaps:
            shared = max(0.0, max(self._links.values(), default=0.0) - self.clock)
            seconds += (CONTENTION - 1) * min(seconds, shared / CONTENTION)
            self.host += piece.issue
            idle = max(0.0, self.host - self.clock - seconds)
        else:
            idle = piece.issue
        self.spent[COMPUTE] += seconds
        self.spent[HOST] += idle
        self.clock += seconds + idle
        for axis, end in self._sends:
            self._wait(axis, end)
        self._sends.clear()

    def _send(self, message: Message, seconds: float) -> None:
        """Start a message, and wait for it unless it overlaps."""
        axis = self.source.axes[message.group]
        if not (message.overlaps and self.overlaps):
            self._start(message, axis, self.clock, seconds, shares=False)
            self._wait(axis, self.clock + seconds)
            return
        if message.operation != "send" and axis == "cp":
            axis = "fsdp"  # parameters, which the ranks of a sequence share
        if message.operation == "all_gather":
            self.host += self.issue
            if self._is_backward:
                self._use_gathers()
            ready = max(self.host, self._used[-1 if self._is_backward else -2])
            end = self._start(message, axis, ready, seconds)
            self._gathers.append((self._backwards, axis, end))
            if not self._is_backward:
                self._use_gathers()
        elif message.operation == "send":
            self._sends.append((axis, self._start(message, axis, self.clock, seconds)))
        else:
            if message.operation == "reduce_scatter":
                self._finish_reductions("reduce_scatter")
            # A sum over replicas follows the reduce-scatter of the same gradients.
            after = [end for one, _, end in self._reductions[-1:] if one.operation != "all_reduce"]
            end = self._start(message, axis, max([self.clock, *after]), seconds)
            self._reductions.append((message, axis, end))

    def _start(
        self, message: Message, axis: str, ready: float, seconds: float, shares: bool = True
    ) -> float:
        """Return the end of a message that can start when it is `ready`."""
        ranks = self.source.members[message.group]
        link = nodes(ranks, self.hardware.ranks_per_node) > 1
        start = max(ready, self._links[link]) if shares else ready
        if shares:
            self._links[link] = start + seconds
        if seconds:
            self.lanes[axis].append(Interval(start, start + seconds, message.operation))
        return start + seconds

    def _wait(self, axis: str, end: float) -> None:
        self.spent[axis] += max(0.0, end - self.clock)
        self.clock = max(self.clock, end)

    def _use_gathers(self, before: int | None = None) -> None:
        """Wait for gathers; `before`: for those before this number of block backwards."""
        for gather in [*self._gathers]:
            number, axis, end = gather
            if before is None or number < before:
                self._wait(axis, end)
                self._used = [self._used[-1], self.clock]
                self._gathers.remove(gather)

    def _finish_reductions(self, operation: str = "") -> None:
        for reduction in [*self._reductions]:
            message, axis, end = reduction
            if message.operation == operation or not operation:
                self._wait(axis, end)
                self._reductions.remove(reduction)

    def _cut(self, segment: StepSegment) -> list[_Piece]:
        """Return the messages of a segment, and the kernels between."""
        pieces: list[_Piece] = []
        product = 0.0
        """Seconds of the latest product."""
        chunk: _Piece | None = None
        """Gather that overlaps with the next product."""
        for event in segment.events:
            if isinstance(event, Kernel):
                is_kernel = event != DISPATCH
                seconds = self.turns * kernel_seconds(event, self.hardware) if is_kernel else 0.0
                issue = self.issue if is_kernel else self.dispatch
                if event.flops:
                    product = seconds
                    if chunk is not None and chunk.message is not None:
                        chunk.seconds = self._in_chunks(chunk.message, seconds)
                        chunk = None
                if pieces and pieces[-1].message is None:
                    pieces[-1].seconds += seconds
                    pieces[-1].issue += issue
                else:
                    pieces.append(_Piece(seconds, issue))
            elif isinstance(event, Message) and not self._is_of_pipeline(event):
                pieces.append(_Piece(self._duration(event), message=event))
                if self.chunks and self.source.axes[event.group] == "tp":
                    if event.operation == "all_gather":
                        chunk = pieces[-1]
                    elif event.operation == "reduce_scatter":
                        pieces[-1].seconds = self._in_chunks(event, product)
        return pieces

    def _in_chunks(self, message: Message, product: float) -> float:
        """Return the seconds of a collective that do not overlap with a product."""
        ranks, seconds = len(self.source.members[message.group]), self._duration(message)
        return seconds - min(seconds, product) * (ranks - 1) / ranks

    def _is_of_pipeline(self, message: Message) -> bool:
        return message.operation == "send" and self.source.axes[message.group] == "pp"

    def _duration(self, message: Message) -> float:
        if message not in self._seconds:
            ranks = self.source.members[message.group]
            self._seconds[message] = message_seconds(
                message.operation, message.bytes, ranks, self.hardware
            )
        return self._seconds[message]
