"""Contents of a checkpoint: weights, optimizer state, random generators, data position, counters.

Tensors have names that do not depend on the layout: `model.<parameter>`,
`optimizer.<parameter>.<state>`, `experts.<router>.share` and `rng.<rank>.<device>`; only
`communication.<rank>.<name>`, the per-rank state of communication, belongs to one layout. If
replicas make local updates, these names are those of the first, and replica r has
`replica.<r>.model.<parameter>` and so on. Tensors are live, saved directly and loaded in place,
except that low-bit states give the values they represent and take them back in `take_optimizer`
after loading.
"""

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from torchtitan.checkpoint.folder import TrainState, read_state
from torchtitan.checkpoint.manifest import read_manifest
from torchtitan.checkpoint.placement import differences, load_into, on_all_ranks
from torchtitan.checkpoint.storage import Renamed, SavedTensors, TensorSource
from torchtitan.config import ConfigError, first_of
from torchtitan.data import BatchStream, merge_states
from torchtitan.logging import logger
from torchtitan.models.experts import Router
from torchtitan.optim import Optimizers
from torchtitan.optim.parameters import local
from torchtitan.parallel import ParallelModel
from torchtitan.torch_private.dtensor import stored

EXPERTS = "experts."
SHOWN = 3
"""Maximum number of differences in the message that a checkpoint does not match."""


class SavedRun(NamedTuple):
    """Full checkpoint, in this project's or another format, under our names."""

    path: Path
    tensors: TensorSource
    counters: Mapping[str, Any]
    """Fields of `TrainState`."""
    data: Mapping[str, Any] | None = None
    """Position in the data; None: unknown."""
    ranks: int = 0
    """Number of ranks with state of their own in it, such as random generators."""
    layout: Mapping[str, int] = {}
    """Degrees of parallelism of these ranks, if known."""


def open_run(path: Path) -> SavedRun:
    """Open a full checkpoint of ours; raise Damaged if it is not what was saved."""
    manifest = read_manifest(path)
    state = read_state(path, manifest)
    counters, data = state["train_state"], state.get("data")
    return SavedRun(path, SavedTensors(path), counters, data, manifest.ranks, manifest.layout)


