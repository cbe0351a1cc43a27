"""The recipe as it is run, killed and resumed, and the other layout in which it resumes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan.config import ConfigError, Recipe
from torchtitan.job import JobConfig
from torchtitan.parallel import Degrees, ParallelismConfig
from torchtitan.tools.verify.recipe import Draft, make_ready, make_short, rounds_states


@dataclass(frozen=True)
class Resumed:
    """A run of 2k steps, saved after k, and the same in another layout."""

    job: JobConfig
    ranks: int
    then: JobConfig
    then_ranks: int
    changes: list[str]

    @property
    def layouts(self) -> tuple[tuple[JobConfig, int], ...]:
        """In which it is resumed: its own first."""
        own, other = (self.job, self.ranks), (self.then, self.then_ranks)
        return (own,) if rounds_states(self.job) else (own, other)


def as_resumed(
    recipe: Recipe[JobConfig],
    *,
    world_size: int | None,
    steps: int | None,
    shrink: bool,
    then: Mapping[str, int],
) -> Resumed:
    """Derive the recipe that is run and resumed.

    Args:
        steps: number of steps before the save; the run has twice as many.
        then: sizes of the axes of the other layout; empty: parameters split over half of the
            ranks, or over two.
    """
    draft = Draft(recipe)
    make_short(draft, steps and 2 * steps, 6)
    own = recipe.config.checkpoint
    draft.tree["checkpoint"] = {
        "enable": True,
        "interval": max(draft.job.training.steps // 2, 1),
        "resume": "must",
        "async_mode": own.async_mode,
    }
    draft.changes.append(
        f'checkpoints: in a separate folder, with async_mode = "{own.async_mode}" as in the '
        "recipe; no metrics, no profile, no validation"
    )
    ranks = make_ready(draft, world_size, shrink, parallelism(Degrees(**then)))
    if rounds_states(draft.job):
        keys = [f"optimizer.{key}" for key in draft.job.optimizer.rounded_by]
        why = f"layouts round the optimizer's states differently ({', '.join(keys)})"
        if then:
            flags = " ".join(f"--{key} parameter" for key in keys)
            raise ConfigError(f"--then: {why}; add {flags}")
        draft.changes.append(f"resumed in the same layout only: {why}")
    degrees = Degrees(**(then or {"dp_shard": ranks // 2 if ranks > 1 else 2}))
    other = in_layout(draft.job, ranks, degrees)
    return Resumed(draft.job, ranks, other, math.prod(degrees), draft.changes)


def in_layout(job: JobConfig, ranks: int, degrees: Degrees) -> JobConfig:
    """The run of `job`, which is on `ranks`, in another layout; in no larger microbatches."""
    batch, local = job.global_batch(job.degrees(ranks)), job.training.local_batch_size
    fits = [n for n in range(1, batch + 1) if batch % (n * degrees.data) == 0]
    # A pipeline is filled by one large batch, not by several small ones.
    small = [n for n in fits if n <= local and degrees.pp == 1]
    size = max(small or fits, default=local)
    training = {"global_batch_size": batch, "local_batch_size": size}
    return job.model_copy(
        update={
            "training": job.training.model_copy(update=training),
            "parallelism": parallelism(degrees),
        }
    )


def parallelism(degrees: Degrees) -> ParallelismConfig:
    """A layout by the sizes of its axes, all else by default."""
    return ParallelismConfig(
        pipeline_parallel_degree=degrees.pp,
        data_parallel_replicate_degree=degrees.dp_replicate,
        data_parallel_shard_degree=degrees.dp_shard,
        context_parallel_degree=degrees.cp,
        tensor_parallel_degree=degrees.tp,
    )


def read_layout(words: str) -> dict[str, int]:
    """Sizes of axes, written as `tp=2,dp_shard=2`."""
    sizes: dict[str, int] = {}
    for word in words.split(","):
        axis, _, size = word.strip().partition("=")
        if axis not in Degrees._fields or not size.isdecimal() or int(size) < 1:
            axes = ", ".join(Degrees._fields)
            raise ConfigError(f"--then-layout: got {word!r}; wanted axis=size, with axes {axes}")
        sizes[axis] = int(size)
    return sizes
