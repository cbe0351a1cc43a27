"""Amounts of a mixture: the samples that a run takes from each source, stage by stage.

They follow from the recipe and the number of tokens of each source, so that most mistakes in them
are found before any text is tokenized.
"""

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchtitan.config import RecipeError
from torchtitan.data.settings import DataConfig, SourceConfig
from torchtitan.data.sizes import StepSizes, tokens_before
from torchtitan.data.tokens.mixed_sources import MixtureSchedule, whole_weights


class Progress(NamedTuple):
    """Progress of a run."""

    samples: int = 0
    """Samples that the run has consumed."""
    next: int = 0
    """Number of the first sample that no rank was given; lost replica groups leave some behind."""
    steps: int = 0
    tokens: int = 0


class Consumed(NamedTuple):
    """Samples and tokens that a run has taken from a source."""

    samples: int = 0
    tokens: int = 0


class PlannedStage(NamedTuple):
    """Stage of the recipe."""

    start: int
    """Number of the run's samples before it."""
    weights: Sequence[int]
    spec: Mapping[str, Any]
    """Amount of each source, by its name, as the recipe has it."""


class Amounts:
    """Amounts that a run takes from its sources."""

    def __init__(
        self,
        config: DataConfig,
        sources: Sequence[SourceConfig],
        tokens: Sequence[int | None],
        *,
        seq_len: int,
        steps: int | None,
        sizes: Sequence[StepSizes],
    ) -> None:
        """
        Args:
            seq_len: length of the samples that amounts are counted in.
            sizes: those of the run's steps.
            tokens: number of tokens that each source has; None for text that has yet to be
                tokenized.
            steps: length of the run; None if unknown, as in validation.
        """
        self._config, self._sources, self._tokens = config, sources, tokens
        self._seq_len, self._steps, self._sizes = seq_len, steps, sizes

    def samples(self, first: int, end: int) -> int:
        """Return the number of samples in the steps of the run after `first` until `end`."""
        tokens = tokens_before(end, self._sizes) - tokens_before(first, self._sizes)
        return tokens // self._seq_len

    def plan(
        self,
        progress: Progress,
        totals: Sequence[Consumed],
        schedule: MixtureSchedule | None = None,
    ) -> list[PlannedStage]:
        """Return the stages of the recipe, for a run that has made `progress`.

        Args:
            totals: samples and tokens of each source until now.
            schedule: the mixture so far, for sources with numbers of tokens.

        Raises:
            RecipeError: if the sources do not add up to the run.
        """
        if all(source.weight is not None for source in self._sources):
            plan = [self._planned(-1, [source.weight or 0 for source in self._sources])]
        else:
            spec = {source.label: source.spec for source in self._sources}
            weights = schedule.weights if schedule else self._shares(progress, totals)
            plan = [PlannedStage(-1, weights, spec)]
        for number, stage in enumerate(self._config.stages):
            if stage.from_step is not None:
                later = self.samples(progress.steps, stage.from_step)
            else:
                assert stage.from_tokens is not None, "the recipe was checked"
                later = -((progress.tokens - stage.from_tokens) // self._seq_len)
            start = progress.next + later
            if later >= 0 and start <= plan[-1].start:  # the past may be of another length
                raise RecipeError([f"data.stages.{number}: it starts before the stage above it"])
            plan.append(self._planned(start, stage.weights))
        return plan

    def _planned(self, start: int, weights: Sequence[float]) -> PlannedStage:
        whole = whole_weights(weights)
        named = zip(self._sources, whole, strict=True)
        return PlannedStage(start, whole, {source.label: w for source, w in named if w})

    def _shares(self, progress: Progress, totals: Sequence[Consumed]) -> list[int]:
        """Return weights that give each source its number of tokens or epochs in the run."""
        assert self._steps is not None, "only training has sources with numbers of tokens"
        left = self.samples(progress.steps, self._steps)
        each = self.samples(self._steps - 1, self._steps)  # of the last step
        fixed = self._fixed(totals)
        weights = whole_weights([source.weight or 0 for source in self._sources])
        rest = left - sum(number or 0 for number in fixed)
        open_ended = [
            number
            for number, source in enumerate(self._sources)
            if source.epochs is not None and self._tokens[number] is None
        ]
        if open_ended:  # its epochs may be all that is left
            fixed[open_ended[0]], weights = max(0, rest), [0] * len(weights)
            rest = min(0, rest)
        has_weights = sum(weights) > 0
        if (rest < 0) if has_weights else (abs(rest) >= each):
            known = (left - rest) * self._seq_len
            steps = self._steps + -rest // each
            least = "at least " if open_ended else ""
            raise RecipeError(
                [
                    f"data.sources: the sources with tokens or epochs have {least}{known:,} "
                    f"tokens, and the run trains on {left * self._seq_len:,}; set training.steps "
                    f"= {steps}{' or more' if open_ended else ''}"
                    + ("" if has_weights or rest < 0 else ", or give one of them a weight instead")
                ]
            )
        if not has_weights:
            return [number or 0 for number in fixed]
        unit = sum(weights)
        return [
            rest * weight if number is None else number * unit
            for number, weight in zip(fixed, weights, strict=True)
        ]

    def _fixed(self, totals: Sequence[Consumed]) -> list[int | None]:
        """Return the samples left of each source with tokens or epochs; None if not known."""
        found: list[int | None] = []
        mistakes = []
        for source, tokens, total in zip(self._sources, self._tokens, totals, strict=True):
            samples = None
            if source.tokens is not None:
                samples = max(0, source.tokens - total.tokens) // self._seq_len
            elif source.epochs is not None and tokens is not None:
                samples = self._samples(int(source.epochs * tokens), total)
            if samples == total.samples == 0:
                mistakes.append(
                    f'data.sources: "{source.label}" has fewer tokens than a sample of '
                    f"{self._seq_len:,} (training.seq_len); raise its amount, or remove it"
                )
            found.append(samples)
        if mistakes:
            raise RecipeError(mistakes)
        return found

    def _samples(self, tokens: int, total: Consumed) -> int:
        """Return the number of samples of `tokens` of a source that are left after `total`.

        With best-fit packing it is a lower bound, as the exact number takes packing all of them.
        """
        left = tokens - total.tokens
        if self._config.packing == "best_fit":
            # Rows do not overlap, so each holds one more token.
            return max(0, left - total.samples) // (self._seq_len + 1)
        return max(0, left - 1) // self._seq_len

    def check_new(self) -> None:
        """Check the amounts of a new run, as far as the tokens of the sources are known.

        Raises:
            RecipeError: if they cannot be right.
        """
        if self._steps is None:
            return
        totals = [Consumed()] * len(self._sources)
        plan = self.plan(Progress(), totals)
        first = active(plan, 0)
        samples = range(self.samples(0, self._steps))
        self.check(MixtureSchedule(plan[first].weights), plan[first + 1 :], samples, totals)

    def check(
        self,
        schedule: MixtureSchedule,
        later: Sequence[PlannedStage],
        samples: range,
        totals: Sequence[Consumed],
    ) -> None:
        """Refuse a run that takes more from a source than it has.

        Args:
            later: stages after that of `schedule`.
            samples: those that the run has left.

        Raises:
            RecipeError: with each source of which it takes more.
        """
        starts = (samples.start, *(stage.start for stage in later), samples.stop)
        bounds = [min(n, samples.stop) for n in starts]
        schedules = [schedule, *(MixtureSchedule(stage.weights) for stage in later)]
        sizes = [b - a for a, b in itertools.pairwise(bounds)]
        parts = list(zip(schedules, sizes, strict=True))
        mistakes = []
        for number, (source, tokens) in enumerate(zip(self._sources, self._tokens, strict=True)):
            if source.most_epochs is None or tokens is None:
                continue
            most = self._samples(tokens * source.most_epochs, totals[number])
            needed = sum(each.least(number, size) for each, size in parts)
            if needed <= most < needed + len(parts):
                needed = sum(each.counts(size)[number] for each, size in parts)
            if needed > most:
                mistakes.append(
                    f'data.sources.{number}: "{source.label}" has {tokens:,} tokens, and the run '
                    f"takes {totals[number].tokens + needed * self._seq_len:,} from it; set "
                    "repeat = true, or give it a smaller share"
                )
        if mistakes:
            raise RecipeError(mistakes)


def active(plan: Sequence[PlannedStage], number: int) -> int:
    """Return the index of the stage of a sample."""
    return max(0, bisect_right([stage.start for stage in plan], number) - 1)
