"""Loss on held-out data, at regular intervals, through the same forward as training."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from torchtitan.config import Config, Context, Problem
from torchtitan.data import DATASETS, BatchStream, DataConfig
from torchtitan.metrics import Meter
from torchtitan.parallel import ParallelModel, World
from torchtitan.step import Hooks
from torchtitan.tasks import Task
from torchtitan.timeline import Timeline


class ValidationConfig(Config):
    """Schedule and data sets of validation."""

    enable: bool = False
    """Measure the loss on held-out data while training."""
    dataset: str | tuple[str, ...] = "python_stdlib_validation"
    """Name of a data set, or a file or folder; or several, each measured separately. Not used with
    data.validation_fraction."""
    dataset_path: str | None = None
    """File or folder to read instead of the data set's default location; only for a single data
    set."""
    freq: int = Field(10, ge=1)
    """Steps between validations; the last step is validated too."""
    steps: int = Field(10, ge=-1)
    """Number of batches of each data set per validation; always the same batches. -1: all of the
    data set, each document once."""
    unit: Literal["global", "local"] = "global"
    """Batches that `steps` counts. global: batches of as many sequences as an optimizer step has;
    local: batches of local_batch_size sequences on each data-parallel rank."""
    local_batch_size: int | None = Field(None, ge=1)
    """With unit = "local": sequences per data-parallel rank in a batch (default:
    training.local_batch_size)."""
    seq_len: int | None = Field(None, ge=1)
    """Tokens in a sequence (default: training.seq_len)."""

    @property
    def datasets(self) -> tuple[str, ...]:
        """Data sets, by their names in the recipe."""
        return (self.dataset,) if isinstance(self.dataset, str) else self.dataset

    def data(self, training: DataConfig) -> dict[str, DataConfig]:
        """Return the data section of each data set: the training one with other documents."""
        held_out, path = training.held_out(), self.dataset_path
        if training.validation_fraction is not None:
            return {training.dataset: held_out}
        return {
            name: held_out.model_copy(update={"dataset": name, "dataset_path": path})
            for name in self.datasets
        }

    average: bool = False
    """Validate the average of the weights (optimizer.average) instead of the weights."""
    picture: bool = True
    """Write a picture of the first held-out samples and the model's output to pictures/ in
    job.dump_folder, if the task draws one."""

    def problems(self, context: Context) -> Iterator[Problem]:
        if not self.enable:
            return
        if self.steps == 0:
            yield Problem("steps", "wanted -1 or an integer >= 1")
        if self.local_batch_size and self.unit == "global":
            message = 'a global batch has the size of training; set self.unit = "local"'
            yield Problem("local_batch_size", message, ("unit",))
        if context.recipe.data.validation_fraction is not None:
            return  # its own data sets are not read
        names, several = self.datasets, self.data(context.recipe.data)
        if len(names) == 1:
            yield from several[names[0]].problems(context)
            return
        if not names:
            yield Problem("dataset", "wanted at least one data set")
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield Problem("dataset", f'"{name}" is named twice')
        if self.dataset_path is not None:
            message = "it is for a single data set; list files and folders in self.dataset"
            yield Problem("dataset_path", message, ("dataset",))
            return
        for name, config in several.items():
            if name in DATASETS and DATASETS[name].needs_path:
                message = f'write the file or folder itself in place of "{name}"'
                yield Problem("dataset", message)
                continue
            for problem in config.problems(context):
                yield Problem("dataset", f'"{name}": {problem.message}')


Values = dict[str, float | None]


class Sums(NamedTuple):
    """Sums over one data set, or over all."""

    loss: float
    units: int
    """Number of units in the sum."""
    measured: tuple[int, ...]
    """Additional counts of the task."""

    def values(self, task: Task) -> Values:
        """Return the mean loss, and the metrics that the task derives from these sums."""
        derived = {f"validation_{key}": value for key, value in task.derived(*self).items()}
        return {"validation_loss": self.loss / self.units} | derived


def together(sums: Collection[Sums]) -> Sums:
    """Add the sums of several data sets."""
    losses, counts, measured = zip(*sums, strict=True)
    return Sums(sum(losses), sum(counts), tuple(map(sum, zip(*measured, strict=True))))


class Validator:
    """Measurement of the validation loss when due."""

    def __init__(
        self,
        config: ValidationConfig,
        open_streams: Mapping[str, Callable[[], BatchStream]],
        accumulation: int,
        task: Task,
        model: ParallelModel,
        world: World,
        *,
        draws: bool = False,
        weights: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        Args:
            open_streams: functions that open the held-out data sets, by name.
            draws: whether a validation has a picture, too.
            weights: context in which the weights to validate are in place.
        """
        self.draws, self.weights = draws, weights
        self.config, self.open_streams, self.accumulation = config, open_streams, accumulation
        self.task, self.model, self.world = task, model, world
        self.streams: dict[str, BatchStream] = {}
        if config.enable:
            task.prepare_validation(world.device.torch_device, is_first=world.rank == 0)

    def hooks(
        self, meter: Meter, timeline: Timeline, last: int, is_stopping: Callable[[], bool]
    ) -> Hooks:
        """Return the hooks that validate when due, of a run that is being stopped at its end."""

        def validate(step: int) -> None:
            if self.is_due(step, last) and (step == last or not is_stopping()):
                with timeline.pause("validation"), self.weights():
                    found = self.run()
                    picture = self.picture() if self.draws else None
                meter.log(step, **found)
                if picture is not None and not self.world.rank:
                    meter.picture(step, picture)

        return Hooks(after_step=validate)

    def is_due(self, step: int, last: int) -> bool:
        """Whether there is a validation after `step`."""
        return self.config.enable and (step % self.config.freq == 0 or step == last)

    def run(self) -> Values:
        """Return the metrics of a validation: over all data sets and, if several, of each by name.

        Each is over all targets of the held-out batches, and the same on every rank.
        """
        sums = {name: self._measure(name) for name in self.open_streams}
        row = together(sums.values()).values(self.task)
        if len(sums) > 1:
            for name, each in sums.items():
                row |= {f"{key}/{name}": value for key, value in each.values(self.task).items()}
        return row

    def picture(self) -> Tensor | None:
        """Return the task's picture of the first held-out batch; None if no rank has all outputs.

        All ranks call it together; each draws its own samples.
        """
        stream = self._rewound(next(iter(self.open_streams)))
        batch = next(stream).to(self.world.device.torch_device)
        outputs = self.model.outputs(batch)
        return None if outputs is None else self.task.picture(batch, outputs)

    def _rewound(self, name: str) -> BatchStream:
        """Return a data set, before its first batch."""
        if name not in self.streams:
            self.streams[name] = self.open_streams[name]()
        self.streams[name].rewind()
        return self.streams[name]

    def _measure(self, name: str) -> Sums:
        stream = self._rewound(name)
        device = self.world.device.torch_device
        total = torch.zeros((), dtype=torch.float64, device=device)
        counts: list[Tensor] = []
        for step in itertools.count(1):
            batches = [next(stream).to(device) for _ in range(self.accumulation)]
            found = [torch.cat([b.count()[None], self.task.measure(b)]) for b in batches]
            counts.append(torch.stack(found).sum(0))
            # Ranks reach the end of their documents at different steps, and stop together.
            if self.config.steps == -1 and not self.world.sum(counts[-1][0].clone(), over="data"):
                break
            total += self.model.evaluate(batches)
            if step == self.config.steps:
                break
        total = self.world.sum(self.world.terms(total), over="all")
        count, *measured = self.world.sum(torch.stack(counts).sum(0), over="data").tolist()
        return Sums(float(total), count, tuple(measured))
