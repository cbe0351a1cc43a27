"""The plan of a run: memory, traffic and time of a step on a cluster, before anyone pays for it."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torchtitan.config import RecipeError
from torchtitan.convert.settings import LinearConverterConfig
from torchtitan.device import GIB, DeviceType
from torchtitan.job import JobConfig, StageRecipe
from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty
from torchtitan.optim.settings import OptimizerConfig
from torchtitan.parallel.stages import plan as plan_stages
from torchtitan.plan.compiled import SharedGraphs
from torchtitan.plan.expansion import RankStep, expand
from torchtitan.plan.fake_rank import record
from torchtitan.plan.hardware import Hardware
from torchtitan.plan.memory import Reserved, of_tensors, outside, reserved, workspaces
from torchtitan.plan.messages import LinkTraffic, link_traffic
from torchtitan.plan.recording import Change
from torchtitan.plan.shortening import block_kinds
from torchtitan.plan.speed import StepTime, step_time
from torchtitan.tasks import TASKS

RANKS_PER_NODE = 8
"""Ranks of a node of unknown hardware."""
MEMORY_LIMITS = 0.9, 1.2
"""Limits of the memory, as multiples of the prediction: see docs/plan.md."""
STAGES_ALIKE = "the time of the run is that of all its tokens in steps of the planned stage"
UNTIMED = "not in the time of a step"
LAUNCHES = 33.7, 37.3
"""GiB that an H100 reserved for one compiled recipe, from launch to launch."""
LEAST_PRODUCTS, LEAST_ATTENTION = 0.95, 0.5
"""Executed FLOPs relative to the model's, below which something was not recorded. The model's
include small vectors, and the half of attention that a causal kernel may leave out."""
TIME_LIMITS = 0.9, 1.3
"""Limits of the time of a step, as multiples of the prediction: see docs/plan.md."""


class Range(NamedTuple):
    """Predicted value, and the limits within which the true one is expected."""

    value: float
    low: float
    high: float

    @classmethod
    def within(cls, value: float, limits: tuple[float, float]) -> "Range":
        """Return `value` with limits that are multiples of it."""
        low, high = limits
        return cls(value, value * low, value * high)


@dataclass(frozen=True)
class RankPlan:
    """Memory and work of pipeline ranks whose stages are alike.

    The first of them is planned: in no schedule of torch does another keep the activations of more
    microbatches.
    """

    stage_ranks: Sequence[int]
    """Pipeline ranks that are alike."""
    ranks: int
    """Number of ranks of all of them."""
    step: RankStep
    memory: Reserved
    workspaces: int
    """Bytes that libraries allocate in torch's allocator."""
    outside: Mapping[str, float]
    """GiB outside of it, by their use."""

    @cached_property
    def by_kind(self) -> Counter[str]:
        """Bytes by kind at the moment that holds the most."""
        return self.step.peak()[1] + Counter(workspaces=self.workspaces)

    @cached_property
    def executed(self) -> Counter[str]:
        """FLOPs of a rank in a step, of "attention" and "products"; also those computed again."""
        by_segment: dict[int, Counter[str]] = {}
        total = Counter(attention=0, products=0)
        for segment in self.step.segments:
            if id(segment) not in by_segment:
                found = by_segment[id(segment)] = Counter[str]()
                for kernel in segment.kernels:
                    found["attention" if "attention" in kernel.name else "products"] += kernel.flops
            total += by_segment[id(segment)]
        return total

    @property
    def saved(self) -> int:
        """Bytes of parameters and optimizer states, wherever they are."""
        records = self.step.source.recording.storages
        before = (e for e in self.step.before.events if isinstance(e, Change))
        kinds = ("parameters", "optimizer states")
        return sum(each.bytes for each in before if records[each.storage].kind in kinds)

    @property
    def allocated(self) -> int:
        """Bytes of all tensors at that moment, and of workspaces."""
        return self.by_kind.total()


