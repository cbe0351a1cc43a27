"""Batches of tokenized sources: sample i of the run is a function of the recipe and i alone.

The samples of a *stage* are assigned to the sources by their weights; sample k of a source in the
stage starts k * seq_len tokens after the stage's first. So every rank computes the samples that it
serves, and the state of the stream is the position of each source, the same on all ranks.
"""

import itertools
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchdata.nodes import BaseNode

from torchtitan.config import ConfigError, RecipeError
from torchtitan.data.lanes import Sample
from torchtitan.data.order import COMPUTED, ORDER, Identity, hash_text
from torchtitan.data.settings import DataConfig
from torchtitan.data.sizes import StepSizes
from torchtitan.data.stream import BatchStream, Packing, SampleWorker, State, refuse_other
from torchtitan.data.tokenizer import NoTokenizer
from torchtitan.data.tokens.amounts import Amounts, Consumed, PlannedStage, Progress, active
from torchtitan.data.tokens.mixed_sources import MixtureSchedule, TokenSource
from torchtitan.data.tokens.sample_reader import Cursor, RowReader, SourcePosition, TokenReader
from torchtitan.logging import logger

READERS = {"join": TokenReader, "best_fit": RowReader}
"""Readers of a source by `data.packing`."""


class Stage:
    """Consecutive samples of one mixture."""

    def __init__(
        self,
        start: int,
        schedule: MixtureSchedule,
        cursors: Sequence[Cursor],
        totals: Sequence[Consumed],
        spec: Mapping[str, Any],
    ) -> None:
        """
        Args:
            start: number of the run's samples before it.
            cursors: positions of the sources at its start.
            totals: samples and tokens of each source before it.
            spec: the mixture as the recipe has it.
        """
        self.start, self.schedule, self.cursors = start, schedule, cursors
        self._totals, self.spec = totals, spec

    def turn(self, number: int) -> tuple[int, int]:
        """Return the source of a sample of the run, and its number there since the start."""
        return self.schedule.turn(number - self.start)

    def totals(self, number: int, seq_len: int) -> list[Consumed]:
        """Return the amount of each source before sample `number` of the run."""
        counts = self.schedule.counts(number - self.start)
        return [
            Consumed(before.samples + count, before.tokens + count * seq_len)
            for before, count in zip(self._totals, counts, strict=True)
        ]

    def positions(self, number: int) -> list[SourcePosition]:
        """Return the position of each source before sample `number` of the run."""
        counts = self.schedule.counts(number - self.start)
        return [cursor.position(n) for cursor, n in zip(self.cursors, counts, strict=True)]


