"""What models are trained to do: `ModelSpec.task` is a key of `TASKS`."""

from torchtitan.data.batch import Batch
from torchtitan.tasks.masked_autoencoder import MaskedAutoencoder
from torchtitan.tasks.next_token import NextToken
from torchtitan.tasks.task import Task

TASKS: dict[str, type[Task]] = {
    "next_token": NextToken,
    "masked_autoencoder": MaskedAutoencoder,
}

__all__ = ["TASKS", "Batch", "MaskedAutoencoder", "NextToken", "Task"]
