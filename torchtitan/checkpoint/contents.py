"""What a checkpoint is of: weights, optimizer state, random generators, data position, counters.

Tensors have names that no layout changes: `model.<parameter>`, `optimizer.<parameter>.<state>` and
`rng.<rank>.<device>`; only `communication.<rank>.<name>`, what a way to send keeps on a rank, is of
one layout. Where copies of the model run apart, these names are those of the first copy, and what
copy r has is `replica.<r>.model.<parameter>` and so on. They are the live ones, to save as they are
and to load in place; but states in few bits give what they stand for, and take it back by
`take_optimizer` after loading.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.checkpoint.folder import read_state
from torchtitan.checkpoint.manifest import read_manifest
from torchtitan.checkpoint.placement import differences, load_into, on_all_ranks, on_rank_0
from torchtitan.checkpoint.state import TrainState
from torchtitan.checkpoint.storage import Renamed, SavedTensors, TensorSource
from torchtitan.config import ConfigError
from torchtitan.data import DataStream, merge_states
from torchtitan.logging import logger
from torchtitan.optim import Optimizers
from torchtitan.optim.group import local
from torchtitan.parallel import World
from torchtitan.torch_private.dtensor import stored

SHOWN = 3
"""Differences, at most, in the message that a checkpoint does not fit."""


class SavedRun(NamedTuple):
    """A full checkpoint, of this project or of another, under our names."""

    path: Path
    tensors: TensorSource
    counters: Mapping[str, Any]
    """Of `TrainState`."""
    data: Mapping[str, Any] | None = None
    """What of the data was consumed; None: that is not known."""
    ranks: int = 0
    """How many have a state of their own in it: of their random generators, say."""
    layout: Mapping[str, int] = {}
    """The degrees of parallelism of these ranks, as far as they are known."""


def open_run(path: Path) -> SavedRun:
    """A full checkpoint of ours.

    Raises:
        Damaged: where it is not what was saved.
    """
    manifest = read_manifest(path)
    saved = read_state(path, manifest)
    tensors = SavedTensors(path)
    return SavedRun(
        path, tensors, saved["train_state"], saved.get("data"), manifest.ranks, manifest.layout
    )


def of_copy(copy: int) -> str:
    """What the names of a copy of the model begin with; the first has no prefix."""
    return f"replica.{copy}." if copy else ""


class Checkpointable:
    """All that training changes; methods are called by every rank."""

    def __init__(
        self,
        model: Sequence[nn.Module],
        optimizers: Optimizers,
        state: TrainState,
        data: DataStream,
        world: World,
        of_techniques: Callable[[], Mapping[str, Tensor]] = dict,
        copies: int = 1,
        start_over: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            of_techniques: gives what techniques keep on this rank, by name.
            start_over: has techniques begin without what they kept, from the weights there are.
            copies: of the model whose weights may differ.
        """
        self.copies = copies
        self.copy = dist.get_rank(world.groups["dp_replicate"]) if copies > 1 else 0
        self.of_techniques, self.start_over = of_techniques, start_over
        self.model, self.optimizers, self.state = model, optimizers, state
        self.data, self.world = data, world

    def weights(self) -> dict[str, Tensor]:
        """The parameters of this rank's stages."""
        return {f"model.{n}": p for part in self.model for n, p in part.state_dict().items()}

    def tensors(self) -> dict[str, Tensor]:
        """All that a full checkpoint holds of this rank."""
        own, prefix = self.weights() | self.of_optimizer(), of_copy(self.copy)
        named = {f"{prefix}{name}": tensor for name, tensor in own.items()}
        # The next backward changes these before a save may have copied them.
        sending = {name: tensor.clone() for name, tensor in self._of_sending().items()}
        return named | self._of_generators() | sending

    def weights_of_one(self) -> dict[str, Tensor]:
        """The weights of this rank's stages, if it belongs to the first of several copies."""
        return {} if self.copy else self.weights()

    def position(self) -> dict[str, Any]:
        """On rank 0 the counters, and what all ranks consumed of the data; empty elsewhere."""
        everyones = self.world.collect(self.data.state_dict())
        merged = on_all_ranks(self.world, lambda: merge_states(everyones) if everyones else None)
        return {"train_state": asdict(self.state), "data": merged} if merged else {}

    def load_weights(self, path: Path, source: TensorSource) -> None:
        """Take over weights alone.

        Raises:
            ConfigError: where they do not fit; `path` says where they are.
        """
        self._read(path, self.weights(), source, {"model"})
        self.optimizers.weights_changed()
        if found := self._not_finite():
            raise ConfigError(
                f"{path}: not finite, but NaN or infinity: {found}; nothing can be trained from "
                "such weights"
            )

    def restore(self, saved: SavedRun, skip: Collection[str] = ()) -> None:
        """Be where a checkpoint stands, in everything but `skip`.

        Raises:
            ConfigError: where it does not fit the model, the optimizer or the data.
        """
        has_rng = "rng" not in skip and saved.ranks == self.world.size
        rng = self._of_generators() if has_rng else {}
        optimizer = {} if "optimizer" in skip else self.of_optimizer()
        tensors = self.weights() | optimizer | rng
        source = self._of_this_copy(saved)
        self._read(saved.path, tensors, source, {"model", "optimizer"} - set(skip))
        if found := self._not_finite():
            logger.warning("%s: not finite, but NaN or infinity: %s", saved.path, found)
        self.take_optimizer(optimizer)
        self._restore_sending(saved)
        if has_rng:
            prefix = f"rng.{self.world.rank}."
            self.world.device.set_rng_state({k.removeprefix(prefix): v for k, v in rng.items()})
        if "data" not in skip and saved.data is not None:
            self.data.load_state_dict(dict(saved.data))
        if "train_state" not in skip:
            for name, value in saved.counters.items():
                setattr(self.state, name, value)
        if "lr_scheduler" in skip:
            self.state.schedule_start = self.state.step

    def _of_this_copy(self, saved: SavedRun) -> TensorSource:
        """What a checkpoint has of this copy of the model, or else of the first."""
        names = {name: name for name in saved.tensors.shapes()}
        there = {int(name.split(".")[1]) for name in names if name.startswith("replica.")}
        if there and there != set(range(1, self.copies)):
            logger.warning(
                "communication.replicas: %s is of %d replicas that ran apart; this run begins with "
                "the weights of the first",
                *(saved.path, len(there) + 1),
            )
        elif prefix := of_copy(self.copy):
            own = [name for name in names if name.startswith(prefix)]
            names |= {name.removeprefix(prefix): name for name in own}
        return Renamed(saved.tensors, names)

    def _read(
        self, path: Path, tensors: Mapping[str, Tensor], source: TensorSource, parts: Set[str]
    ) -> None:
        """Take over `tensors`; of these `parts` the source has to have no others."""
        # A pipeline's ranks hold different names, and all must end if one does.
        everyones = self.world.collect((differences(tensors, source), list(tensors))) or ()

        def compare() -> None:
            mistakes = list(dict.fromkeys(mistake for own, _ in everyones for mistake in own))
            known = {name for _, names in everyones for name in names}
            mistakes += [
                f"{name} is in the checkpoint, but not in this run"
                for name in source.shapes()
                if name not in known and name.partition(".")[0] in parts
            ]
            if mistakes:
                more = f" (and {len(mistakes) - SHOWN} more)" if len(mistakes) > SHOWN else ""
                told = "; ".join(mistakes[:SHOWN])
                raise ConfigError(f"{path}: does not fit this recipe: {told}{more}")

        on_rank_0(self.world, compare)
        on_all_ranks(self.world, lambda: load_into(tensors, source))

    def _not_finite(self) -> str:
        """The parameters, by name, in which any rank has a value that is not finite."""
        weights = self.weights().items()
        own = [n for n, w in weights if not _is_finite(stored(local(w.detach())))]
        names = list(dict.fromkeys(name for names in self.world.gather(own) for name in names))
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return ", ".join(names[:SHOWN]) + more

    def of_optimizer(self) -> dict[str, Tensor]:
        """Its state; made first where there is none, by a step that moves nothing."""
        return {f"optimizer.{name}": t for name, t in self.optimizers.state_dict().items()}

    def take_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `of_optimizer` gave, after it was loaded into; weights may be others."""
        prefix = "optimizer."
        self.optimizers.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items()})

    def _restore_sending(self, saved: SavedRun) -> None:
        """Take over what ways to send keep, if all of this layout's ranks find their own."""
        own, source = self._of_sending(), saved.tensors
        is_same = dict(saved.layout) == self.world.degrees._asdict()
        fits = is_same and not differences(own, source)
        everyones = self.world.gather((fits, bool(own)))
        if not any(has for _, has in everyones):
            return
        if all(fits for fits, _ in everyones):
            on_all_ranks(self.world, lambda: load_into(own, source))
        else:
            self.start_over()
            logger.warning(
                "communication: what [communication] keeps on a rank begins anew; the checkpoint "
                "has none of this layout"
            )

    def _of_sending(self) -> dict[str, Tensor]:
        prefix = f"communication.{self.world.rank}"
        return {f"{prefix}.{name}": t for name, t in self.of_techniques().items()}

    def _of_generators(self) -> dict[str, Tensor]:
        states = self.world.device.rng_state()
        return {f"rng.{self.world.rank}.{kind}": state for kind, state in states.items()}


def _is_finite(weight: Tensor) -> bool:
    """Their sum tells in a quarter of the time, unless finite ones add up to more than there is."""
    return bool(weight.sum().isfinite()) or bool(weight.isfinite().all())
