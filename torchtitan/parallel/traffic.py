"""What a step sends, from the shapes of a model and its layout alone: no rank has to run.

Here is read off how often each technique sends what, for the formulas of `traffic_formulas`. It is
what happens in eager execution: a compiler may recompute more, or less. Left out are a dozen
all-reduces of single numbers: targets, loss, gradient norm, the request to stop.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from torchtitan.comm import Unit
from torchtitan.models.attention import SelfAttention
from torchtitan.models.spec import Args, ModelSpec, SampleShapes, TensorRole, tensor_roles
from torchtitan.optim import NamedParameter, OptimizerConfig, name_parameters
from torchtitan.optim.matrices import Area, Lying
from torchtitan.parallel import FSDP2, Layout, stages
from torchtitan.parallel import traffic_formulas as formulas
from torchtitan.parallel.attention_logits import attentions
from torchtitan.parallel.stages import Stages
from torchtitan.parallel.traffic_formulas import Traffic
from torchtitan.parallel.world import Degrees
from torchtitan.tasks import TASKS

SPLIT_IN_ROWS = ("embedding", "colwise", "logits")
"""The roles whose weights tensor parallelism splits so."""


def of_step(
    model: nn.Module,
    spec: ModelSpec[Args],
    args: Args,
    layout: Layout,
    degrees: Degrees,
    accumulation: int,
    optimizer: OptimizerConfig,
    stage_rank: int = 0,
    rank: int = 0,
) -> list[Traffic]:
    """All that a rank takes part in during an optimizer step; a line for what is alike.

    Args:
        model: the whole, on the meta device.
        accumulation: batches of `layout.local_batch_size` in a step.
        stage_rank: its place in the pipeline. On the tensor axis it is the first, whose part of the
            vocabulary no other exceeds.
        rank: its place among those that share parameters with it. What they send each other for an
            update, each sends as much as its parts are.

    Raises:
        NotImplementedError: where there are no formulas of what is sent, as with converters.
    """
    if layout.convert:
        raise NotImplementedError("there are no formulas of what converters send")
    order, layers = list(spec.all_blocks(model)), len(spec.blocks(model))
    shapes = layout.sample(spec, args)
    work = Work(layout, degrees, args, spec.task, shapes, order, layers, accumulation)
    plan = stages.plan(layout.parallelism, spec, args, model, layout.seq_len)
    found, parts = list(_of_borders(work, plan, stage_rank)), []
    for stage in plan.of(stage_rank):
        module = stages.build(model, plan, stage)
        blocks = list(spec.all_blocks(module))
        part = Part(
            work,
            stage,
            module,
            blocks,
            plan=tensor_roles(module, spec.tensor_plan),
            again=_recomputed(layout, order) & set(blocks),
        )
        found += layout.sharding.traffic(part)
        found += part.of_copies()
        found += part.of_activations()
        found += part.of_attention(with_logits=bool(optimizer.logit_limit))
        for loss in layout.auxiliary_losses:
            found += loss.traffic(part.module, part.work)
        parts.append(part)
    found += _of_update(optimizer, parts, spec, args, rank)
    if optimizer.logit_limit:
        found += _of_logits(spec, args, model)
    counts: Counter[Traffic] = Counter()
    for one in found:
        counts[replace(one, count=0)] += one.count
    return [replace(one, count=count) for one, count in counts.items() if count]


@dataclass(frozen=True)
class Work:
    """What a rank does in a step."""

    layout: Layout
    degrees: Degrees
    args: Any
    task: str
    """Of the model: a key of `torchtitan.tasks.TASKS`."""
    shapes: SampleShapes
    """Of a whole sample."""
    order: Sequence[str]
    """The blocks of the whole model, with those of auxiliary losses."""
    layers: int
    """How many those are without them."""
    passes: int
    """Batches that are accumulated; with a pipeline, how often it is filled and drained."""

    @property
    def sequences(self) -> int:
        """In a microbatch."""
        layout = self.layout
        in_pipeline = layout.parallelism.pipeline_parallel_microbatch_size
        return in_pipeline if self.degrees.pp > 1 else layout.local_batch_size

    @property
    def microbatches(self) -> int:
        """Of one batch; 1 without a pipeline."""
        return self.layout.local_batch_size // self.sequences

    @property
    def times(self) -> int:
        """How often a part of the model is run."""
        return self.passes * self.microbatches

    @property
    def heads(self) -> int:
        """How often a pass embeds tokens, and ends in a loss: for each depth once more."""
        return 1 + self.shapes.beside

    def tokens(self, module: str = "") -> int:
        """Positions of a microbatch after a module, as far as this rank has its sequences."""
        return self.sequences * self.shapes.after(module)[0] // self.degrees.cp

    @property
    def outputs(self) -> int:
        """Positions of a microbatch for which the model makes an output, in the same way."""
        return self.sequences * self.shapes.outputs[0] // self.degrees.cp

    def hidden(self, module: str = "") -> int:
        """Bytes of the hidden states of those."""
        dim = self.shapes.after(module)[1]
        return self.tokens(module) * dim * self.layout.precision.compute.itemsize

    @property
    def splits_stream(self) -> bool:
        """Whether each tensor rank has a part of them."""
        return self.degrees.tp > 1 and not self.layout.parallelism.disable_sequence_parallel

    @property
    def spares_sums(self) -> bool:
        """Whether recomputation keeps attention and what was reduced and scattered."""
        chosen = self.layout.activation_checkpoint
        return chosen.mode == "selective" and chosen.selective_ac_option == "op"


@dataclass(frozen=True)
class Part:
    """A stage of the model, or all of it, as a rank runs it."""

    work: Work
    stage: int
    module: nn.Module
    blocks: Sequence[str]
    plan: Mapping[str, TensorRole]
    """The roles of modules by name."""
    again: Collection[str]
    """The blocks that are recomputed."""

    @property
    def roles(self) -> Mapping[str, TensorRole]:
        """The same as far as tensor parallelism splits them."""
        return self.plan if self.work.degrees.tp > 1 else {}

    def shape(self, name: str, shape: Sequence[int]) -> torch.Size:
        """Of each rank's part of a parameter on the first tensor rank, filled up to be equal."""
        sizes, dim, parts = list(shape), 0, self.work.degrees.fsdp
        role, tp = self.roles.get(name.rpartition(".")[0]), self.work.degrees.tp
        if role in SPLIT_IN_ROWS:
            dim = 1 if shape[0] % (tp * parts) else 0  # as `fsdp2` does
            sizes[0] = -(-shape[0] // tp)
        elif role == "rowwise":
            sizes[1] //= tp
        sizes[dim] = -(-sizes[dim] // parts)
        return torch.Size(sizes)

    def of_unit(
        self,
        shapes: Mapping[str, torch.Size],
        gathers: int,
        scatters: int,
        sums: int,
        regathers: int = 0,
        neighbors: int = 0,
    ) -> Iterator[Traffic]:
        """Parameters that are gathered and reduced together, each so often in a step.

        Args:
            shapes: of one rank's part of each.
            regathers: from `neighbors` alone.
            sums: over copies, where those are added up in the backward.
        """
        layout, degrees = self.work.layout, self.work.degrees
        ways, precision = layout.communication, layout.precision
        unit = Unit("", shapes, torch.device("meta"))
        return formulas.of_parameters(
            parts=degrees.fsdp,
            copies=degrees.dp_replicate if ways.replicas.in_backward else 1,
            gathered=ways.weights.sent_bytes(unit, degrees.fsdp, precision.compute),
            scattered=ways.gradients.sent_bytes(unit, degrees.fsdp, precision.reduce),
            summed=unit.elements * precision.reduce.itemsize,
            scatter=ways.gradients.operation,
            gathers=gathers,
            regathers=regathers,
            neighbors=neighbors,
            scatters=scatters,
            sums=sums,
        )

    def of_copies(self) -> Iterator[Traffic]:
        """Copies that agree after the backward."""
        layout, degrees = self.work.layout, self.work.degrees
        every = layout.communication.replicas.steps_apart
        if degrees.dp_replicate == 1 or layout.communication.replicas.in_backward or not every:
            return
        named = self.module.named_parameters()
        shapes = {name: self.shape(name, parameter.shape) for name, parameter in named}
        unit, way = Unit("", shapes, torch.device("meta")), layout.communication.replicas
        ranks, dtype = degrees.dp_replicate, layout.precision.parameters
        for operation, size in way.messages(unit, ranks, dtype):
            yield Traffic("dp_replicate", "gradients", operation, size, 1)

    def of_activations(self) -> Iterator[Traffic]:
        """What tensor parallelism sends."""
        work, chosen = self.work, self.work.layout.parallelism
        by_size: dict[int, list[str]] = {}
        for name in self.roles:
            by_size.setdefault(self._hidden(name), []).append(name)
        for size, names in by_size.items():
            counts = Counter(self.roles[name] for name in names)
            again = Counter(self.roles[name] for name in names if self.is_again(name))
            # Recomputation ends with what the backward needs, which is never a block's own output.
            ends = sum(any(name.startswith(f"{block}.") for name in names) for block in self.again)
            sums_again = again["rowwise"] - ends
            yield from formulas.of_stream(
                size,
                gathers=(counts["input_gather"] + counts["logits"] * work.heads) * work.times,
                sums=(counts["rowwise"] + counts["embedding"] * work.heads) * work.times,
                more_gathers=again["input_gather"] * work.times,
                more_sums=sums_again * work.times * (not (work.spares_sums and work.splits_stream)),
                split=work.splits_stream,
            )
        if "logits" in self.roles.values():
            yield from formulas.of_loss(
                work.outputs,
                work.shapes.outputs[-1],
                summed=TASKS[work.task].split_sums(work.outputs),
                ranks=work.degrees.tp,
                compute=work.layout.precision.compute.itemsize,
                times=work.heads * work.times,
                # Chunks of logits are not gathered, be there loss parallelism or not.
                shared=bool(work.layout.loss.vocabulary_chunk) or not chosen.disable_loss_parallel,
            )
        yield from self._of_norms(("norm", "head_norm") if work.splits_stream else ("head_norm",))

    def _hidden(self, name: str) -> int:
        """Bytes of the hidden states that a module with a role is given, or makes."""
        work = self.work
        if self.roles[name] == "logits":
            return work.outputs * work.hidden(work.order[-1]) // work.tokens(work.order[-1])
        return work.hidden(next((b for b in work.order if name.startswith(f"{b}.")), ""))

    def _of_norms(self, roles: tuple[TensorRole, ...]) -> Iterator[Traffic]:
        work, precision = self.work, self.work.layout.precision
        shards = work.layout.shards(work.degrees)
        dtype = precision.compute if shards else precision.parameters
        reductions = work.layout.sharding.reductions(work.passes, work.microbatches)
        for name in (name for name, role in self.roles.items() if role in roles):
            for weight in self.module.get_submodule(name).parameters():
                size = weight.numel() * dtype.itemsize
                yield from formulas.of_norms(size, sums=reductions if shards else 1)

    def of_attention(self, with_logits: bool) -> Iterator[Traffic]:
        """What context parallelism sends, and again for the largest logits."""
        work, args, degrees = self.work, self.work.args, self.work.degrees
        modules = [name for name, m in self.module.named_modules() if isinstance(m, SelfAttention)]
        again = 0 if work.spares_sums else sum(map(self.is_again, modules))
        if degrees.cp > 1 and with_logits:
            heads, dim = args.n_kv_heads // degrees.tp, args.dim // args.n_heads
            yield from formulas.of_keys(
                work.tokens() * heads * dim * work.layout.precision.compute.itemsize,
                ranks=degrees.cp,
                fetches=(len(modules) + again) * work.times,
                ring=work.layout.parallelism.context_parallel_rotate_method == "ring",
            )
        if degrees.cp > 1:
            heads = args.n_kv_heads // degrees.tp
            yield from formulas.of_keys_and_values(
                2 * work.tokens() * heads * (args.dim // args.n_heads),
                ranks=degrees.cp,
                compute=work.layout.precision.compute.itemsize,
                fetches=(2 * len(modules) + again) * work.times,
                returns=len(modules) * work.times,
                ring=work.layout.parallelism.context_parallel_rotate_method == "ring",
            )

    def lie(self, parameter: NamedParameter) -> Lying:
        """How a matrix lies on the ranks that share parameters."""
        degrees, layout = self.work.degrees, self.work.layout
        rows, columns = parameter.shape
        role, tp = self.roles.get(parameter.name.rpartition(".")[0]), degrees.tp
        by_rows, by_columns = role in SPLIT_IN_ROWS, role == "rowwise"
        again = 1 if by_rows and rows % (tp * degrees.fsdp) else 0  # as in `shape`
        areas, copies = [], []
        replicas = degrees.dp_replicate if layout.communication.replicas.in_backward else 1
        for copy, part, place in itertools.product(range(replicas), range(degrees.fsdp), range(tp)):
            dims = [range(rows), range(columns)]
            if by_rows or by_columns:
                dims[by_columns] = _chunk(dims[by_columns], tp, place)
            dims[again] = _chunk(dims[again], degrees.fsdp, part)
            areas.append(Area(*dims))
            copies.append((copy,) if by_rows or by_columns else (copy, place))
        return Lying(areas, copies)

    def is_again(self, name: str) -> bool:
        """Whether what is called so is in a block that is recomputed."""
        return any(name.startswith(f"{block}.") for block in self.again)


def _chunk(whole: range, parts: int, number: int) -> range:
    size = -(-len(whole) // parts)
    return whole[number * size : (number + 1) * size]


def _of_update(
    optimizer: OptimizerConfig,
    parts: Sequence[Part],
    spec: ModelSpec[Args],
    args: Args,
    rank: int,
) -> Iterator[Traffic]:
    """What ranks that share parameters send each other for an update."""
    work = parts[0].work
    copies = work.degrees.dp_replicate if work.layout.communication.replicas.in_backward else 1
    if copies * work.degrees.fsdp * work.degrees.tp == 1 or not optimizer.sends:
        return
    if not isinstance(work.layout.sharding, FSDP2):
        raise NotImplementedError("there are formulas for parts that FSDP2 makes")
    owner = {
        parameter: part
        for part in parts
        for parameter in name_parameters([part.module], spec.role, partial(spec.heads, args))
    }
    axis = "sharing" if copies == work.degrees.dp_replicate else "shards"
    for size in optimizer.sent_bytes([*owner], lambda p: owner[p].lie(p), rank):
        yield Traffic(axis, "momentum and updates", "all_to_all", size, 1)


def _of_logits(spec: ModelSpec[Args], args: Args, model: nn.Module) -> Iterator[Traffic]:
    """The largest attention logit of each head, which all ranks are told."""
    assert spec.queries_and_keys is not None, "the recipe was checked"
    of_queries = (f"{name}.{spec.queries_and_keys[0]}.weight" for name, _ in attentions(model))
    heads = sum(found[1] for name in of_queries if (found := spec.heads(args, name)))
    yield Traffic("all", "attention logits", "all_reduce", heads * formulas.FP32, 1)


def _of_borders(work: Work, plan: Stages, mine: int) -> Iterator[Traffic]:
    """What a pipeline sends; neighbouring stages on one rank send nothing."""
    for stage, (one, other) in enumerate(itertools.pairwise(plan.ranks)):
        if one != other:
            yield from formulas.of_stages(
                work.hidden(plan.units[stage][-1])
                * work.heads
                // (work.degrees.tp if work.splits_stream else 1),
                onwards=(one == mine) * work.times,
                back=(other == mine) * work.times,
            )


def _recomputed(layout: Layout, order: Sequence[str]) -> set[str]:
    """The blocks that are run again in the backward, as far as no compiler chooses."""
    config = layout.activation_checkpoint
    if config.mode in ("none", "memory_budget"):
        return set()
    every = config.selective_ac_option if config.mode == "selective" else 1
    return set(order if every == "op" else order[::every])
