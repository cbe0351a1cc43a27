"""QK-clip (MuonClip; Kimi Team, 2025, arXiv:2507.20534), which bounds attention logits per head.

If the largest logit S of a head in a step exceeded a limit t, its queries and keys are scaled down
after the update, so that it would have been t: by sqrt(t / S) each, in the rows of their weights.
Where several query heads share a key head, the keys stay and the queries take all of t / S, as
those authors do with the rotary keys that all of their heads share: scaling the keys would change
heads whose logits are small.

A logit is q k' / sqrt(E), an input of attention's softmax. Attention kernels do not keep logits, so
they are computed again, one tile of the S x S at a time, without a gradient. Only logits of keys
that a query attends to count, over all microbatches of a step; recomputing a block in the backward
does not change a maximum.

Shapes: B batch, S this rank's part of the sequence, H query heads, K key/value heads, E head dim.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from torchtitan.checks.divisibility import DEGREES
from torchtitan.checks.model import model_of
from torchtitan.config import Context, Problem, between
from torchtitan.data import Batch
from torchtitan.models import MODELS
from torchtitan.models.attention import Core, SelfAttention
from torchtitan.optim import Muon
from torchtitan.optim.parameters import NamedParameter, local
from torchtitan.parallel import Losses
from torchtitan.parallel.activation_checkpoint import KEPT_OPERATORS
from torchtitan.parallel.context_pieces import ROTATIONS, Cut, segments
from torchtitan.parallel.settings import ParallelismConfig
from torchtitan.parallel.world import World
from torchtitan.step import Hooks
from torchtitan.torch_private.distributed import process_group
from torchtitan.torch_private.dtensor import extents

if TYPE_CHECKING:
    from torchtitan.build import Run

TILE = 2**24
"""Number of logits in memory at a time: 64 MiB."""


def attentions(part: nn.Module) -> Iterable[tuple[str, SelfAttention]]:
    """Yield the attention modules of a model or a part of it, with their parents' names."""
    for name, module in part.named_modules():
        if isinstance(module, SelfAttention):
            yield name.rpartition(".")[0], module


class Watched:
    """Attention core that records its largest logits."""

    def __init__(
        self, core: Core, largest: Tensor, world: World, parallelism: ParallelismConfig
    ) -> None:
        """Update `largest` (H,) in place on each call."""
        self.core, self.largest = core, largest
        is_split = world.degrees.cp > 1
        self.group = world.groups["cp"].group_name if is_split else ""
        is_ring = parallelism.context_parallel_rotate_method == "ring"
        self.rotation = "ring" if is_ring else "allgather"
        self.balancing = parallelism.balancing

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if torch.is_grad_enabled():  # not in evaluation
            found = largest_logits(
                q.detach(), k.detach(), documents, self.group, self.rotation, self.balancing, window
            )
            with torch.no_grad():
                self.largest.copy_(torch.maximum(self.largest, found))
        return self.core(q, k, v, documents, window, sinks)


@torch.library.custom_op("torchtitan::largest_logits", mutates_args=())
def largest_logits(
    q: Tensor,
    k: Tensor,
    documents: Tensor | None,
    group_name: str,
    rotation: str,
    balancing: str,
    window: int = 0,
) -> Tensor:
    """Return the largest logit of each of this rank's query heads: (H,), in float32.

    It is an operator so that compiled blocks can contain it and recomputation can skip it.

    Args:
        q: (B, H, S, E).
        k: (B, K, S, E); each serves H/K query heads.
        documents: (B, whole sequence) int64, the document of each token, on the CPU; None: a
            single document.
        group_name: name of the group whose ranks share the sequence; empty if there is none.
        rotation: exchange of keys between ranks, a key of `ROTATIONS`.
        balancing: the partitioning used by `context.shard`.
        window: number of most recent tokens that a token attends to; 0: all.
    """
    group = process_group(group_name) if group_name else None
    rank, cut = (group.rank(), Cut(group.size(), balancing)) if group else (0, Cut(1, balancing))
    fetched = ROTATIONS[rotation][0](k.contiguous(), group) if group else iter([(0, k)])
    largest = q.new_full(q.shape[1:2], -torch.inf, dtype=torch.float32)
    rows = cut.masked(q, documents, window)
    for owner, keys in fetched:
        tile = None if rows else cut.tile(rank, owner, q.shape[2])
        if tile is not None:
            shift = 0 if tile.causal else keys.shape[2]
            found = _largest(q[:, :, tile.queries], keys[:, :, tile.keys], shift)
            largest = torch.maximum(largest, found)
        pairs = itertools.chain(*segments(rows, rank, owner, window)) if rows else ()
        for row, queries, seen, shift, limit in pairs:
            own, others = q[row, None, :, slice(*queries)], keys[row, None, :, slice(*seen)]
            found = _largest(own, others, shift + queries[0] - seen[0], limit)
            largest = torch.maximum(largest, found)
    return largest


