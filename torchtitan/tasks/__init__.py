"""What models are trained to do: `ModelSpec.task` is a key of `TASKS`."""

from torchtitan.data.batch import Batch
from torchtitan.tasks.next_token import NextToken
from torchtitan.tasks.task import Task

TASKS: dict[str, type[Task]] = {"next_token": NextToken}

__all__ = ["TASKS", "Batch", "NextToken", "Task"]
