"""Runs a step of one rank of a recipe on fake tensors, among ranks that do not exist.

The code that runs is that of training: the model is laid out and parallelized, and the optimizer
built, as for a run. Tensors have no values, collectives return at once, and kernels are recorded
instead of run. So every setting of a recipe is in the recording, without a formula for it.

Repeated work is recorded a few times instead of always: see `Shortened`.
"""

import gc
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.data import Batch
from torchtitan.device import Device, DeviceType
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.experts import Experts
from torchtitan.models.spec import ModelSpec, build_empty
from torchtitan.parallel import (
    CompileConfig,
    ParallelModel,
    World,
    allocate,
    build_optimizers,
    expert_parallel,
    parallelize,
    stages,
)
from torchtitan.parallel.context_pieces import Cut
from torchtitan.parallel.pipeline import Pipeline
from torchtitan.parallel.schedules import Action, Kind
from torchtitan.parallel.sharding import FullyShard, ShardingTarget
from torchtitan.parallel.stages import Stages, prune
from torchtitan.parallel.world import make_world
from torchtitan.plan.compiled import SharedGraphs, recorded_compilation
from torchtitan.plan.cuda_operators import cuda_operators, mxfp8_kernels
from torchtitan.plan.recording import KernelRecorder, Recording
from torchtitan.plan.shortening import Abridged, Shortened, block_kinds
from torchtitan.tasks import TASKS
from torchtitan.timeline import Timeline
from torchtitan.torch_private.compiler import without_modes
from torchtitan.torch_private.distributed import group_members
from torchtitan.torch_private.fake_ranks import (
    assumed_values,
    fake_process_group,
    hidden_shape_propagation,
)
from torchtitan.torch_private.pipeline_stages import (
    abridge,
    buffers,
    kept_messages,
    mark_actions,
    mark_reductions,
    set_gathered,
    skip_shape_inference,
)

MAX_PASSES = 4
"""Number of accumulated batches that are recorded: the first two, one between, and the last."""
GATHER = "gather of "
"""Start of the names of marks where a pipeline gathers parameters, between its actions."""
NEIGHBOR = "neighbor"
"""Mark where weights are gathered or freed, as by an action that is not recorded."""
REDUCTION = "reduction of "
"""Start of the names of marks where it reduces gradients, after the last backward of a stage."""
REDUCED = "end of reductions"
"""Mark after which a pipeline uses gradients that it has reduced."""
ASSUMED = "the step reads values of tensors: numbers are taken to be 1, and masks true everywhere"


@dataclass(frozen=True)
class RankRecording:
    """Recording of a step of one rank."""

    recording: Recording
    axes: Mapping[str, str]
    """Axis of each process group, by the group's name; its purpose, if it is along no axis."""
    members: Mapping[str, Sequence[int]]
    """Ranks of each process group."""
    blocks: Sequence[Shortened]
    """Blocks recorded of the rank, of each stage and kind."""
    passes: int
    """Accumulated batches that were recorded."""
    pipeline: Abridged | None = None
    """Recorded actions of a pass through a pipeline; None without."""
    notes: Sequence[str] = ()
    """Sentences about parts that are modeled in a simpler way than they run."""
    device_type: str = "cpu"
    """Kind of device whose kernels were recorded."""


