"""Packing of documents into batches, in an order independent of the layout, with exact resumption.

Documents are assigned to a fixed number L of *lanes* (`data.lanes`). A lane joins its documents,
each between BOS and EOS, into one endless sequence of tokens. A *sample* is the next seq_len + 1
tokens of a lane: seq_len inputs and, one to the right, seq_len targets; the last token of a sample
is the first of the next, so that every token is predicted once. Sample i of the run is the next
sample of lane i mod L.

L is a multiple of the global batch G, so that each of R ranks, which serves G/R consecutive samples
of every step, reads only a fixed set of L/R lanes. The state of the stream is one small record per
lane: the start of the lane's next sample. It is the same for any number of ranks, and counts
consumed samples only, however far the threads have run ahead.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from threading import current_thread
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torchdata.nodes import BaseNode, Prefetcher

from torchtitan.config import ConfigError, RecipeError, Unreachable
from torchtitan.data.batch import Batch
from torchtitan.data.file_cache import reading
from torchtitan.data.lanes import SampleStart
from torchtitan.data.order import (
    ORDER,
    Document,
    Identity,
    Position,
    RunningHash,
    Shuffled,
    SinglePass,
    Source,
    hash_text,
    merged_hash,
    sample_hash,
)
from torchtitan.data.processes import ForkedCalls
from torchtitan.data.settings import DataConfig
from torchtitan.data.sizes import StepSizes, least_lanes
from torchtitan.data.sources import ShuffledDocuments
from torchtitan.device import Device
from torchtitan.logging import logger

State = dict[str, Any]


class Samples(Protocol):
    """One lane: an endless iterator of samples, each with the number and the state of its lane."""

    def next_sample(self) -> Any: ...


class Packing(Protocol):
    """Conversion of documents to samples, and of samples to a batch."""

    @property
    def identity(self) -> Identity:
        """Settings, in addition to its documents, that must be equal when a run resumes."""

    def lane(
        self, number: int, documents: Iterator[Document], start: SampleStart | None
    ) -> Samples:
        """Open lane `number` on documents starting with the one that contains `start`."""

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Join samples into a batch."""


def sample_number(first: int, per_step: int, global_batch: int, count: int) -> int:
    """Return the number in a run of the sample that a rank serves `count` samples after `first`."""
    step, rest = divmod(count, per_step)
    return first + step * global_batch + rest


class Stateless(BaseNode[Any]):  # type: ignore[misc]
    """Part of the preparation of batches, whose state is in the samples and never asked for."""

    def get_state(self) -> dict[str, Any]:
        return {}


class SampleWorker(Stateless):
    """Reader of some of a rank's samples; optionally in a thread or process of its own."""

    def __init__(self, read: Callable[[], Any]) -> None:
        """`read` returns the next sample."""
        super().__init__()
        self._read = read

    def next(self) -> Any:
        try:
            with reading():
                return self._read()
        except (ConfigError, Unreachable) as error:
            # A thread would wrap the message in its traceback, so the stream raises it instead.
            return error


class Served(NamedTuple):
    """Batch, its samples as the workers returned them, and the sum of their hashes."""

    batch: Batch
    samples: Sequence[Any]
    hashes: int | None
    """None if samples have no tokens."""
    inputs: int = 0
    """Number of inputs in samples that are parts of documents."""
    padding: int = 0
    """Number of these that are padding."""
    cut: int = 0
    """Number of these whose document starts in another sample."""


class Collator(Stateless):
    """Joins samples, one from each worker in turn, into batches ready to be sent to the device."""

    def __init__(
        self,
        workers: Sequence[BaseNode[Any]],
        size: int,
        packing: Packing,
        device: Device | None,
        number: Callable[[int], int],
    ) -> None:
        """
        Args:
            size: samples in a batch.
            device: device to pin batches for; None leaves them unpinned.
            number: returns the number in the run of the sample after n samples.
        """
        super().__init__()
        self._workers, self._size, self._number = workers, size, number
        self._packing, self._device = packing, device
        self._turn = 0

    def next(self) -> Served | ConfigError | Unreachable:
        samples = []
        hashes: int | None = 0
        for _ in range(self._size):
            sample = next(self._workers[self._turn % len(self._workers)])
            if isinstance(sample, ConfigError | Unreachable):
                return sample
            if hashes is not None and hasattr(sample, "tokens"):
                hashes += sample_hash(self._number(self._turn), sample.tokens)
            else:
                hashes = None
            self._turn += 1
            samples.append(sample)
        batch = self._packing.collate(samples)
        if self._device:
            self._device.make_current()  # which is CUDA's first device in a new thread
            batch = batch.pin(self._device)
        parts = [sample for sample in samples if hasattr(sample, "padding")]  # of documents
        return Served(
            batch,
            samples,
            hashes,
            inputs=sum(len(sample.tokens) - 1 for sample in parts),
            padding=sum(sample.padding for sample in parts),
            cut=sum(sample.cut for sample in parts),
        )