class TokenStream(BatchStream):
    """Batches of the samples of tokenized sources."""

    def __init__(
        self,
        config: DataConfig,
        sources: Sequence[TokenSource],
        packing: Packing,
        *,
        seq_len: int,
        seed: int,
        steps: int | None = None,
        once: bool = False,
        **part: Any,
    ) -> None:
        """
        Args:
            steps: length of the run; None if unknown, as in validation.
            once: read each document once, and padding after that.
            part: arguments of `BatchStream`.
        """
        super().__init__(config, packing, **part)
        self._sources, self._seed, self._steps = sources, seed, steps
        self._once = once
        self._set_length(seq_len)
        self._lock = threading.Lock()
        self._reported_epochs: dict[str, int] = {}  # by source
        self.rewind()

    def _set_length(self, seq_len: int) -> None:
        self._seq_len = seq_len
        self._amounts = Amounts(
            self._config,
            [source.config for source in self._sources],
            [source.documents.tokens for source in self._sources],
            seq_len=seq_len,
            steps=self._steps,
            sizes=self._sizes or [StepSizes(0, self._global_batch, seq_len)],
        )
        self._open_readers(COMPUTED if self.earlier else ORDER)

    def resize(
        self, packing: Packing, seq_len: int, *, local_batch_size: int, accumulation: int
    ) -> None:
        sizes = {"local_batch_size": local_batch_size, "accumulation": accumulation}
        super().resize(packing, seq_len, **sizes)
        self._set_length(seq_len)

    def _open_readers(self, order: int | str) -> None:
        """Open the sources, whose documents have an order of this version."""
        self._readers = [
            READERS[self._config.packing](
                source.name,
                source.documents,
                seq_len=self._seq_len,
                seed=self._seed,
                shuffle=self._config.shuffle,
                epochs=1 if self._once else source.config.most_epochs,
                is_padded=self._once,
                order=order,
            )
            for source in self._sources
        ]

    def follow(self, saved: Identity) -> None:
        super().follow(saved)
        if self.earlier:
            self._open_readers(COMPUTED)
            self.rewind()

    def rewind(self) -> None:
        self._state: State | None = None
        self._restart(
            Progress(), [SourcePosition()] * len(self._sources), [Consumed()] * len(self._sources)
        )
        self._set_hash(hash_text(0))

    def _restart(
        self,
        progress: Progress,
        positions: Sequence[SourcePosition],
        totals: Sequence[Consumed],
        schedule: MixtureSchedule | None = None,
        pending: Sequence[int] = (),
    ) -> None:
        """Continue after `progress`, with the sources at `positions`.

        Args:
            totals: samples and tokens of each source until now.
            schedule: the mixture so far, if it continues.
            pending: earlier samples to serve first.
        """
        self.close()
        self._before, self._pending, self._served = progress, pending, 0
        self._steps_of = [0] * self._groups  # since `progress`, by replica group
        self._stages: list[Stage] = []
        self._later: list[PlannedStage] = []
        self._open = partial(self._open_stages, progress, positions, totals, schedule)

    def _open_stages(
        self,
        progress: Progress,
        positions: Sequence[SourcePosition],
        totals: Sequence[Consumed],
        schedule: MixtureSchedule | None,
    ) -> None:
        """Open the stages of the recipe after `progress`, on first use: a state may be loaded.

        Raises:
            ConfigError: if a source has fewer tokens than the run takes from it.
        """
        plan = self._amounts.plan(progress, totals, schedule)
        first = self._first
        now = active(plan, first)
        cursors = [r.cursor(p) for r, p in zip(self._readers, positions, strict=True)]
        weights = plan[now].weights
        starts_now = plan[now].start == first
        if schedule is None or schedule.weights != tuple(weights) or starts_now:
            schedule = MixtureSchedule(weights)
        if self._steps is not None:
            left = self._amounts.samples(progress.steps, self._steps)
            end = progress.next + max(0, left - len(self._pending))
            self._amounts.check(schedule, plan[now + 1 :], range(first, end), totals)
        self._stages = [Stage(first, schedule, cursors, totals, plan[now].spec)]
        self._later = plan[now + 1 :]

    def check(self) -> None:
        """Check the amounts of data that the rest of the run takes.

        Raises:
            ConfigError: if a source has fewer tokens.
        """
        self.stage(self._first)

    def stage(self, number: int) -> Stage:
        """Return the stage of a sample of the run, from the start of this session on."""
        with self._lock:
            if not self._stages:
                self._open()
            while self._later and number >= self._later[0].start:
                start, weights, spec = self._later.pop(0)
                last = self._stages[-1]
                positions = last.positions(start)
                cursors = [r.cursor(p) for r, p in zip(self._readers, positions, strict=True)]
                totals = last.totals(start, self._seq_len)
                stage = Stage(start, MixtureSchedule(weights), cursors, totals, spec)
                self._stages.append(stage)
            index = bisect_right([stage.start for stage in self._stages], number) - 1
            return self._stages[index]

    def source(self, number: int) -> str:
        """Return the name of the source of a sample of the run."""
        return self._sources[self.stage(number).turn(number)[0]].name

    def sample(self, number: int) -> Sample:
        """Return a sample of the run.

        Raises:
            ConfigError: if its source has ended or is damaged.
        """
        stage = self.stage(number)
        source, place = stage.turn(number)
        return stage.cursors[source].sample(place)

    def number(self, turn: int) -> int:
        """Return the number in the run of a sample of this rank, from the start on."""
        step, place = divmod(turn, self._per_step)
        return self._at(step * self._global_batch + self._rank * self._per_step + place)

    def _at(self, place: int) -> int:
        """Return the number in the run of the sample at a place in the order of this session."""
        left = place - len(self._pending)
        return self._pending[left] if left < 0 else self._before.next + left

    def _worker(self, number: int, count: int) -> BaseNode[Any]:
        turns = itertools.count(self._served + number, count)
        return SampleWorker(lambda: self.sample(self.number(next(turns))))

    @property
    def samples(self) -> int:
        return self._progress().samples

    @property
    def _group(self) -> int:
        return self._rank * self._groups // self._ranks

    @property
    def _first(self) -> int:
        """Number of the first sample of this session."""
        return min(self._pending, default=self._before.next)

    def _all_steps(self) -> list[int]:
        """Return the steps that each replica group has made since `_before`."""
        own, rest = divmod(self._served, self._per_step)
        assert not rest, "the state of a data stream is taken between steps"
        steps = list(self._steps_of)
        steps[self._group] = own
        return steps

    def _progress(self) -> Progress:
        """Return the progress of the run; to be read between steps."""
        before, steps = self._before, self._all_steps()
        read = sum(steps) * self._global_batch // self._groups
        given = max(steps) * self._global_batch
        return Progress(
            before.samples + read,
            before.next + max(0, given - len(self._pending)),
            before.steps + max(steps),
            before.tokens + read * self._seq_len,
        )

    def _left(self) -> list[int]:
        """Return the samples before `_progress().next` that no rank has consumed."""
        steps, each = self._all_steps(), self._global_batch // self._groups
        places = [
            step * self._global_batch + group * each + place
            for step in range(min(steps), max(steps))
            for group, own in enumerate(steps)
            for place in range(each)
            if step >= own
        ]
        rest = range(max(steps) * self._global_batch, len(self._pending))
        return [self._at(place) for place in (*places, *rest)]

    def state_dict(self) -> State:
        progress, left = self._progress(), self._left()
        first = min(left, default=progress.next)
        # At the end of a stage its successor may not have been opened.
        stage = self.stage(max(first - 1, self._first))
        schedule = stage.schedule.after(first - stage.start)
        positions, totals = stage.positions(first), stage.totals(first, self._seq_len)
        state = {
            **progress._asdict(),
            "pending": left,
            "seq_len": self._seq_len,
            "hash": self.hash.state(),
            "identity": self._identity(),
            "sources": [
                {
                    "name": source.name,
                    **source.identity,
                    **total._asdict(),
                    "position": position.as_json(),
                }
                for source, total, position in zip(self._sources, totals, positions, strict=True)
            ],
            "mixture": {
                "spec": stage.spec,
                "steps": self._steps_of_mixture,
                "weights": schedule.weights,
                "samples": schedule.before,
                "counts": schedule.before_of,
            },
        }
        if self._groups > 1:
            state["groups"] = {"start": self._state, "steps": self._all_steps()}
        return state

    def load_state_dict(self, merged: State) -> None:
        if "sources" not in merged:
            raise ConfigError(
                "cannot resume on tokens, as the run to resume tokenizes text while training; "
                "restore data.dataset, or start a new run from the checkpoint's weights"
            )
        self.follow(merged["identity"])
        before, own = merged["identity"], self._identity()
        if own["tokenizer"] == NoTokenizer.fingerprint and before["tokenizer"] == "bytes":
            # Earlier versions took all tokens for bytes if the recipe names no tokenizer.
            own |= {key: before[key] for key in self._packing.identity}
        refuse_other(before, own)
        saved = {source["name"]: source for source in merged["sources"]}
        self._check_sources(saved)
        progress = Progress(*(merged[key] for key in Progress._fields))
        found = [saved.get(source.name) for source in self._sources]
        positions = [
            SourcePosition(*each["position"]) if each else SourcePosition() for each in found
        ]
        totals = [
            Consumed(each["samples"], each["tokens"]) if each else Consumed() for each in found
        ]
        mixture, names = merged["mixture"], list(saved)
        self._check_mixture(mixture, progress, totals)
        schedule = None
        if (merged["seq_len"], mixture["steps"]) == (self._seq_len, self._steps_of_mixture):
            weights, counts = (
                [mixture[key][names.index(s.name)] if s.name in saved else 0 for s in self._sources]
                for key in ("weights", "counts")
            )
            schedule = MixtureSchedule(weights, mixture["samples"], counts)
        self._restart(progress, positions, totals, schedule, merged["pending"])
        self.check()
        self._set_hash(merged.get("hash"))
        self._state = {key: value for key, value in merged.items() if key != "groups"}

    @property
    def _steps_of_mixture(self) -> int | None:
        """Length of the run, if the mixture depends on it."""
        depends = any(source.config.weight is None for source in self._sources)
        return self._steps if depends else None

    def _check_sources(self, saved: Mapping[str, Any]) -> None:
        """Refuse sources that are missing, or have changed."""
        own = {source.name: source for source in self._sources}
        mistakes = [
            f"data.sources: {name}, a source of the run to resume, is missing; keep it, with "
            "weight 0 if it is not to be read any more"
            for name in saved
            if name not in own
        ]
        for name, source in own.items():
            before = saved.get(name)
            if before is None or source.config.accept_changes:
                continue
            changes = [
                f"its {key} was {before[key]} and is {value}"
                for key, value in source.identity.items()
                if before[key] != value and None not in (before[key], value)
            ]
            if changes:
                key = "data.sources: " + name if self._config.sources else "data.dataset: it"
                mistakes.append(
                    f"{key} has changed since the checkpoint ({', '.join(changes)}); restore it, "
                    "or set accept_changes = true to continue at the same place in the new one"
                )
        if mistakes:
            raise RecipeError(mistakes)

    def _check_mixture(
        self, mixture: Mapping[str, Any], progress: Progress, totals: Sequence[Consumed]
    ) -> None:
        """Refuse another mixture than the run's until now; a stage may change it from here on."""
        plan = self._amounts.plan(progress, totals)
        # A run that was saved before its first step in a stage has trained with the one before.
        last = [plan[active(plan, n)].spec for n in (progress.next - 1, progress.next)]
        if progress.samples and mixture["spec"] not in last:
            raise RecipeError(
                [
                    f"data.sources: the mixture until step {progress.steps} was "
                    f"{shares(mixture['spec'])}, and the recipe has {shares(last[0])}; to change "
                    "it from here on, restore it, and add [[data.stages]] with from_step = "
                    f"{progress.steps} and the new weights"
                ]
            )

    def load_peer_state(self, state: State) -> None:
        groups = state.get("groups")
        if groups is None:
            self.load_state_dict(state)
            return
        if groups["start"] is None:
            self.rewind()
        else:
            self.load_state_dict(groups["start"])
        self._steps_of = list(groups["steps"])
        self._served = self._steps_of[self._group] * self._per_step

    def positions(self) -> Tensor:
        found = torch.zeros(self._groups, 1, dtype=torch.int64)
        found[self._group] = self._all_steps()[self._group] + 1
        return found

    def update_positions(self, positions: Tensor) -> None:
        for group, [steps] in enumerate(positions.tolist()):
            if steps:
                self._steps_of[group] = steps - 1

    def skip(self, samples: int, step: int | None = None) -> None:
        self.rewind()
        stage, steps = self.stage(samples), samples // self._global_batch if step is None else step
        self._restart(
            Progress(samples, samples, steps, samples * self._seq_len),
            stage.positions(samples),
            stage.totals(samples, self._seq_len),
            stage.schedule.after(samples - stage.start),
        )

    def sources(self, merged: Mapping[str, Any]) -> dict[str, dict[str, int]]:
        known = {reader.name: reader for reader in self._readers}
        found = {}
        for source in merged["sources"]:
            position, samples = SourcePosition(*source["position"]), source["samples"]
            own = {"samples": samples, "epoch": position.epoch}
            if not position.rows:  # which are not in the order of documents
                reader = known[source["name"]]
                own["documents"] = reader.documents_before(position) if samples else 0
            found[source["name"]] = own
        return found

    def describe(self) -> str | None:
        if not self._config.sources:
            return None
        now = self.stage(self._first)
        later = [f"from sample {stage.start:,} on {shares(stage.spec)}" for stage in self._later]
        return "; ".join([shares(now.spec), *later])

    def report(self) -> dict[str, float]:
        if not self._config.sources:
            return {}
        last = self._progress().next
        totals = self.stage(max(last - 1, self._first)).totals(last, self._seq_len)
        row: dict[str, float] = {}
        for source, total in zip(self._sources, totals, strict=True):
            epochs = total.tokens / source.documents.tokens
            row |= {f"tokens/{source.name}": total.tokens, f"epochs/{source.name}": epochs}
            if epochs >= self._reported_epochs.get(source.name, 0) + 1:
                self._reported_epochs[source.name] = int(epochs)
                if not self._rank:
                    logger.info("data: %s is read again, after %d epochs", source.name, epochs)
        return row

    def left_out(self) -> int:
        return 0

    def _identity(self) -> Identity:
        config = self._config
        own = {"seed": self._seed, "shuffle": config.shuffle, "packing": config.packing}
        if self._config.shuffle and not self.earlier:
            own["order"] = ORDER
        return own | self._packing.identity


def shares(spec: Mapping[str, Any]) -> str:
    """Describe a mixture: `70% web, 30% code`."""
    if not all(isinstance(amount, int) for amount in spec.values()):
        return ", ".join(
            f"{value:,} {key} of {name}"
            for name, amount in spec.items()
            for key, value in amount.items()
        )
    total = sum(spec.values())
    return ", ".join(f"{100 * weight / total:.4g}% {name}" for name, weight in spec.items())
