"""Training tasks: `ModelSpec.task` is a key of `TASKS`."""

from torchtitan.config import Registry
from torchtitan.data.batch import Batch
from torchtitan.tasks.next_token import NextToken
from torchtitan.tasks.task import Task

TASKS = Registry[type[Task]]("task", {"next_token": NextToken})

__all__ = ["TASKS", "Batch", "NextToken", "Task"]
