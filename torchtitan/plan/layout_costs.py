"""About how long a step of a layout takes, and how much memory, from a few numbers of the model.

A plan records a step of each kind of rank, which takes seconds; a search has tens of thousands of
layouts. These numbers say in which order to plan them. They are no answer: a search reports plans.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from torchtitan.device import GIB
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.sparse_decoder import SparseArgs
from torchtitan.models.spec import build_empty, count_parameters
from torchtitan.optim import name_parameters, state_bytes
from torchtitan.parallel.schedules import SCHEDULES
from torchtitan.plan.hardware import Hardware, Link, dtype_name
from torchtitan.plan.kernel_time import product_rate
from torchtitan.plan.layouts import (
    BATCH,
    COPIES,
    CP,
    EP,
    LOCAL,
    MODE,
    PP,
    RECOMPUTATION,
    RESHARD,
    SCHEDULE,
    SIZE,
    TP,
    Changes,
    Recomputation,
)

KEPT, KEPT_COMPILED = 1.4, 1.1
"""Elements that a block keeps for its backward, and those that compiled code keeps, relative to the
inputs and outputs of its matrices, about."""
CONTEXT = 0.15
"""Additional time of the computation for each doubling of context parallelism, about: plans of 405B
on 512 H100 with a degree of 4 compute for 30 % longer."""
FLOAT8 = 1.5
"""Rate of Float8 products with their casts, relative to bfloat16, about."""
ASYNCHRONOUS = 0.5
"""Share of the messages of tensor parallelism that asynchronous ones leave exposed, a guess."""
DISPATCHES = 150
"""Operators on DTensors in the forward and backward of a tensor-parallel block, about."""
FRAGMENTS = 1.05
"""Memory that the allocator reserves, relative to the tensors, about."""


@dataclass(frozen=True)
class LayoutCosts:
    """Approximate time and memory of the layouts of a recipe."""

    job: JobConfig
    ranks: int
    hardware: Hardware

    def seconds(self, layout: Changes) -> float:
        """Return about the time of a step."""
        tp, pp, cp = layout[TP], layout[PP], layout[CP]
        data = self.ranks // (tp * pp * cp)
        copies, share = layout[COPIES], layout[BATCH] // data
        shards, size = data // copies * cp, sequences(layout)
        layers, width, _ = self._block
        again, length = recomputation(layout).again, self.job.training.seq_len
        rate = self._rate(math.ceil(size * length / cp), tp)
        compute = layout[BATCH] * length / self.ranks * self._flops * (1 + again / 3) / rate
        turns = self.hardware.ranks_per_core(self.ranks)
        compute *= turns * self._imbalance(layout) * (1 + CONTEXT * math.log2(cp))
        # Each block gathers and scatters its hidden states twice, and as often in the backward.
        streams = share * length / cp * layers / pp * width * 2 * (tp - 1) / tp
        in_turn = (8 + 2 * again) * streams / _bandwidth(self._link(tp))
        if self.job.parallelism.enable_async_tensor_parallel:
            in_turn *= ASYNCHRONOUS
        if tp > 1:
            each = (8 + 2 * again) * (tp - 1) * self._link(tp).latency
            if not self.job.compile.compiles("model"):
                each += turns * (1 + again / 3) * DISPATCHES * self.hardware.dispatch_us
            in_turn += share / size * layers / pp * each * 1e-6
        # The keys and values are gathered in the forward and the backward, their gradients reduced.
        keys = share * length * layers / pp * self._keys / tp * 2 * (cp - 1) / cp
        in_turn += (3 + again) * keys / _bandwidth(self._link(tp * cp))
        ep, rows = layout.get(EP, 1), share * length / cp * layers / pp * self._choices
        exchanged = (8 + 4 * again) * rows * width * (ep - 1) / ep
        in_turn += exchanged / _bandwidth(self._link(tp * ep))
        part, passes = self._parameters / tp / pp, share // layout[LOCAL]
        experts = self._experts / tp / pp
        gathers = passes * (1 if keeps_gathered(layout) else 2 * layout[LOCAL] // size)
        reductions = 1 if pp > 1 else passes
        split = (part - experts) * (shards - 1) + experts / ep * (shards - ep)
        of_shards = (2 * gathers + 4 * reductions) * split / shards
        of_copies = 8 * part / shards * (copies - 1) / copies
        spread = of_shards / _bandwidth(self._link(tp * shards))
        spread += of_copies / _bandwidth(self._link(tp * cp * data))
        # Ranks on a CPU that wait for other stages leave their turns to others.
        used = min((1 - bubble(layout)) * turns, 1.0)
        if pp > 1 and keeps_gathered(layout):  # before the first and after the last microbatch
            return float((compute + in_turn) / used + spread)
        return float(max(compute + in_turn, spread) / used)

    def gib(self, layout: Changes) -> float:
        """Return about the memory that the allocator of a rank reserves, in GiB."""
        job, tp, pp, cp = self.job, layout[TP], layout[PP], layout[CP]
        data = self.ranks // (tp * pp * cp)
        shards = data // layout[COPIES] * cp
        layers, width, block = self._block
        # Whole parameters, which a rank gathers.
        experts = self._experts
        part = (self._parameters - experts + experts / layout.get(EP, 1)) / tp / pp
        held = self._held / tp / pp / shards
        reduce = getattr(torch, job.training.mixed_precision_reduce).itemsize
        if shards > 1 and keeps_gathered(layout):
            held += (2 + reduce if pp > 1 else 2) * part
        elif shards > 1:  # two blocks; a pipeline reduces its gradients at the end
            held += 4 * part / (layers / pp) + reduce * part / (1 if pp > 1 else layers)
        size, laps = sequences(layout), laps_of(layout)
        positions = size * job.training.seq_len / cp
        each = recomputation(layout).kept * block / tp
        each *= KEPT_COMPILED if job.compile.compiles("model") else KEPT
        streams = 2 * width / (1 if job.parallelism.disable_sequence_parallel else tp)
        kept = positions * (each + streams) * layers / pp * _in_flight(layout)
        if layout[MODE] == "full":  # the block that is recomputed
            kept += positions * block / tp
        if pp > 1:  # torch keeps two buffers for each stage and microbatch
            kept += 2 * laps * layout[LOCAL] // size * positions * streams
        if not job.loss.vocabulary_chunk:
            kept += positions * self._outputs / tp * (2 + 4 + 2)
        return float(FRAGMENTS * (held + kept)) / GIB

    def room(self, layout: Changes) -> float:
        """Return about the GiB of a device that the allocator can have."""
        axes = sum(layout[axis] > 1 for axis in (TP, PP, CP, COPIES)) + 1
        device = self.hardware
        used = device.outside_allocator_gib
        if device.device_type == "cuda":
            used += device.communicator_gib * axes
        return device.memory_gib - used

    @cached_property
    def _network(self) -> nn.Module:
        return build_empty(
            MODELS[self.job.model.name].build, self.job.model_args(), self.job.training.seq_len
        )

    @cached_property
    def _parameters(self) -> int:
        return count_parameters(self._network).total

    @cached_property
    def _experts(self) -> int:
        """Number of parameters of experts."""
        return sum(each.numel() for each in self._network.parameters() if each.ndim == 3)

    @cached_property
    def _choices(self) -> int:
        """Number of experts of a token in a block."""
        args = self.job.model_args()
        return args.top_k if isinstance(args, SparseArgs) else 0

    @cached_property
    def _held(self) -> float:
        """Bytes of parameters, gradients and states without sharding."""
        if self.job.training.enable_cpu_offload:
            return 0.0
        spec, each = MODELS[self.job.model.name], getattr(torch, self.job.training.dtype).itemsize
        named = name_parameters([self._network], spec.role)
        states = state_bytes(self.job.optimizer, named, each)
        in_backward = self.job.optimizer.early_step_in_backward
        held: float = (1 if in_backward else 2) * each * self._parameters + states
        return held

    @cached_property
    def _matrices(self) -> list[tuple[int, int]]:
        """Shapes of the matrices of a block."""
        spec = MODELS[self.job.model.name]
        block = next(iter(spec.blocks(self._network).values()))
        return [(each.shape[0], each.shape[1]) for each in block.parameters() if each.ndim == 2]

    @cached_property
    def _rates(self) -> dict[tuple[int, int], float]:
        return {}

    def _rate(self, rows: int, tp: int) -> float:
        """Return the FLOP/s of the products of a block with this number of rows."""
        if (rows, tp) not in self._rates:
            name = dtype_name(getattr(torch, self.job.training.mixed_precision_param))
            work = seconds = 0.0
            for out, inner in self._matrices:
                # Of a wide matrix the outputs are split, of a tall one the inputs.
                n, k = (out // tp, inner) if out >= inner else (out, inner // tp)
                work += out * inner / tp
                seconds += (
                    out
                    * inner
                    / tp
                    / product_rate(name, rows, max(n, 1), max(k, 1), 1, self.hardware)
                )
            self._rates[rows, tp] = work / seconds if seconds else 1e12
        return self._rates[rows, tp] * (FLOAT8 if self.job.convert else 1.0)

    @cached_property
    def _block(self) -> tuple[int, int, float]:
        """Number of blocks, width of the hidden states, bytes of a position in its matrices."""
        spec, args = MODELS[self.job.model.name], self.job.model_args()
        blocks = spec.blocks(self._network)
        name, block = next(iter(blocks.items()))
        shape = spec.shapes(args, self.job.training.seq_len).after(name)
        matrices = [parameter.shape for parameter in block.parameters() if parameter.ndim > 1]
        # Of experts, which are stacked, a position uses a few.
        used = sum(sum(s[-2:]) * (self._choices if len(s) == 3 else 1) for s in matrices)
        itemsize = getattr(torch, self.job.training.mixed_precision_param).itemsize
        return len(blocks), shape[1], used * itemsize

    @cached_property
    def _outputs(self) -> int:
        """Elements of the output of a position."""
        spec, args = MODELS[self.job.model.name], self.job.model_args()
        return math.prod(spec.shapes(args, self.job.training.seq_len).outputs[1:])

    @cached_property
    def _keys(self) -> int:
        """Elements of the keys and values of a position in a block."""
        shape = MODELS[self.job.model.name].attention(self.job.model_args())
        return 2 * shape.kv_heads * shape.head_dim if shape else 0

    @cached_property
    def _flops(self) -> float:
        spec = MODELS[self.job.model.name]
        flops: float = spec.flops_per_unit(self.job.model_args(), self.job.training.seq_len)
        return flops

    def _imbalance(self, layout: Changes) -> float:
        """Return the work of the fullest stage, relative to the mean."""
        if (pp := layout[PP]) == 1:
            return 1.0
        # The output layer is about as much as a block, or more; the embedding is hardly any.
        parts = self._block[0] + 1
        stages: int = pp * laps_of(layout)
        return math.ceil(parts / stages) * stages / parts

    def _link(self, ranks: int) -> Link:
        """Return the slowest link among neighboring ranks."""
        inside = ranks <= self.hardware.ranks_per_node
        return self.hardware.node if inside else self.hardware.network


def _bandwidth(link: Link) -> float:
    return link.bandwidth * 1e9


def sequences(layout: Changes) -> int:
    """Return the sequences that a rank computes at a time."""
    size: int = layout[SIZE] if layout[PP] > 1 else layout[LOCAL]
    return size


def laps_of(layout: Changes) -> int:
    """Return the number of stages of a rank."""
    return 1 if layout[PP] == 1 or SCHEDULES[layout[SCHEDULE]].stages == "one" else 2


def recomputation(layout: Changes) -> Recomputation:
    """Return the recomputation of a layout; of one that a search does not try, that of its kind."""
    tried = [each for each in RECOMPUTATION.values() if each.changes[MODE] == layout[MODE]]
    same = (each for each in tried if each.changes.items() <= {*layout.items()})
    return next(same, tried[-1])


def keeps_gathered(layout: Changes) -> bool:
    """Whether parameters stay whole from a forward to its backward."""
    policies = ("never",) if layout[PP] == 1 else ("never", "default")
    return layout[RESHARD] in policies


def _in_flight(layout: Changes) -> float:
    """Return for how many microbatches a rank keeps activations, about."""
    if (pp := layout[PP]) == 1:
        return 1.0
    count, schedule = layout[LOCAL] // layout[SIZE], SCHEDULES[layout[SCHEDULE]]
    if layout[SCHEDULE] == "GPipe":
        return float(count)
    # A lap later, the forwards are 2 (pp - 1) + pp + 1 stages ahead (arXiv:2104.04473).
    ahead: float = pp if schedule.stages == "one" or schedule.is_v else (3 * pp - 1) / 2
    return float(min(count, ahead))


def bubble(layout: Changes) -> float:
    """Return about the idle share of a pipeline of equal stages."""
    if (pp := layout[PP]) == 1:
        return 0.0
    count, schedule = layout[LOCAL] // layout[SIZE], SCHEDULES[layout[SCHEDULE]]
    laps = laps_of(layout)
    if schedule.splits_backward:
        laps *= 3
    idle: float = (pp - 1) / (laps * count + pp - 1)
    return idle
