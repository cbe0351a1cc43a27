"""What a rank of a pipeline holds for backwards to come: the estimate against what is held."""

from typing import Any, ClassVar, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining
from torch.distributed.pipelining.stage import PipelineStage

from tests import layouts
from tests.ranks import run_ranks
from tests.tiers import tiers
from torchtitan.device import Device
from torchtitan.estimate.memory import Memory, MemoryInputs
from torchtitan.job import JobConfig
from torchtitan.parallel.schedules import SCHEDULES
from torchtitan.tools.verify.measure import training


class Saved:
    """A tensor that autograd saves, and the bytes of all that it saves at a time."""

    shared: ClassVar[dict[int, int]] = {}
    """Number of saved tensors by storage."""
    lasting: ClassVar[set[int]] = set()
    """Storages of parameters and buffers."""
    bytes: ClassVar[int] = 0
    peak: ClassVar[int] = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # else an output that is saved would keep its graph
        storage = tensor.untyped_storage()
        self.key, self.size = storage.data_ptr(), storage.nbytes()
        if self.key not in self.lasting:
            self._count(1)

    def __del__(self) -> None:
        if self.key in self.shared:
            self._count(-1)

    def _count(self, change: int) -> None:
        before = self.shared.pop(self.key, 0)
        if before + change:
            self.shared[self.key] = before + change
        Saved.bytes += self.size * (bool(before + change) - bool(before))
        Saved.peak = max(Saved.peak, Saved.bytes)


class Held(NamedTuple):
    """Peaks of a rank in a step, and the moments that are estimated."""

    saved: int
    between_halves: int
    """Gradients that the first half of a backward leaves for the second."""
    moments: list[Memory]


def held(job: JobConfig) -> Held:
    """The peaks of this rank in the second step of `job`."""
    between = [0]
    backward = PipelineStage.backward_one_chunk

    def noted(stage: Any, *args: Any, **settings: Any) -> Any:
        found = backward(stage, *args, **settings)
        groups = [group for state in stage.backward_state.values() for group in state[1] or ()]
        kept = [g for group in groups for grads in group["grads"] for g in grads if g is not None]
        sizes = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in kept}
        waiting[stage.stage_index] = sum(sizes.values())
        between[0] = max(between[0], sum(waiting.values()))
        return found

    def weighted(stage: Any, *args: Any, **settings: Any) -> Any:
        waiting.pop(stage.stage_index, None)
        return weights(stage, *args, **settings)

    waiting: dict[int, int] = {}
    weights = PipelineStage.backward_weight_one_chunk
    with (
        torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor),
        mock.patch.object(PipelineStage, "backward_one_chunk", noted),
        mock.patch.object(PipelineStage, "backward_weight_one_chunk", weighted),
    ):
        for run, row in training(job, Device("cpu"), uneven=False):
            if row["step"] == 1:
                tensors = [t for part in run.model.parts for t in part.state_dict().values()]
                tensors += [t for part in run.model.parts for t in part.buffers()]
                Saved.lasting |= {t.untyped_storage().data_ptr() for t in tensors}
                Saved.peak = between[0] = 0
    rank = dist.get_rank(run.agree.world.groups["pp"])
    ranks = dist.get_world_size()
    layout = job.layout(job.degrees(ranks))
    plan = MemoryInputs(layout, job.work(ranks), job.optimizer, has_states=False)
    return Held(Saved.peak, between[0], [*plan.moments(rank)])


@pytest.mark.parametrize("name", tiers(SCHEDULES, ["LoopedBFS", "ZBVZeroBubble"]))
def test_a_rank_holds_what_its_schedule_has_in_flight(name: str) -> None:
    layout = layouts.schedule(name)
    model = {"flavor": "deep", "n_layers": 8, "dim": 64, "ffn_dim": 128}
    job = layouts.job(layout, "SGD", model=model, training={"steps": 2, "seq_len": 64})
    for found in run_ranks(held, layout.ranks, job):
        at_update, *moments = found.moments
        least = max(moment.activations for moment in moments)
        most = max(moment.activations + moment.logits for moment in moments)
        assert least <= 1.01 * found.saved
        # Of logits autograd saves the log-softmax alone; beside them, the end saves its norm.
        assert found.saved <= 1.06 * most
        # Those of weights are there, too, as soon as a backward is complete.
        of_weights = at_update.gradients
        between = max(g - of_weights * (g >= of_weights) for g in (m.gradients for m in moments))
        assert found.between_halves == pytest.approx(between, rel=0.01)