class Checkpointable:
    """Everything that training changes; methods are called by every rank."""

    def __init__(
        self, model: ParallelModel, optimizers: Optimizers, state: TrainState, data: BatchStream
    ) -> None:
        self.model, self.optimizers, self.state, self.data = model, optimizers, state, data
        self.before_data: Callable[[], None] = lambda: None
        """Called before the position in the data is loaded, when the counters are."""
        self.world = world = model.world
        self.copies = world.degrees.dp_replicate if model.runs_apart else 1
        """Number of replicas of the model whose weights may differ."""
        self.copy = dist.get_rank(world.groups["dp_replicate"]) if self.copies > 1 else 0
        self.prefix = f"replica.{self.copy}." if self.copy else ""

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters of this rank's stages."""
        return {f"model.{n}": p for part in self.model.parts for n, p in part.state_dict().items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of this rank in a full checkpoint."""
        own = self.weights() | self.of_optimizer() | self._of_experts()
        named = {f"{self.prefix}{name}": tensor for name, tensor in own.items()}
        # Cloned, since the next backward may change these before a save has copied them.
        sending = {name: tensor.clone() for name, tensor in self._of_sending().items()}
        return named | self._of_generators() | sending

    def position(self) -> dict[str, Any]:
        """Return the counters and the data position of all ranks on rank 0; empty elsewhere."""
        everyones = self.world.gather_object(self.data.state_dict())
        merged = on_all_ranks(self.world, lambda: merge_states(everyones) if everyones else None)
        return {"train_state": asdict(self.state), "data": merged} if merged else {}

    def load_weights(self, path: Path, source: TensorSource) -> None:
        """Load weights alone; raise ConfigError, with `path`, if they do not match."""
        self._read(path, self.weights(), source, {"model"})
        if found := self._not_finite():
            raise ConfigError(f"{path}: NaN or infinity in {found}; start from other weights")

    def restore(self, saved: SavedRun, skip: Collection[str] = ()) -> None:
        """Restore all but `skip`; raise ConfigError if it does not fit model, optimizer or data."""
        has_rng = "rng" not in skip and saved.ranks == self.world.size
        optimizer = {} if "optimizer" in skip else self.of_optimizer()
        source = self._of_this_copy(saved)
        there = source.shapes() if has_rng else {}  # not of a GPU, if it was saved on a CPU
        rng = {name: state for name, state in self._of_generators().items() if name in there}
        has_experts = any(name.startswith(EXPERTS) for name in source.shapes())
        experts = self._of_experts() if has_experts else {}
        tensors = self.weights() | optimizer | rng | experts
        self._read(saved.path, tensors, source, {"model", "optimizer"} - set(skip))
        if found := self._not_finite():
            logger.warning("%s: NaN or infinity in %s", saved.path, found)
        self.take_optimizer(optimizer)
        self._restore_sending(saved)
        if has_rng:
            prefix = f"rng.{self.world.rank}."
            self.world.device.set_rng_state({k.removeprefix(prefix): v for k, v in rng.items()})
        if "train_state" not in skip:
            for name, value in saved.counters.items():
                setattr(self.state, name, value)
        if "data" not in skip and saved.data is not None:
            self.before_data()
            self.data.load_state_dict(dict(saved.data))
        if "lr_scheduler" in skip:
            self.state.schedule_start = self.state.step
            self.state.schedule_start_tokens = self.state.tokens

    def _of_this_copy(self, saved: SavedRun) -> TensorSource:
        """Return the tensors of this replica of the model, or else of the first."""
        names = {name: name for name in saved.tensors.shapes()}
        there = {int(name.split(".")[1]) for name in names if name.startswith("replica.")}
        if there and there != set(range(1, self.copies)):
            logger.warning(
                "communication.replicas: %s is of %d replicas with different weights; this run "
                "starts with those of the first",
                saved.path,
                len(there) + 1,
            )
        elif prefix := self.prefix:
            names |= {n.removeprefix(prefix): n for n in names if n.startswith(prefix)}
        return Renamed(saved.tensors, names)

    def _read(
        self, path: Path, tensors: Mapping[str, Tensor], source: TensorSource, parts: Set[str]
    ) -> None:
        """Load `tensors` in place; the source must have no others of these `parts`."""
        # A pipeline's ranks hold different names, and all must fail if one does.
        mistakes = list(dict.fromkeys(self.world.gather_found(differences(tensors, source))))
        wanted = [name for name in source.shapes() if name.partition(".")[0] in parts]
        known = self.world.any([name in tensors for name in wanted])
        mistakes += [
            f"{name} is in the checkpoint, but not in this run"
            for name, is_known in zip(wanted, known, strict=True)
            if not is_known
        ]
        if mistakes:
            more = f" (and {len(mistakes) - SHOWN} more)" if len(mistakes) > SHOWN else ""
            told = "; ".join(mistakes[:SHOWN])
            raise ConfigError(f"{path}: does not fit this recipe: {told}{more}")
        on_all_ranks(self.world, lambda: load_into(tensors, source))

    def _not_finite(self) -> str:
        """Return the names of parameters with a value that is not finite on any rank."""
        weights = self.weights().items()
        own = [n for n, w in weights if not _is_finite(stored(local(w.detach())))]
        return first_of(list(dict.fromkeys(self.world.gather_found(own))))

    def of_optimizer(self) -> dict[str, Tensor]:
        """Return the optimizer's state; a step without effect creates it if there is none."""
        return {f"optimizer.{name}": t for name, t in self.optimizers.state_dict().items()}

    def _of_experts(self) -> dict[str, Tensor]:
        """Return what routers have of the last step; a run that starts to balance has none."""
        found = ((n, m) for part in self.model.parts for n, m in part.named_modules())
        return {
            f"{EXPERTS}{name}.share": module.share
            for name, module in found
            if isinstance(module, Router) and module.share is not None
        }

    def take_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back the tensors of `of_optimizer` after loading; weights may have changed."""
        prefix = "optimizer."
        self.optimizers.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items()})

    def _restore_sending(self, saved: SavedRun) -> None:
        """Restore the state of communication, if every rank of this layout finds its own."""
        own, source = self._of_sending(), saved.tensors
        is_same = dict(saved.layout) == self.world.degrees._asdict()
        fits = is_same and not differences(own, source)
        has_any, misfits_any = self.world.any([bool(own), not fits])
        if not has_any:
            return
        if not misfits_any:
            on_all_ranks(self.world, lambda: load_into(own, source))
        else:
            self.model.start_over()
            logger.warning(
                "communication: the state of [communication] starts from scratch, as the "
                "checkpoint has none for this layout"
            )

    def _of_sending(self) -> dict[str, Tensor]:
        prefix = f"communication.{self.world.rank}"
        return {f"{prefix}.{name}": t for name, t in self.model.state().items()}

    def _of_generators(self) -> dict[str, Tensor]:
        states = self.world.device.rng_state()
        return {f"rng.{self.world.rank}.{kind}": state for kind, state in states.items()}


def _is_finite(weight: Tensor) -> bool:
    """Whether all elements are finite; the sum tells in a quarter of the time, if no overflow."""
    return bool(weight.sum().isfinite()) or bool(weight.isfinite().all())