def record(
    job: JobConfig,
    ranks: int,
    rank: int = 0,
    *,
    shorten: bool = True,
    device_type: DeviceType = "cpu",
    graphs: SharedGraphs | None = None,
) -> RankRecording:
    """Record an optimizer step of `rank` of `ranks`, after the first, which creates the states.

    Args:
        shorten: whether repeated work is recorded a few times only.
        device_type: kind of device whose kernels are recorded.
        graphs: compiled graphs of other recordings, which it shares.

    Raises:
        RuntimeError: if this process is in a process group.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    if dist.is_initialized():
        raise RuntimeError("a process that is in a process group cannot record fake ranks")
    degrees, device = job.degrees(ranks), Device("cpu")
    with ExitStack() as opened:
        opened.enter_context(fake_process_group(rank, ranks))
        opened.enter_context(_without_garbage_collection())
        opened.enter_context(_without_messages())
        opened.enter_context(hidden_shape_propagation())
        opened.enter_context(_document_boundaries())
        # Also in compiled graphs: as many rows arrive as leave if experts are in balance.
        balanced = mock.patch.object(expert_parallel, "rows_arriving", lambda _, rows: len(rows))
        opened.enter_context(balanced)
        opened.enter_context(torch.compiler.set_stance("force_eager"))
        world = make_world(degrees, job.comm, device, dist.group.WORLD)  # type: ignore[arg-type]
        if device_type == "cuda":
            opened.enter_context(cuda_operators())
            opened.enter_context(mock.patch.object(ShardingTarget, "overlaps", True))
            if any(converter.name == "mxfp8" for converter in job.convert):
                opened.enter_context(mxfp8_kernels())
        recorder = KernelRecorder(device_type)
        graphs = graphs or opened.enter_context(SharedGraphs())
        graphs.recorder = recorder
        opened.enter_context(recorded_compilation(graphs))
        opened.enter_context(kept_messages(recorder.end_last_action))
        assumed = set[str]()
        opened.enter_context(assumed_values(partial(assumed.add, ASSUMED)))
        model, blocks, pipeline = _lay_out(job, world, recorder, shorten)
        passes = job.accumulation(degrees)
        recorded = min(passes, MAX_PASSES) if shorten else passes
        batches = [_batch(job, world, pipeline) for _ in range(recorded)]
        if job.parallelism.balancing == "documents":  # whose boundaries are values
            batches = [model.shard_batch(batch) for batch in batches]
            model = replace(model, shard_batch=lambda batch: batch)
        mode = opened.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        batches = [batch._map(mode.from_tensor) for batch in batches]
        allocate(model, job.layout(world.degrees), world)
        spec = MODELS[job.model.name]
        eager = CompileConfig()
        optimizers = build_optimizers(job.optimizer, model, spec, job.model_args(), eager)
        optimizers.state_dict()  # allocates the states
        owner = _owners(spec, model)
        on_host = job.training.enable_cpu_offload
        for parameter, name in optimizers.names.items():
            recorder.track([parameter], "parameters", owner(name), on_host=on_host)
        for part in model.parts:
            for name, buffer in part.named_buffers():
                recorder.track([buffer], "buffers", owner(name))
        for name, state in optimizers.states():
            if name.endswith(".step"):  # which decides on what is done every so many steps
                state.fill_(1)
            recorder.track([state], "optimizer states", owner(name), on_host=on_host)
        _track_communicators(recorder, model, spec, optimizers.names)
        for number, batch in enumerate(batches):
            stands_for = passes - recorded + 1 if number == recorded // 2 else 1
            size = job.local_batch(world.degrees) / len(batch.inputs)
            tensors = (each for each in vars(batch).values() if isinstance(each, Tensor))
            recorder.track(tensors, "data", "", count=stands_for * size)
        assumed.clear()  # by the step alone
        with recorder:
            recorder.mark("step", by_owner=True)
            optimizers.begin(1.0)
            given = [batch.to(device.torch_device) for batch in batches]
            loss = model.accumulate(given, torch.ones(()))["loss"]
            for parameter, name in optimizers.names.items():
                if parameter.grad is not None:
                    recorder.track([parameter.grad], "gradients", owner(name), on_host=on_host)
            recorder.mark("norm", by_owner=True)
            norm = optimizers.norm().complete()
            recorder.mark("update", by_owner=True)
            if job.training.max_norm:
                optimizers.clip(job.training.max_norm, norm)
            optimizers.step()
            if optimizers.average:
                optimizers.average.step()
            recorder.mark("end")
            del loss
        groups = group_members()
        axes = {name: purpose for name, (purpose, _) in groups.items()}
        axes |= {str(group.group_name): axis for axis, group in reversed(world.groups.items())}
        members = {name: ranks for name, (_, ranks) in groups.items()}
    notes = [*recorder.notes, *assumed]
    return RankRecording(
        recorder.recording, axes, members, blocks, recorded, pipeline, notes, device_type
    )


def _owners(spec: ModelSpec[Any], model: ParallelModel) -> Callable[[str], str]:
    """Return a function from the name of a parameter, or a state of it, to its block."""
    blocks = {name for part in model.parts for name in spec.all_blocks(part)}

    def owner(name: str) -> str:
        return next((block for block in blocks if name.startswith(f"{block}.")), "")

    return owner


def _track_communicators(
    recorder: KernelRecorder,
    model: ParallelModel,
    spec: ModelSpec[Any],
    names: Mapping[Tensor, str],
) -> None:
    """Record the state of methods of communication, such as their errors so far."""
    owner = _owners(spec, model)
    sharding = model.sharding
    units = [unit.name for unit in sharding.units] if isinstance(sharding, FullyShard) else []
    recorded = sum(each.numel() for each in names)
    whole = sum(p.numel() * recorder.times.get(owner(name), 1) for p, name in names.items())
    for key, state in model.state().items():
        _, place, *rest = key.split(".")
        if place.isdecimal():  # such as `gradients.0.error`
            recorder.track([state], "communication", owner(f"{units[int(place)]}."))
        elif (name := ".".join(rest)) in names.values():
            recorder.track([state], "communication", owner(name))
        else:  # of all parameters, in one
            count = whole / recorded if state.ndim else 1
            recorder.track([state], "communication", "", count=count)


def _batch(job: JobConfig, world: World, pipeline: Abridged | None) -> Batch:
    """Return a batch without content, on the host."""
    task = TASKS[MODELS[job.model.name].task]
    size = job.local_batch(world.degrees)
    if pipeline:
        size = pipeline.microbatches * job.parallelism.pipeline_parallel_microbatch_size
    return task.blank_batch(
        size, job.training.seq_len, job.model_args(), job.model.separates_documents
    )


def _lay_out(
    job: JobConfig, world: World, recorder: KernelRecorder, shorten: bool
) -> tuple[ParallelModel, list[Shortened], Abridged | None]:
    """Parallelize the model without its dropped blocks, and mark its passes."""
    spec, args = MODELS[job.model.name], job.model_args()
    layout = job.layout(world.degrees)
    network = build_empty(spec.build, args, layout.seq_len, layout.precision.parameters)
    plan = stages.plan(job.parallelism, spec, args, network, layout.seq_len)
    blocks = spec.blocks(network)
    own = [[n for n in plan.units[stage] if n in blocks] for stage in plan.of(world.stage_rank)]
    kinds = block_kinds(job, blocks) if shorten else {}
    shortened = [
        each
        for names in own
        for each in (Shortened.of_stage(names, kinds) if shorten else [Shortened((*names,), ())])
    ]
    recorder.times = {name: each.times for each in shortened for name in each.sample}
    dropped = {name for each in shortened for name in each.dropped}
    units = tuple(tuple(n for n in unit if n not in dropped) for unit in plan.units)
    pipeline = None
    if world.degrees.pp > 1:
        microbatches = job.parallelism.microbatches(layout.local_batch_size)
        orders = stages.orders(job.parallelism, len(blocks), microbatches)
        reshards = layout.reshard == "always"
        pipeline = Abridged.of(orders, world.stage_rank, shorten, reshards)
    timeline = _Marks(world.device, recorder)
    pruned, kept = prune(network, dropped), Stages(units, plan.ranks)
    model = parallelize(pruned, spec, args, layout, world, timeline, plan=kept)
    has_loss = plan.ranks[-1] == world.stage_rank
    last = [*blocks][-1:] if has_loss else []
    is_traced = layout.compile.compiles("model") and layout.compile.backend == "inductor"
    in_one = is_traced and layout.compile.granularity == "model"
    for part in model.parts:
        extra = {*spec.auxiliary_blocks(part)}
        for name, block in spec.all_blocks(part).items():
            if in_one:
                recorder.inner_blocks.append(name)
            else:
                follows = "logits" if name in {*last, *extra} else "activations"
                _mark(block, name, recorder, follows)
    if model.pipeline:
        assert pipeline is not None
        skip_shape_inference(model.pipeline.schedule)
        if pipeline.microbatches < model.pipeline.microbatches:
            model.pipeline.microbatches = pipeline.microbatches
            rows = {rank: [*map(str, row)] for rank, row in pipeline.orders.items()}
            abridge(model.pipeline.schedule, rows, pipeline.microbatches)
        modules: dict[nn.Module, str] = dict.fromkeys(model.parts, "")
        for part in model.parts:
            for name, block in spec.all_blocks(part).items():
                # Experts that are gathered by themselves are, too.
                inside = (m for m in block.modules() if isinstance(m, Experts))
                modules |= dict.fromkeys([block, *inside], name)
        if isinstance(model.sharding, FullyShard):
            sharded: list[Any] = model.sharding.modules
            modules = {**dict.fromkeys(sharded, ""), **modules}
        _mark_actions(model.pipeline, pipeline, recorder, modules)
    return model, shortened, pipeline


def _mark_actions(
    pipeline: Pipeline, abridged: Abridged, recorder: KernelRecorder, units: Mapping[nn.Module, str]
) -> None:
    """Mark the start of each action of a pipeline, and what FSDP2 does between them."""

    def mark(stage: int, kind: Kind, number: int) -> None:
        if not is_open:
            is_open.append(True)
            for each in opened:
                for microbatch, received in buffers(each).items():
                    count = abridged.times(microbatch, each.stage_index)
                    recorder.track(received, "communication", count=count)
        gathered = abridged.gathered.get(Action(stage, kind, number))
        if gathered is not None:
            recorder.mark(NEIGHBOR, in_action=False)
            set_gathered(next(each for each in opened if each.stage_index == stage), gathered)
        is_loss = stage == pipeline.last and kind != "W"
        of_kind = {"F": "activations", "W": ""}.get(kind, "logits" if is_loss else "recomputed")
        name, times = f"{stage}{kind}{number}", abridged.times(number, stage)
        recorder.mark(name, kind=of_kind, by_owner=kind == "W", in_action=True, microbatches=times)
        # Schedules with several stages per rank then wait for all that they sent.
        recorder.is_last_action = has_runtime and next(number_of_action) % len(own) == 0

    own = abridged.orders[dist.get_rank(pipeline.group)]
    has_runtime = hasattr(pipeline.schedule, "_prepare_schedule_with_comms")
    number_of_action = itertools.count(1)

    def reduced(unit: nn.Module) -> None:
        name = units[unit]
        recorder.mark(f"{REDUCTION}{name or 'the rest'}", name, in_action=False)

    from torch.distributed.fsdp import FSDPModule

    is_open: list[bool] = []
    schedule: Any = pipeline.schedule
    opened = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    for each in opened:
        mark_actions(each, mark)
        mark_reductions(each, reduced, partial(recorder.mark, REDUCED, by_owner=True))
    for unit, name in units.items():
        if isinstance(unit, FSDPModule):
            given: Any = unit
            given.unshard = _gather(unit.unshard, name, recorder)


def _gather(function: Callable[..., Any], name: str, recorder: KernelRecorder) -> Any:
    """Mark a gather of parameters ahead of their use, and the wait for it."""

    def marked(*args: Any, **settings: Any) -> Any:
        recorder.mark(f"{GATHER}{name or 'the rest'}", name, "gathered")
        handle = function(*args, **settings)
        recorder.mark("end of gather", by_owner=True)
        if handle is not None:
            handle.wait = _gather(handle.wait, name, recorder)
        return handle

    return marked


class _Marks(Timeline):
    """Timeline that marks the starts and ends of phases in a recording."""

    def __init__(self, device: Device, recorder: KernelRecorder) -> None:
        super().__init__(device)
        self.recorder = recorder
        self.opened: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if "pipeline" in self.opened:  # its actions are marked
            yield
            return
        self.opened.append(name)
        kind = {"forward": "activations", "backward": "logits", "pipeline": "communication"}
        self.recorder.mark(name, kind=kind.get(name, ""))
        yield
        self.recorder.mark(f"end of {name}", by_owner=True, in_action=False)
        self.opened.pop()


def _mark(block: nn.Module, name: str, recorder: KernelRecorder, follows: str) -> None:
    """Mark a block's forward and the start of its backward; `follows` is the kind after both."""

    def forward(*_: Any) -> None:
        recorder.mark(f"forward of {name}", name, "activations")

    def backward(_: Tensor) -> None:
        recorder.mark(f"backward of {name}", name, "recomputed")

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        recorder.mark(f"end of forward of {name}", name, follows)
        first = output if isinstance(output, Tensor) else output[0]
        if first.requires_grad:
            first.register_hook(backward)

    block.register_forward_pre_hook(forward)
    block.register_forward_hook(after)


@contextmanager
def _document_boundaries() -> Iterator[None]:
    """Find the boundaries of documents, which have values, outside of the fake tensor mode.

    The microbatches of a pipeline are without values: their tokens are taken for one document.
    """
    from torch._subclasses.fake_tensor import is_fake

    masked = Cut.masked

    def found(cut: Cut, q: Tensor, documents: Tensor | None, window: int) -> Any:
        with without_modes():
            if documents is not None and is_fake(documents):
                documents = torch.zeros(documents.shape, dtype=torch.int64)
            return masked(cut, q, documents, window)

    with mock.patch.object(Cut, "masked", found):
        yield


@contextmanager
def _without_messages() -> Iterator[None]:
    """Log nothing of a model that is not trained, nor torch's advice for its compilation."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect garbage now and not inside, as in training."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
