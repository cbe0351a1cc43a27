"""Pipeline parallelism: stages of the model on different ranks, microbatches passing through them.

Torch runs the schedules, `schedules` describes them, and `stages` cuts the model. The pipeline
fills and drains once for each batch of `training.local_batch_size` sequences.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.config import local_path
from torchtitan.models.spec import SampleShapes
from torchtitan.parallel.schedules import SCHEDULES, forward_steps
from torchtitan.parallel.settings import ParallelismConfig
from torchtitan.parallel.stages import Stages
from torchtitan.parallel.world import World
from torchtitan.tasks import Batch, LossFunction
from torchtitan.timeline import Timeline
from torchtitan.torch_private.pipeline_stages import (
    recompute_once,
    schedule_from_csv,
    skip_p2p_warmup,
    time_stage,
)


class Shapes(NamedTuple):
    """Shapes and dtypes of one microbatch on a rank: the input and the outputs of the stages."""

    inputs: tuple[int, ...]
    input_dtype: torch.dtype
    hidden: tuple[tuple[int, ...], ...]
    """Outputs of each stage in evaluation; for the last, its hidden states."""
    outputs: tuple[int, ...] | None
    """Shape of the model's outputs; None: the last stage returns the loss, a scalar."""
    dtype: torch.dtype
    """Dtype of the hidden states and the outputs."""
    extra_hidden: int = 0
    """Number of additional hidden states that a stage sends in training, along the sample dim."""

    @property
    def trained(self) -> list[tuple[int, ...]]:
        """Outputs of each stage in training."""
        return [((1 + self.extra_hidden) * size, *rest) for size, *rest in self.hidden]

    @classmethod
    def of(
        cls,
        config: ParallelismConfig,
        sample: SampleShapes,
        stages: Stages,
        dtype: torch.dtype,
        world: World,
        *,
        has_outputs: bool,
    ) -> Self:
        """Return the shapes of this rank's part of a microbatch.

        Args:
            sample: shapes of a whole sample.
            dtype: dtype of the computation.
            has_outputs: whether the last stage returns outputs instead of the loss.
        """
        size, tp, cp = config.pipeline_parallel_microbatch_size, world.degrees.tp, world.degrees.cp
        stream = cp if config.disable_sequence_parallel else cp * tp
        *outputs, last = sample.outputs
        if tp > 1 and not config.disable_loss_parallel:
            part = -(-last // tp)  # the last rank may have fewer
            first = part * dist.get_rank(world.groups["tp"])
            last = min(first + part, last) - first
        return cls(
            inputs=(size, *_part(sample.inputs, cp)),
            input_dtype=sample.input_dtype,
            hidden=tuple((size, *_part(sample.after(unit[-1]), stream)) for unit in stages.units),
            outputs=(size, *_part((*outputs, last), cp)) if has_outputs else None,
            dtype=dtype,
            extra_hidden=sample.extra_hidden,
        )


def _part(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the shape of a sample whose positions, its first dim, are split over `ranks`."""
    return (shape[0] // ranks, *shape[1:])


class Pipeline:
    """This rank's stages, and the schedule that all ranks follow."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        stages: Stages,
        group: "dist.ProcessGroup",
        config: ParallelismConfig,
        *,
        microbatches: int,
        seq_len: int,
        shapes: Callable[[int], Shapes],
        loss: LossFunction | None,
        device: torch.device,
        timeline: Timeline,
    ) -> None:
        """
        Args:
            parts: this rank's stages, in order, with all techniques applied.
            group: the ranks of the pipeline.
            microbatches: number of microbatches in a batch.
            seq_len: length of a sequence.
            shapes: returns the shapes of a microbatch of sequences of a length.
            loss: maps logits and targets of a microbatch to the sum over its targets; None: the
                last stage returns it.
        """
        self.rank = dist.get_rank(group)
        self.parts = dict(zip(stages.of(self.rank), parts, strict=True))
        self.stages = stages
        self.group = group
        self.shapes_of = shapes
        self.config = config
        self.loss = loss
        self.device = device
        self.timeline = timeline
        self.count = torch.ones((), device=device)  # units in the current global batch
        self.resize(seq_len, microbatches)
        # NCCL creates a group's communicator in its first collective, which all ranks must join;
        # a schedule sends only between pairs.
        dist.all_reduce(torch.zeros((), device=device), group=group)

    def resize(self, seq_len: int, microbatches: int) -> None:
        """Take batches of another number of microbatches, of sequences of another length."""
        self.microbatches, self.shapes = microbatches, self.shapes_of(seq_len)
        self.schedule = self._make_schedule(self.config)

    def _make_schedule(self, config: ParallelismConfig) -> Any:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        shapes, dtype = self.shapes, self.shapes.dtype
        inputs = torch.empty(shapes.inputs, dtype=shapes.input_dtype, device="meta")
        wide = torch.promote_types(dtype, torch.float32)
        last = ((), wide) if shapes.outputs is None else (shapes.outputs, dtype)
        *hidden, end = (
            torch.empty(shape, dtype=kind, device="meta", requires_grad=True)
            for shape, kind in (*((shape, dtype) for shape in shapes.trained[:-1]), last)
        )
        stages = []
        for stage, part in self.parts.items():
            # With the shapes, torch need not infer them by running the model before the first step.
            given = hidden[stage - 1] if stage else inputs
            left = end if stage == self.last else hidden[stage]
            stages.append(
                PipelineStage(
                    part,
                    stage,
                    len(self.stages.ranks),
                    self.device,
                    input_args=given,
                    output_args=left,
                    group=self.group,
                )
            )
            skip_p2p_warmup(stages[-1])
            recompute_once(stages[-1])
            time_stage(stages[-1], self.timeline.phase)
        # The loss is already divided by the targets of the global batch, its only divisor.
        settings = {
            "n_microbatches": self.microbatches,
            "loss_fn": self._share,
            "scale_grads": False,
        }
        if config.pipeline_parallel_schedule_csv:
            path = local_path(config.pipeline_parallel_schedule_csv)
            return schedule_from_csv(stages, path, **settings)
        name = config.pipeline_parallel_schedule
        one = SCHEDULES[name].stages == "one"
        return get_schedule_class(name)(stages[0] if one else stages, **settings)

    @property
    def last(self) -> int:
        """Index of the stage that ends in logits, or in the loss."""
        return len(self.stages.ranks) - 1

    def _loss(self, end: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the loss, from the output of the last stage."""
        return end if self.loss is None else self.loss(end, targets)

    def _share(self, end: Tensor, targets: Tensor) -> Tensor:
        return self._loss(end, targets) / self.count

    def backward(self, batches: Sequence[Batch], count: Tensor) -> Tensor:
        """Run a step's forwards and backwards; return this rank's share of the mean main loss.

        The ranks with the last stage have all of it. Gradients accumulate.
        """
        self.count = count
        share = torch.zeros((), device=self.device)
        for batch in batches:
            size = self.microbatches * self.shapes.inputs[0]
            assert len(batch.inputs) == size, f"{len(batch.inputs)} samples, not {size}"
            losses: list[Tensor] = []
            with self.timeline.phase("pipeline"):
                self.schedule.step(
                    batch.inputs,
                    target=batch.targets,
                    losses=losses,
                    return_outputs=False,
                    **self._context(batch),
                )
            for loss in losses:
                share += loss.detach()
        return share

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """Return the sum of the loss over the targets of any number of `batches`; zero without the
        last stage.

        It follows steps of its own: torch's schedules cannot skip the backward where neighbouring
        stages share a rank, and would keep the logits of all microbatches.
        """
        cut = Batch.join(batches).split(self.shapes.inputs[0])
        total = torch.zeros((), device=self.device)
        arrived: dict[tuple[int, int], Tensor] = {}
        for step in forward_steps(self.stages.ranks, len(cut)):
            messages = []
            for rank, (stage, _, number) in step.items():
                after = self.stages.ranks[stage + 1] if stage < self.last else None
                if rank == self.rank:
                    batch = cut[number]
                    x = arrived.pop((stage, number)) if stage else batch.inputs
                    x = self.parts[stage](x, **self._context(batch))
                    if after is None:
                        total += self._loss(x, batch.targets)
                    elif after == rank:
                        arrived[stage + 1, number] = x
                    else:
                        messages.append(self._message(dist.isend, x, after))
                elif after == self.rank:
                    shape, dtype = self.shapes.hidden[stage], self.shapes.dtype
                    x = torch.empty(shape, dtype=dtype, device=self.device)
                    arrived[stage + 1, number] = x
                    messages.append(self._message(dist.irecv, x, rank))
            _exchange(messages)
        return total

    def _message(self, kind: Any, tensor: Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, group=self.group, group_peer=rank)

    def _context(self, batch: Batch) -> dict[str, Tensor]:
        """Return the keyword arguments of every stage for a batch."""
        given = {"targets": batch.targets} if self.loss is None else {}
        return batch.context() | given


def _exchange(messages: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()
