"""Saves and loads a run with torch's distributed checkpoint (DCP).

A checkpoint is a folder: DCP's files hold every tensor under a name that no layout changes
(`model.<parameter>`, `optimizer.<parameter>.<state>`, `rng.<rank>.<device>`), so a run saved by
any number of ranks can be loaded by any other; `train_state.json` holds the rest in plain sight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.checkpoint import folder as disk
from torchtitan.checkpoint.folder import Start
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.state import TrainState
from torchtitan.config import ConfigError
from torchtitan.data import DataStream, merge_states
from torchtitan.logging import logger
from torchtitan.optim import Optimizers
from torchtitan.parallel import World

FORMAT = 1


class Checkpointer:
    """Saves when due and loads at the start; all its methods are called by every rank."""

    def __init__(
        self,
        config: CheckpointConfig,
        dump_folder: Path,
        world: World,
        *,
        model: Sequence[nn.Module],
        optimizers: Optimizers,
        state: TrainState,
        data: DataStream,
        about: Mapping[str, Any],
    ) -> None:
        """`about` is what rank 0 writes of the run; the other ranks need not know it."""
        self.config, self.folder, self.world = config, dump_folder / config.folder, world
        self.model, self.optimizers, self.state, self.data = model, optimizers, state, data
        self.about = dict(about)
        self.saved_step: int | None = None

    def load(self, start: Start) -> None:
        """Bring the run to where `start` says; without a path it stays as it is.

        Raises:
            ConfigError: where the checkpoint does not fit the model, the optimizer or the data.
        """
        if self.world.rank == 0 and self.config.enable and not self.config.load_only:
            for name in disk.sweep(self.folder):
                logger.info("deleted %s: a save that never finished", self.folder / name)
        if start.path is None:
            return
        saved = disk.read_state(start.path)
        tensors = {f"model.{name}": tensor for name, tensor in self._weights().items()}
        if not start.model_only:
            skip = self.config.exclude_from_loading
            if "optimizer" not in skip:
                tensors |= self._optimizer_tensors()
            if "rng" not in skip and saved["ranks"] == self.world.size:
                tensors |= (rng := self._rng_tensors())
        self._read(start.path, tensors)
        if start.model_only:
            logger.info("starting from the weights of %s", start.path)
            return
        if "rng" not in skip and saved["ranks"] == self.world.size:
            prefix = f"rng.{self.world.rank}."
            self.world.device.set_rng_state({k.removeprefix(prefix): v for k, v in rng.items()})
        if "data" not in skip:
            self.data.load_state_dict(saved["data"])
        if "train_state" not in skip:
            for name, value in saved["train_state"].items():
                setattr(self.state, name, value)
        if "lr_scheduler" in skip:
            self.state.schedule_start = self.state.step
        if start.is_resume:
            self.saved_step = self.state.step
        for change in start.changes:
            logger.info("changed since the checkpoint: %s", change)
        excluded = f" without {', '.join(skip)}" if skip else ""
        logger.info("resumed from %s%s at step %d", start.path, excluded, self.state.step)

    def is_due(self, final: bool) -> bool:
        """Whether the current step is to be saved; `final` says that no step will follow."""
        step, config = self.state.step, self.config
        first = config.enable_first_step_checkpoint and step == 1
        wanted = final or first or step % config.interval == 0
        return config.enable and not config.load_only and wanted and step != self.saved_step

    def save(self, finished: bool) -> None:
        """Save the current step; when this returns, every byte is on disk.

        `finished` says that the run is complete, which a run that was only stopped is not.
        """
        step, config = self.state.step, self.config
        model_only = finished and config.last_save_model_only
        if self.world.share(step in disk.saved_steps(self.folder)):
            raise ConfigError(
                f"{self.folder / f'step-{step}'}: exists already, from a run that went further "
                "than the step this one was told to load; delete it or choose another "
                "job.dump_folder"
            )
        path = self.folder / f"step-{step}.saving"
        if self.world.rank == 0:
            disk.begin(self.folder, step)
        tensors = {f"model.{name}": tensor for name, tensor in self._weights().items()}
        if model_only:
            dtype = getattr(torch, config.export_dtype)
            tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        else:
            tensors |= self._optimizer_tensors() | self._rng_tensors()
        data = merge_states(self.world.gather(self.data.state_dict()))
        self._write(path, tensors)
        if self.world.rank == 0:
            about = {"format": FORMAT, "model_only": model_only, "ranks": self.world.size}
            state = {**about, "train_state": asdict(self.state), "data": data, **self.about}
            disk.write_state(path, state)
            disk.commit(path)
            self._forget_old()
        self.world.share(None)  # nobody goes on, or ends, before the checkpoint is complete
        self.saved_step = step
        logger.info("saved %s", self.folder / f"step-{step}")

    def _forget_old(self) -> None:
        if self.config.keep_latest_k:
            steps = disk.saved_steps(self.folder)
            for step in sorted(steps)[: -self.config.keep_latest_k]:
                disk.delete(steps[step])

    def _weights(self) -> dict[str, Tensor]:
        return {name: p for part in self.model for name, p in part.state_dict().items()}

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {f"optimizer.{name}": t for name, t in self.optimizers.state_dict().items()}

    def _rng_tensors(self) -> dict[str, Tensor]:
        states = self.world.device.rng_state()
        return {f"rng.{self.world.rank}.{kind}": state for kind, state in states.items()}

    def _write(self, path: Path, tensors: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        save(
            tensors,
            storage_writer=FileSystemWriter(path, sync_files=True),
            process_group=self.world.patient,
        )

    def _read(self, path: Path, tensors: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = FileSystemReader(path)
        found = reader.read_metadata().state_dict_metadata
        mistakes = []
        for name, tensor in tensors.items():
            size = getattr(found.get(name), "size", None)
            if size is None:
                mistakes.append(f"{name} is not in the checkpoint")
            elif size != tensor.shape:
                mistakes.append(f"{name} is {tuple(size)} there and {tuple(tensor.shape)} here")
        # A pipeline's ranks hold different names, and all must end if one does.
        if mistakes := list(dict.fromkeys(m for own in self.world.gather(mistakes) for m in own)):
            more = f" (and {len(mistakes) - 3} more)" if len(mistakes) > 3 else ""
            raise ConfigError(f"{path}: does not fit this recipe: {'; '.join(mistakes[:3])}{more}")
        load(tensors, storage_reader=reader, process_group=self.world.patient)