@dataclass(frozen=True)
class Plan:
    """Prediction of a step of a recipe."""

    job: JobConfig
    ranks: int
    hardware: Hardware | None
    device_type: DeviceType
    kinds: Sequence[RankPlan]
    """Kinds of pipeline ranks."""
    time: StepTime | None
    """None if the hardware is unknown."""
    traffic: Sequence[LinkTraffic]
    """Communication of a step of the rank that sends the most."""
    capacity_gib: float | None
    """Memory of a device; None: unknown."""
    notes: Sequence[str] = ()
    """Sentences about parts that are not modeled, and left out of the sums."""
    stages: Sequence[StageRecipe] = ()
    """Stages of training; `job` has the sizes of the largest."""

    @property
    def fullest(self) -> RankPlan:
        """The pipeline rank whose memory is the fullest."""
        return max(self.kinds, key=lambda kind: kind.memory.peak_reserved)

    @property
    def outside_gib(self) -> float:
        """Memory outside of the allocator on that rank: the CUDA context, NCCL's buffers."""
        return sum(self.fullest.outside.values())

    @property
    def allocated_gib(self) -> Range:
        """Peak GiB of tensors of the fullest rank."""
        return Range.within(self.fullest.allocated / GIB, MEMORY_LIMITS)

    @property
    def reserved_gib(self) -> Range:
        """Peak GiB that torch's allocator reserves on the fullest rank."""
        return Range.within(self.fullest.memory.peak_reserved / GIB, MEMORY_LIMITS)

    @property
    def by_kind_gib(self) -> dict[str, float]:
        """GiB of the fullest rank by kind, at the moment that holds the most."""
        return {kind: size / GIB for kind, size in self.fullest.by_kind.items() if size}

    @property
    def room_gib(self) -> float | None:
        """GiB that remain on the fullest rank; negative if it does not fit."""
        if self.capacity_gib is None:
            return None
        return self.capacity_gib - self.outside_gib - self.reserved_gib.value

    @property
    def least_devices(self) -> int | None:
        """Number of devices in which one copy of parameters and optimizer states fits."""
        if self.capacity_gib is None or (free := self.capacity_gib - self.outside_gib) <= 0:
            return None
        held = sum(
            kind.ranks * kind.by_kind[name]
            for kind in self.kinds
            for name in ("parameters", "optimizer states")
        )
        return math.ceil(held / self.job.degrees(self.ranks).dp_replicate / (free * GIB))

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank fits in the memory of its device; None: it is unknown."""
        return None if self.room_gib is None else self.room_gib >= 0


def plan(
    job: JobConfig,
    ranks: int,
    hardware: Hardware | None = None,
    *,
    device_type: DeviceType | None = None,
    capacity_gib: float | None = None,
    probe: int | None = None,
    graphs: SharedGraphs | None = None,
    count: Callable[[int], None] = lambda _: None,
) -> Plan:
    """Plan a step of a valid recipe, of the stage of training that takes the most memory.

    Args:
        hardware: the devices; None: they are unknown, and so is the time of a step.
        device_type: type of an unknown device, "cpu" or "cuda" (the default).
        capacity_gib: memory of a device; by default that of `hardware`.
        probe: pipeline rank that is planned first, and alone if it does not fit.
        graphs: compiled graphs of other plans, which it shares.
        count: receives the number of recorded ranks, each of which takes about as long.

    Raises:
        RecipeError: if a step cannot run on tensors without values, or the plan cannot be right.
    """
    degrees = job.degrees(ranks)
    stages, job = job.stages(degrees), job.largest_stage(degrees).job
    device_type = hardware.device_type if hardware else device_type or "cuda"
    capacity_gib = capacity_gib or (hardware.memory_gib if hardware else None)
    held = workspaces(hardware) if device_type == "cuda" else []
    kinds: list[RankPlan] = []
    alike = alike_ranks(job)
    # Without a balance, the last rank of a causal ring attends to the most keys.
    busiest = (degrees.cp - 1) * degrees.tp if job.parallelism.balancing == "none" else 0
    if probe is not None:
        alike.sort(key=lambda stage_ranks: probe not in stage_ranks)
    with SharedGraphs() if graphs is None else nullcontext(graphs) as shared:
        for stage_ranks in alike:
            first = stage_ranks[0] * ranks // degrees.pp + busiest
            try:
                source = record(job, ranks, first, device_type=device_type, graphs=shared)
            except RuntimeError as error:  # of fake tensors, in any code that a step runs
                reason = " ".join(str(error).split()) or type(error).__name__
                raise RecipeError([f"this recipe cannot be planned yet: {reason}"]) from error
            step = expand(source, job.accumulation(degrees))
            memory = reserved(step, workspaces=held) if held else of_tensors(step)
            around = outside(job, ranks, first, step, hardware) if hardware else {}
            of_kind = len(stage_ranks) * ranks // degrees.pp
            kinds.append(RankPlan(stage_ranks, of_kind, step, memory, sum(held), around))
            count(len(kinds))
            needed_gib = memory.peak_reserved / GIB + sum(around.values())
            if probe is not None and capacity_gib and needed_gib > capacity_gib:
                break
    kinds.sort(key=lambda kind: kind.stage_ranks[0])
    steps = {kind.stage_ranks[0]: kind.step for kind in kinds}
    stands_for = {rank: kind.stage_ranks[0] for kind in kinds for rank in kind.stage_ranks}
    ranks_per_node = hardware.ranks_per_node if hardware else RANKS_PER_NODE
    traffic = (link_traffic(step, ranks_per_node) for step in steps.values())
    made = Plan(
        job,
        ranks,
        hardware,
        device_type,
        kinds,
        step_time(job, ranks, steps, hardware, stands_for) if hardware else None,
        max(traffic, key=lambda found: sum(each.bytes for each in found)),
        capacity_gib,
        [
            *plan_notes(job, ranks, hardware, max(kind.saved for kind in kinds) / GIB),
            *sorted({note for step in steps.values() for note in step.source.notes}),
            *[f"training.stages: {STAGES_ALIKE}"] * (len(stages) > 1),
        ],
        stages,
    )
    if len(kinds) == len(alike) and (doubts := [*_doubts(made)]):
        raise RecipeError([f"this recipe cannot be planned yet: {doubt}" for doubt in doubts])
    tight = memory_notes(job, made.room_gib, made.reserved_gib.value)
    return replace(made, notes=[*made.notes, *tight])


def _doubts(found: Plan) -> Iterator[str]:
    """Yield why a plan cannot be right: it lacks work of the model, or has it done too fast."""
    job, spec = found.job, MODELS[found.job.model.name]
    length, executed = job.training.seq_len, Counter[str]()
    for kind in found.kinds:
        executed += Counter({name: flops * kind.ranks for name, flops in kind.executed.items()})
    samples = job.global_batch(job.degrees(found.ranks)) // job.fault_tolerance.groups
    units = samples * TASKS[spec.task].units(length)
    # All but attention is proportional to the number of tokens.
    whole, products = (units * spec.flops_per_unit(job.model_args(), each) for each in (length, 1))
    needed = {"attention": whole - products, "products": products}
    least = {"attention": LEAST_ATTENTION, "products": LEAST_PRODUCTS}
    if products >= whole:  # the length is not that of its attention
        executed, needed = Counter(products=executed.total()), {"products": whole}
    for name, flops in needed.items():
        if executed[name] < least[name] * flops:
            share = executed[name] / flops
            yield f"its {name} would execute {share:.1%} of the model's (flops_per_unit)"
    if found.time and (found.time.mfu or 0) > 1:
        yield f"its MFU would be {found.time.mfu:.1%}"


def alike_ranks(job: JobConfig) -> list[list[int]]:
    """Return the pipeline ranks in groups of the same kinds of blocks and other modules."""
    found: dict[object, list[int]] = {}
    spec, args, length = MODELS[job.model.name], job.model_args(), job.training.seq_len
    network = build_empty(spec.build, args, length)
    stages = plan_stages(job.parallelism, spec, args, network, length)
    of_block = block_kinds(job, spec.blocks(network))
    for stage_rank in range(job.parallelism.pipeline_parallel_degree):
        owned = stages.of(stage_rank)
        ends = 0 in owned, len(stages.ranks) - 1 in owned
        contents = tuple(
            tuple(sorted(of_block.get(unit, -1) for unit in stages.units[stage])) for stage in owned
        )
        # A schedule of one's own may keep more microbatches on any rank.
        own = stage_rank if job.parallelism.pipeline_parallel_schedule_csv else None
        found.setdefault((ends, contents, own), []).append(stage_rank)
    return [*found.values()]


def plan_notes(
    job: JobConfig, ranks: int, hardware: Hardware | None, saved_gib: float
) -> Iterator[str]:
    """Yield a sentence for each setting of a recipe that is not in its plan.

    Args:
        saved_gib: parameters and optimizer states of a rank.
    """
    if hardware is None:
        yield "without hardware, memory outside of the allocator is left out; name it"
    yield from _times(job, ranks, saved_gib)
    yield from _device(job, hardware)


def memory_notes(job: JobConfig, room_gib: float | None, reserved_gib: float) -> Iterator[str]:
    """Yield a sentence if a compiled recipe may not fit at every launch.

    With a cold and a warm cache of the compiler a step leaves the same tensors; what the allocator
    reserves for it may differ.
    """
    low, high = LAUNCHES
    if (
        job.compile.enable
        and room_gib is not None
        and 0 <= room_gib < reserved_gib * (high / low - 1)
    ):
        yield (
            f"compile.enable: of one recipe an H100 reserved {low} GiB in one launch and {high} in "
            f"another, and the {room_gib:.1f} GiB that remain here are less than that in proportion"
        )


def _times(job: JobConfig, ranks: int, saved_gib: float) -> Iterator[str]:
    """Yield what is done between steps, or slows them down."""
    saving, validation, metrics = job.checkpoint, job.validation, job.metrics
    if saving.saves:
        copies = ""
        if saving.async_mode != "disabled":
            copies = f"; each copies up to {saved_gib:.1f} GiB of a rank to host memory"
        yield f"checkpoint.interval: a save every {saving.interval:,} steps is {UNTIMED}{copies}"
        if often := saving.frequent.interval:
            yield f"checkpoint.frequent.interval: a save every {often:,} steps is {UNTIMED}{copies}"
    if validation.enable:
        yield f"validation.freq: a validation every {validation.freq:,} steps is {UNTIMED}"
        own = validation.local_batch_size or job.training.local_batch_size
        tokens = own * (validation.seq_len or job.training.seq_len)
        if (
            validation.unit == "local"
            and tokens > job.local_batch(job.degrees(ranks)) * job.training.seq_len
        ):
            yield "validation.local_batch_size: batches larger than in training are not in the peak"
    if metrics.statistics_freq:
        yield (
            f"metrics.statistics_freq: a forward every {metrics.statistics_freq:,} steps is "
            f"{UNTIMED}"
        )
    for note in job.optimizer.unplanned():
        yield f"optimizer.{note}"
    for key in ("enable_profiling", "enable_memory_snapshot"):
        if getattr(job.profiling, key):
            yield f"profiling.{key}: the time of the profiler is {UNTIMED}"
    if job.fault_tolerance.enable:
        yield "fault_tolerance.enable: the communication of replica groups is not in the plan"
    if job.comm.debug_level == "detail":
        yield f"comm.debug_level: the checks of each collective are {UNTIMED}"
    if job.training.enable_cpu_offload:
        yield (
            f"training.enable_cpu_offload: copies to and from host memory are {UNTIMED}, and the "
            "update takes the time that the device would"
        )
    apart = job.communication.replicas.steps_apart
    if apart and apart > 1 and job.degrees(ranks).dp_replicate > 1:
        yield (
            f"communication.replicas.every: the exchange of weights every {apart:,} steps is "
            f"{UNTIMED}, and the differences that it sends are not in the memory"
        )
    if job.parallelism.expert_parallel_degree > 1:
        yield (
            "parallelism.expert_parallel_degree: all experts are taken to be chosen equally "
            "often (a rank with more rows needs more time and memory), and the host's wait for the "
            f"numbers of rows is {UNTIMED}"
        )
    if job.model.separates_documents:
        yield (
            "model.attn_mask_type: attention takes the time of whole sequences, since their "
            "documents are not known"
        )


def _device(job: JobConfig, hardware: Hardware | None) -> Iterator[str]:
    """Yield what depends on the device."""
    if job.compile.enable and job.compile.backend != "inductor":
        yield f"compile.backend: {job.compile.backend} is planned as code that is not compiled"
    is_prepared = type(job.optimizer).prepare is not OptimizerConfig.prepare
    if job.model.separates_documents and hardware and hardware.device.startswith("AMD"):
        yield "model.attn_mask_type: documents are planned packed; on ROCm they run one by one"
    if job.compile.enable and is_prepared:
        yield "optimizer.name: the update, which is compiled, takes the time of its operators"
    if job.debug.deterministic:
        yield f"debug.deterministic: slower algorithms on CUDA are {UNTIMED}"
    for number, converter in enumerate(job.convert):
        if hardware is None or not isinstance(converter, LinearConverterConfig):
            continue
        if not (converter.emulate or getattr(hardware.peaks, converter.name, None)):
            yield (
                f"convert.{number}.name: {hardware.name} has no products in {converter.name}, so "
                "a run there is refused; set emulate = true"
            )