class BatchStream:
    """Endless iterator over the microbatches of one data-parallel rank."""

    _in_processes = False
    """Whether workers are processes, not threads."""

    def __init__(
        self,
        config: DataConfig,
        packing: Packing,
        *,
        local_batch_size: int,
        accumulation: int,
        rank: int,
        ranks: int,
        groups: int = 1,
        device: Device | None = None,
        sizes: Sequence[StepSizes] = (),
    ) -> None:
        """
        Args:
            sizes: those of all steps of the run, if they change; the other arguments are of the
                first.
            ranks: may include the ranks of several replica groups, one group after the other.
            device: device of the batches, which are pinned for it by the thread that prepares them.
        """
        self._config, self._device = config, device
        self._nodes: list[BaseNode[Any]] = []
        """Nodes that prepare batches; the first returns them."""
        weakref.finalize(self, _stop, self._nodes)
        self._rank, self._ranks, self._groups, self._sizes = rank, ranks, groups, sizes
        self._set_sizes(packing, local_batch_size, accumulation)
        self._samples_before = 0
        self._served = 0
        self._inputs = self._padding = self._cut = 0
        self.earlier: Identity | None = None
        """Identity of the data of the run, if an earlier version drew its order."""
        self._set_hash(hash_text(0))

    def _set_sizes(self, packing: Packing, local_batch_size: int, accumulation: int) -> None:
        self._packing, self._local_batch_size = packing, local_batch_size
        self._per_step = local_batch_size * accumulation
        self._global_batch = self._per_step * self._ranks

    def resize(
        self, packing: Packing, seq_len: int, *, local_batch_size: int, accumulation: int
    ) -> None:
        """Serve steps of other sizes; the state of the run must be loaded next."""
        self.close()
        self._set_sizes(packing, local_batch_size, accumulation)

    def follow(self, saved: Identity) -> None:
        """Draw the order as the run whose data has this identity."""
        if saved.get("shuffle") and saved.get("order") != ORDER:
            self.earlier = saved

    def _set_hash(self, before: str | None) -> None:
        """Continue after samples with the hash `before`; None: it is unknown."""
        # A lost replica group leaves samples behind, so no rank knows those of all.
        self.hash = RunningHash(self._rank, before if self._groups == 1 else None)

    def _worker(self, number: int, count: int) -> BaseNode[Any]:
        """Return the reader of every `count`-th sample of this rank, from `number` on."""
        raise NotImplementedError

    def _start(self) -> list[BaseNode[Any]]:
        """Start preparing batches; unless `data.num_workers` is 0, in threads or processes."""
        count, size = self._config.num_workers, self._local_batch_size
        workers = [self._worker(number, max(1, count)) for number in range(max(1, count))]
        first = self.samples + self._rank * self._per_step
        number = partial(sample_number, first, self._per_step, self._global_batch)
        if not count:
            return [Collator(workers, size, self._packing, self._device, number)]
        if self._in_processes:
            workers = [SampleWorker(ForkedCalls(worker.next)) for worker in workers]
        ahead = math.ceil(self._config.prefetch_factor * self._per_step / count)
        workers = [Prefetcher(worker, ahead, snapshot_frequency=0) for worker in workers]
        collator = Collator(workers, size, self._packing, self._device, number)
        return [Prefetcher(collator, self._per_step // size, snapshot_frequency=0), *workers]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if not self._nodes:
            self._nodes += self._start()
        served: Served | ConfigError | Unreachable = next(self._nodes[0])
        if isinstance(served, ConfigError | Unreachable):
            self.close()
            raise served
        self._count(served)
        self._inputs += served.inputs
        self._padding += served.padding
        self._cut += served.cut
        self.hash.add(served.hashes)
        return served.batch

    def _count(self, served: Served) -> None:
        """Count the samples of a batch as consumed."""
        self._served += self._local_batch_size

    @property
    def samples(self) -> int:
        """Samples of the whole run until now; to be read between steps."""
        steps, rest = divmod(self._served, self._per_step)
        assert not rest, "the state of a data stream is taken between steps"
        return self._samples_before + steps * self._global_batch

    def take_shares(self) -> dict[str, tuple[int, int]]:
        """Return part and whole of each share in this rank's inputs since the last call."""
        inputs, padding, cut = self._inputs, self._padding, self._cut
        self._inputs = self._padding = self._cut = 0
        if not inputs:
            return {}
        padded = {"data_padding_pct": (padding, inputs)}
        return {
            **(padded if self._config.packing == "best_fit" else {}),
            "data_cut_pct": (cut, inputs - padding),
        }

    def sources(self, merged: Mapping[str, Any]) -> dict[str, dict[str, int]]:
        """Return the position in each source, by its name, from the merged state of all ranks."""
        raise NotImplementedError

    def check(self) -> None:
        """Check that the rest of the run has enough data.

        Raises:
            ConfigError: if it has not.
        """

    def describe(self) -> str | None:
        """Describe the mixture of the rest of the run, if there is one."""
        return None

    def report(self) -> dict[str, float]:
        """Return the metrics of the sources of a mixture, of all ranks; call it between steps."""
        return {}

    def left_out(self) -> int:
        """Count the documents skipped by this rank since the run started."""
        raise NotImplementedError

    def state_dict(self) -> State:
        """Return this rank's progress; call it between steps and merge over the ranks."""
        raise NotImplementedError

    def load_state_dict(self, merged: State) -> None:
        """Resume from the merged states of a run, on any number of ranks.

        Raises:
            ConfigError: if the data or the packing differ from that run's.
        """
        raise NotImplementedError

    def load_peer_state(self, state: State) -> None:
        """Resume from the state of a peer in another replica group, or of this rank earlier."""
        raise NotImplementedError

    def positions(self) -> Tensor:
        """Return the positions of this rank, for `update_positions` of its peers: int64.

        Positions of other ranks are zeros, so the positions of all peers can be summed.
        """
        raise NotImplementedError

    def update_positions(self, positions: Tensor) -> None:
        """Update the positions of the peers from the sum of all peers' positions."""
        raise NotImplementedError

    def rewind(self) -> None:
        """Return to the first sample."""
        raise NotImplementedError

    def skip(self, samples: int, step: int | None = None) -> None:
        """Move to sample `samples`, after `step` steps of the run (default: those that read it)."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop all workers. The stream stays usable, and rereads from the consumed position."""
        _stop(self._nodes)


def _stop(nodes: list[Any]) -> None:
    """Stop nodes; a process whose threads compute while it exits would abort."""
    for some in (nodes[:1], nodes[1:]):  # the first takes samples from the others
        running = [it for node in some if (it := getattr(node, "_it", None))]
        for each in running:
            each._stop_event.set()
        for each in running:
            if each._thread is not current_thread():  # which may collect garbage
                each._thread.join(30.0)  # torchdata waits half a second, and a read may take longer
    nodes.clear()


class DataStream(BatchStream):
    """Batches of documents that are packed in lanes."""

    def __init__(self, config: DataConfig, source: Source, packing: Packing, **part: Any) -> None:
        """`part` is for `BatchStream`."""
        super().__init__(config, packing, **part)
        self._source = source
        self._in_processes = getattr(source, "in_processes", False)
        # One rank of each replica group; groups are lost as a whole, so these ranks exchange the
        # positions of their lanes.
        each = self._ranks // self._groups
        self._peers = range(self._rank % each, self._ranks, each)
        least = least_lanes(self._sizes) if self._sizes else self._global_batch
        self._lanes = least if config.lanes == -1 else config.lanes
        advice = getattr(source, "advice", lambda lanes: None)(self._lanes)
        if advice is not None:
            logger.warning("data: %s", advice)
        if isinstance(source, ShuffledDocuments) and (part_of_all := source.part):
            use = "held out" if config.is_held_out else "trained on"
            logger.info("data: %s are %s (data.validation_fraction)", part_of_all, use)
        self._restart(0, {})

    def _restart(
        self, samples: int, records: dict[int, SampleStart | None], hash: str | None = hash_text(0)
    ) -> None:
        """Restart before sample `samples` of the run; lanes without a record start over."""
        self.close()
        self._set_hash(hash)
        self._samples_before = samples
        self._served = 0
        self._turns = self._lanes_of(self._rank)
        known = [lane for rank in self._peers for lane in self._lanes_of(rank)]
        self._records = {lane: records.get(lane) for lane in known}

    def follow(self, saved: Identity) -> None:
        super().follow(saved)
        if isinstance(self._source, Shuffled | SinglePass):
            self._source.resume(saved)

    def _lanes_of(self, rank: int) -> list[int]:
        """Return the lanes that a rank serves, in the order of its samples."""
        first = self._samples_before + rank * self._per_step
        return [
            (first + step * self._global_batch + k) % self._lanes
            for step in range(self._lanes // self._global_batch)
            for k in range(self._per_step)
        ]

    def _worker(self, number: int, count: int) -> BaseNode[Any]:
        lanes = itertools.cycle(self._open_lanes(self._turns[number::count]))
        return SampleWorker(lambda: next(lanes).next_sample())

    def _open_lanes(self, numbers: Sequence[int]) -> list[Samples]:
        records = {number: self._records[number] for number in numbers}
        starts = {
            number: Position(record.round, record.document) if record else None
            for number, record in records.items()
        }
        return [
            self._packing.lane(number, documents, records[number])
            for number, documents in self._source.read(starts, self._lanes).items()
        ]

    def _count(self, served: Served) -> None:
        for sample in served.samples:
            assert sample.lane == self._turns[self._served % len(self._turns)]
            self._served += 1
            self._records[sample.lane] = sample.after

    @property
    def epoch(self) -> int:
        """Number of complete passes over all documents by this rank's most advanced lane."""
        positions = [Position(r.round, r.document) for r in self._records.values() if r]
        return max(map(self._source.epoch, positions), default=0)

    def sources(self, merged: Mapping[str, Any]) -> dict[str, dict[str, int]]:
        records = [SampleStart(*record) if record else None for record in merged["lanes"]]
        starts = {
            lane: Position(record.round, record.document)
            for lane, record in enumerate(records)
            if record
        }
        position = {
            "samples": merged["samples"],
            "epoch": max(map(self._source.epoch, starts.values()), default=0),
        }
        if isinstance(self._source, ShuffledDocuments):
            passed = self._source.passed
            position["documents"] = sum(passed(at, n, len(records)) for n, at in starts.items())
        return {self._config.dataset: position}

    def left_out(self) -> int:
        """Count the documents skipped by this rank's lanes since the run started.

        Derived from the positions of the lanes: each document that a lane has passed is a sample,
        or was skipped. So it needs no state, and does not depend on prefetching.
        """
        if (nulls := getattr(self._source, "nulls", None)) is not None:
            return int(nulls.count)  # of this process, those that were read ahead included
        assert isinstance(self._source, ShuffledDocuments), "it numbers its documents"
        each, rest = divmod(self.samples, self._lanes)
        return sum(
            self._source.passed(Position(record.round, record.document), lane, self._lanes)
            - (each + (lane < rest))
            for lane in set(self._turns)
            if (record := self._records[lane])
        )

    def state_dict(self) -> State:
        return {
            "samples": self.samples,
            "lanes": {str(lane): record and list(record) for lane, record in self._records.items()},
            "identity": self._identity(),
            "hash": self.hash.state(),
        }

    def load_state_dict(self, merged: State) -> None:
        """Resume from the merged states of a run, on any number of ranks.

        The sequence length may differ, as records point into documents. ConfigError if the
        documents, the packing, or the lanes differ from that run's.
        """
        if "sources" in merged:
            raise ConfigError(
                "cannot resume on text, as the run to resume reads tokens; restore data.dataset or "
                "data.sources, or start a new run from the checkpoint's weights"
            )
        self.follow(merged["identity"])
        refuse_other(merged["identity"], self._identity())
        records = merged["lanes"]
        if self._config.lanes not in (-1, len(records)):
            raise ConfigError(
                f"data.lanes: the run to resume has {len(records)} lanes, not "
                f"{self._config.lanes}; set data.lanes to -1 or {len(records)}"
            )
        batches = [self._global_batch, *(each.global_batch for each in self._sizes)]
        if misfits := [batch for batch in batches if len(records) % batch]:
            allowed = [n for n in range(1, len(records) + 1) if len(records) % n == 0]
            raise ConfigError(
                f"training.global_batch_size: {misfits[0]} does not divide the "
                f"{len(records)} lanes of the run to resume; use one of "
                f"{', '.join(map(str, allowed))}"
            )
        self._lanes = len(records)
        self._restart(
            merged["samples"],
            {lane: SampleStart(*record) if record else None for lane, record in enumerate(records)},
            merged.get("hash"),
        )

    def load_peer_state(self, state: State) -> None:
        records = state["lanes"]
        lanes = range(len(records) * (self._global_batch // self._per_step) // len(self._peers))
        known = [records.get(str(lane)) for lane in lanes]
        self.load_state_dict({**state, "lanes": known, "hash": None})

    def positions(self) -> Tensor:
        """Return the positions of the lanes of this rank: (lanes of all its peers, 3), int64.

        The numbers of a record, each plus one; zeros for a lane that has not started or belongs to
        another rank. So the positions of all peers can be summed.
        """
        own = set(self._turns)
        rows = [
            [number + 1 for number in record] if record and lane in own else [0, 0, 0]
            for lane, record in sorted(self._records.items())
        ]
        return torch.tensor(rows, dtype=torch.int64)

    def update_positions(self, positions: Tensor) -> None:
        own = set(self._turns)
        for lane, row in zip(sorted(self._records), positions.tolist(), strict=True):
            if any(row) and lane not in own:
                self._records[lane] = SampleStart(*(number - 1 for number in row))

    def _identity(self) -> Identity:
        return {**self._source.identity, **self._packing.identity}

    def rewind(self) -> None:
        self._restart(0, {})

    def skip(self, samples: int, step: int | None = None) -> None:
        """Move to sample `samples` of the run; earlier ones are read and dropped.

        Only reading finds where they end. Each rank does it for the lanes that it serves.
        """
        self._restart(samples, {})
        each, rest = divmod(samples, self._lanes)
        left = {lane: each + (lane < rest) for lane in self._records}
        lanes = self._open_lanes(list(left))
        for turn in range(max(left.values())):
            # In turn, as in training: lanes may share a reader.
            for (number, count), lane in zip(left.items(), lanes, strict=True):
                if turn < count:
                    self._records[number] = lane.next_sample().after


def refuse_other(saved: Identity, own: Identity) -> None:
    """Refuse to resume on data that differs from that of the checkpoint."""
    # A run of before these were recorded.
    earlier = {"bos", "eos", "content"} - saved.keys()
    changed = [
        f"{key} was {saved.get(key)!r} and is {own.get(key)!r}"
        for key in sorted({*saved, *own} - earlier)
        if saved.get(key) != own.get(key)
    ]
    if changed:
        raise ConfigError(
            f"cannot resume on different data: {'; '.join(changed)}. Restore these settings or "
            "files, or start a new run from the checkpoint's weights"
        )


def merge_states(states: Sequence[State]) -> State:
    """Merge the states of all ranks into one JSON value, independent of the layout."""
    first = states[0]
    for state in states[1:]:
        if state["identity"] != first["identity"]:
            raise ConfigError(
                f"ranks read different data: {first['identity']} and {state['identity']}; "
                "every machine needs the same files"
            )
        assert state["samples"] == first["samples"], "ranks are not at the same step"
    hashes = merged_hash([state["hash"] for state in states])
    if "lanes" not in first:
        return {**first, "hash": hashes}  # the rest of tokenized sources is equal on all ranks
    lanes = {int(lane): record for state in states for lane, record in state["lanes"].items()}
    assert sorted(lanes) == list(range(len(lanes))), "some rank's lanes are missing"
    return {**first, "lanes": [lanes[lane] for lane in range(len(lanes))], "hash": hashes}


def build_stream(config: DataConfig, source: Source, packing: Packing, **part: Any) -> DataStream:
    """Build the stream of a data-parallel rank; `part` is for `BatchStream`."""
    batch = part["local_batch_size"] * part["accumulation"] * part["ranks"]
    batch = least_lanes(part["sizes"]) if part.get("sizes") else batch
    if found := [p.within("data") for p in config.batch_problems(batch, part["ranks"])]:
        raise RecipeError(f"{p.path}: {p.message}" for p in found)
    return DataStream(config, source, packing, **part)