@largest_logits.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[1:2], dtype=torch.float32)


KEPT_OPERATORS.add(torch.ops.torchtitan.largest_logits.default)


def _largest(q: Tensor, k: Tensor, shift: int, window: int = 0) -> Tensor:
    """Return each head's maximum (H,); query i sees key j as in a `Segment`."""
    (batch, heads, queries, dim), (groups, keys) = q.shape, k.shape[1:3]
    largest = q.new_full((heads,), -torch.inf, dtype=torch.float32)
    k = k.float().mT  # (B, K, E, keys)
    step = max(1, TILE // (batch * heads * keys))
    for begin in range(0, queries, step):
        rows = q[:, :, begin : begin + step].float()  # (B, H, rows, E)
        count, first = rows.shape[2], begin + shift
        stop = min(first + rows.shape[2], keys)
        logits = rows.reshape(batch, groups, -1, dim) @ k[..., :stop]  # (B, K, H/K rows, keys)
        logits = logits.view(batch, heads, count, stop)
        hidden = torch.ones(count, stop, dtype=torch.bool, device=q.device)
        if first + 1 < stop:
            logits.masked_fill_(hidden.triu(first + 1), -torch.inf)
        if window:
            logits.masked_fill_(hidden.tril(first - window), -torch.inf)
        largest = torch.maximum(largest, logits.amax((0, 2, 3)))
    return largest / math.sqrt(dim)


class MuonClip(Muon):
    """Orthogonal updates of matrices, with AdamW for other parameters."""

    qk_clip: float = Field(0.0, ge=0)
    """Limit of attention logits: if the largest logit of a head in a step exceeds it, the update is
    followed by scaling the head's queries and keys down to the limit; 0: no limit."""

    @property
    def features(self) -> tuple[str, ...]:
        return ("qk_clip",) if self.qk_clip else ()

    def summary(self, parameters: Sequence[NamedParameter]) -> Iterator[str]:
        if self.qk_clip:
            yield f"heads are scaled down whose attention logits are above {self.qk_clip:g}"

    def problems(self, context: Context) -> Iterator[Problem]:
        yield from super().problems(context)
        if self.qk_clip and context.recipe is not None:
            yield from between(self._conflicts(context))

    def _conflicts(self, context: Context) -> Iterator[Problem]:
        """Find whether the largest logits of all heads, and the weights of these, are available."""
        job, key = context.recipe, f"{context.key}.qk_clip"
        if (model := model_of(job)) is None:
            return
        heads = [
            model.spec.heads(model.args, f"{name}.{linear}.weight")
            for name, _ in attentions(model.empty())
            for linear in model.spec.queries_and_keys or ()
        ]
        if not heads or None in heads:
            message = (
                f"{job.model.name} does not define the weights of its queries and keys "
                "(queries_and_keys, heads); use 0"
            )
            yield Problem(key, message, ("model",))
        if job.fault_tolerance.enable:
            message = f"with {key}, replica groups do not exchange their largest logits; use false"
            yield Problem("fault_tolerance.enable", message, (key,))
        if job.sharding.never_whole:
            message = (
                f'with {key}, a rank needs all weights of a head, and "{job.sharding.name}" '
                'moves them between ranks; use "fsdp2"'
            )
            yield Problem("sharding.name", message, (key,))
        copies = job.degrees(context.world.ranks).dp_replicate
        if job.communication.replicas.runs_apart and copies > 1:
            message = (
                f"with {key}, replicas must scale the same heads, and these make updates of their "
                "own; use every = 1"
            )
            yield Problem("communication.replicas.name", message, (key, *DEGREES))


class Scaled(NamedTuple):
    """This rank's part of a weight whose rows belong to heads."""

    weight: Tensor
    heads: Tensor
    """Index of the query head of each row, among all attentions."""
    has_pair: bool
    """Whether another weight takes the other square root of the factor."""


class QKClip:
    """Scales down heads, with any placement of their weights on a mesh."""

    def __init__(
        self,
        limit: float,
        parameters: Sequence[NamedParameter],
        queries_and_keys: tuple[str, str],
        places: Mapping[str, slice],
    ) -> None:
        """
        Args:
            limit: maximum logit.
            parameters: this rank's parameters.
            queries_and_keys: names of the two linears in an attention module.
            places: slice of each attention module's heads among all heads, by module name.
        """
        self.limit, self.scaled = limit, list[Scaled]()
        queries, keys = queries_and_keys
        for parameter in parameters:
            module, _, linear = parameter.name.rpartition(".")[0].rpartition(".")
            if module not in places or linear not in queries_and_keys or not parameter.heads:
                continue
            place, (dim, count) = places[module], parameter.heads
            assert dim == 0, "rows make queries and keys"
            has_pair = heads_of(parameters, f"{module}.{keys}") == place.stop - place.start
            if linear == queries or has_pair:
                here = parameter.mesh.get_coordinate() if parameter.mesh is not None else ()
                assert here is not None
                rows = extents(parameter.tensor, here)[0]
                each = parameter.shape[0] // count
                heads = torch.tensor([place.start + row // each for row in rows])
                device = local(parameter.tensor).device
                self.scaled.append(Scaled(parameter.tensor, heads.to(device), has_pair))

    @torch.no_grad()
    def apply(self, largest: Tensor) -> None:
        """Scale the weights down, after an update.

        Args:
            largest: largest logit of each head in the step, (heads of the model,).
        """
        factors = self.limit / largest.clamp(min=self.limit)
        roots = factors.sqrt()
        for weight, heads, has_pair in self.scaled:
            of_rows = (roots if has_pair else factors)[heads]
            local(weight).mul_(of_rows.view(-1, *[1] * (weight.ndim - 1)))


def heads_of(parameters: Sequence[NamedParameter], module: str) -> int | None:
    """Return the number of heads of a linear's output."""
    found = (p.heads[1] for p in parameters if p.heads and p.name.startswith(f"{module}."))
    return next(found, None)


def logit_limit(run: "Run") -> Hooks:
    """Return the hooks of the limiter."""
    limit = LogitLimit(run)
    return Hooks(before_forward=limit.begin, after_backward=limit.measure, after_update=limit.apply)


class LogitLimit:
    """Limiter of attention logits: measures them in a step, and scales heads after the update."""

    def __init__(self, run: "Run") -> None:
        job, spec, world = run.job, MODELS[run.job.model.name], run.world
        assert isinstance(job.optimizer, MuonClip)
        assert spec.queries_and_keys is not None, "the recipe was checked"
        parameters = [assigned.parameter for assigned in run.optimizers.inner.assignments]
        own = {
            name: heads_of(parameters, f"{name}.{spec.queries_and_keys[0]}") or 0
            for part in run.model.parts
            for name, _ in attentions(part)
        }
        heads = dict(sorted(item for of_rank in world.gather(own) for item in of_rank.items()))
        ends = itertools.accumulate(heads.values())
        places = {n: slice(end - heads[n], end) for n, end in zip(heads, ends, strict=True)}
        device = world.device.torch_device
        self.world, self.meter = world, run.meter
        self.largest = torch.empty(sum(heads.values()), device=device)
        """Largest logit of each head of the model: (heads,), in float32."""
        self.mine: list[tuple[slice, Tensor]] = []
        """Largest logits of this rank's heads and tokens, after their places among all."""
        for part in run.model.parts:
            for name, module in attentions(part):
                count = heads[name] // world.degrees.tp
                first = places[name].start + world.groups["tp"].rank() * count
                largest = torch.empty(count, device=device)
                self.mine.append((slice(first, first + count), largest))
                module.core = Watched(module.core, largest, world, job.parallelism)
        self.clip = QKClip(job.optimizer.qk_clip, parameters, spec.queries_and_keys, places)

    def begin(self) -> None:
        """Reset the maxima."""
        for _, largest in self.mine:
            largest.fill_(-torch.inf)

    def measure(self, batches: Sequence[Batch], losses: Losses) -> None:
        """Take the maximum over all ranks' tokens, and record the largest of all."""
        self.largest.fill_(-torch.inf)
        for place, largest in self.mine:
            self.largest[place] = largest
        self.world.max(self.largest)
        self.meter.record(max_attention_logit=self.largest.max())

    def apply(self) -> None:
        """Scale down the heads whose logits were above the limit."""
        self.clip.apply(self.largest)
