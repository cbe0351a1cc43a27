"""Loss on held-out data, at a set pace, through the same forward as training."""

from collections.abc import Callable

import torch
from pydantic import Field

from torchtitan.config import Config
from torchtitan.data import DataConfig, DataStream
from torchtitan.parallel import ParallelModel, World


class ValidationConfig(Config):
    """When to validate, and on what."""

    enable: bool = Field(False, description="Measure the loss on held-out data while training.")
    dataset: str = Field(
        "python_stdlib_validation", description="Name of a data set, or a file or folder."
    )
    dataset_path: str | None = Field(
        None, description="File or folder to read instead of where the data set comes from."
    )
    freq: int = Field(10, ge=1, description="Steps between validations; the last step has one.")
    steps: int = Field(
        10,
        ge=1,
        description="How many global batches each validation reads; always the same ones.",
    )

    def data(self, training: DataConfig) -> DataConfig:
        """The data section of validation: the training one, reading other documents."""
        update = {"dataset": self.dataset, "dataset_path": self.dataset_path, "num_workers": 0}
        return training.model_copy(update=update | {"lanes": -1})


class Validator:
    """Measures the validation loss when due."""

    def __init__(
        self,
        config: ValidationConfig,
        open_stream: Callable[[], DataStream],
        accumulation: int,
        model: ParallelModel,
        world: World,
    ) -> None:
        self.config, self.open_stream, self.accumulation = config, open_stream, accumulation
        self.model, self.world = model, world
        self.stream: DataStream | None = None

    def is_due(self, step: int, last: int) -> bool:
        """Whether there is a validation after `step`."""
        return self.config.enable and (step % self.config.freq == 0 or step == last)

    def run(self) -> float:
        """Mean loss over the held-out batches, in nats a target; the same on every rank."""
        device = self.world.device.torch_device
        total = torch.zeros((), dtype=torch.float64, device=device)
        targets = torch.zeros((), dtype=torch.int64, device=device)
        self.stream = self.stream or self.open_stream()
        self.stream.rewind()
        for _ in range(self.config.steps):
            batches = [next(self.stream).to(device) for _ in range(self.accumulation)]
            total += self.model.evaluate(batches)
            targets += torch.stack([batch.target_count() for batch in batches]).sum()
        self.world.sum(total, over="loss")
        self.world.sum(targets, over="data")
        return float(total / targets)
