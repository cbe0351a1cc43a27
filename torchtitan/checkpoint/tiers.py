"""Frequent checkpoints, whose files may be on the disks of several nodes.

    <folder>/step-40   on each node: the files that it holds, and index, state and manifest

Each node commits a save by itself, so `step-40` on one node says nothing of the others. A
checkpoint is whole if every file of its manifest is on some node, with the bytes that were saved.
What a rank reads and its node lacks is sent to it by a node that has it.

A node that was away may come back with checkpoints of steps that the run has trained again since;
the history of the run's starts, next to the other checkpoints, tells which ones still count.
"""

import json
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, starmap
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import xxhash
from torch import Tensor

from torchtitan.checkpoint.deliveries import Delivery, Span, appending, deliver, receive, send
from torchtitan.checkpoint.folder import saved_steps, state_file, sweep
from torchtitan.checkpoint.initial import ResumePoint
from torchtitan.checkpoint.manifest import (
    Damaged,
    File,
    Manifest,
    hash_file,
    problems_of_files,
    read_manifest,
    read_whole,
    write_json,
    write_manifest,
)
from torchtitan.checkpoint.nodes import find_nodes
from torchtitan.checkpoint.placement import blocks_to_load, on_all_ranks, on_rank_0
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.start import ResumePolicy
from torchtitan.checkpoint.storage import INDEX, SavedTensors, Written
from torchtitan.checkpoint.store import DISK, HISTORY, MANIFEST, OF_NODE
from torchtitan.logging import logger
from torchtitan.parallel import World
from torchtitan.parallel.world import OBJECT_TIMEOUT

KEY = "checkpoint.frequent"
SHOWN = 3
"""Maximum number of files in a message."""
Starts = list[tuple[str, int]]


def read_history(path: Path) -> Starts:
    """Return the starts of a run so far: a name for each, and the step that it began at."""
    try:
        return [(name, step) for name, step in json.loads(path.read_bytes())["starts"]]
    except FileNotFoundError:
        return []


def is_past(starts: Starts, start: str, step: int) -> bool:
    """Whether a step that a start has saved is of the run's past: no later start began before."""
    names = [name for name, _ in starts]
    return start in names and all(step <= at for _, at in starts[names.index(start) + 1 :])


class Held(NamedTuple):
    """Files that one node holds of a checkpoint."""

    expected: int
    """Number of files in its manifest."""
    files: Mapping[str, File]


class Known(NamedTuple):
    """Files that all nodes together hold of a checkpoint."""

    manifest: Manifest
    holders: Mapping[str, set[int]]
    """Nodes that hold a file, for each of the manifest."""

    def lacking(self) -> list[str]:
        """Return the files that no node holds."""
        return [name for name, nodes in self.holders.items() if not nodes]


class FrequentTier:
    """The frequent checkpoints of a run; all methods are called by every rank."""

    def __init__(self, config: CheckpointConfig, dump_folder: Path, world: World) -> None:
        self.config, self.world = config.frequent, world
        self.history = config.path_in(dump_folder) / HISTORY
        full = dump_folder.resolve()
        own = f"{full.name}-{xxhash.xxh3_64_hexdigest(str(full).encode())[:8]}"
        mark = f".rank-{secrets.token_hex(4)}-"
        about = on_rank_0(world, lambda: (own, mark, read_history(self.history)))
        own, mark, self.starts = about
        folder = dump_folder / self.config.folder
        self.folder = folder / own if Path(self.config.folder).is_absolute() else folder
        host = socket.gethostname()
        self.nodes = find_nodes(world, self.folder, mark, host, f"{KEY}.folder")
        self.start = ""
        self.replicas = min(self.config.replicas, self.nodes.count - 1)
        if self.replicas < self.config.replicas and world.rank == 0:
            message = "%s.replicas: got %d, but there are only %d other nodes"
            logger.warning(message, KEY, self.config.replicas, self.replicas)
        self.group: dist.ProcessGroup | None = None
        self.known: dict[int, Known] = {}
        self.refused: dict[int, str] = {}
        """Damaged checkpoints, with the reasons."""

    def path(self, step: int) -> Path:
        """Return the folder of a checkpoint on this node."""
        return self.folder / f"step-{step}"

    def holds(self, path: Path | None) -> bool:
        """Whether a checkpoint is of this tier."""
        return path is not None and path.parent == self.folder

    # --- what there is ---

    def survey(self) -> None:
        """Find out which files of which checkpoints there are on which nodes."""
        by_node = self.nodes.lead(self._held)
        steps = sorted({step for held in by_node for step in held})
        self.known = {}

        def first(step: int) -> int:
            """The node whose manifest counts: one that records a rollback has a file more."""
            expected = [held[step].expected if step in held else 0 for held in by_node]
            return expected.index(max(expected))

        for step in steps:
            leader = self.nodes.ranks[first(step)][0]
            mine = read_manifest(self.path(step)) if leader == self.world.rank else None
            manifest: Manifest = self.world.broadcast_object(mine, leader)
            self.known[step] = Known(
                manifest,
                {
                    name: {
                        node
                        for node, held in enumerate(by_node)
                        if step in held and held[step].files.get(name) == file
                    }
                    for name, file in manifest.files.items()
                },
            )

    def _held(self) -> dict[int, Held]:
        """Return what this node holds of the run's past: small files intact, others by size."""
        found = {}
        for step, path in saved_steps(self.folder).items():
            if not (path / MANIFEST).exists():
                continue  # its files were just being received
            try:
                manifest = read_manifest(path)
            except Damaged as error:
                logger.error("%s", error)
                continue
            if is_past(self.starts, manifest.start, step):
                files = {n: f for n, f in manifest.files.items() if _is_there(path, manifest, n)}
                found[step] = Held(len(manifest.files), files)
        return found

    def whole(self) -> list[int]:
        """Return the steps of whole checkpoints, as far as known, in order."""
        return [n for n in self.known if n not in self.refused and not self.known[n].lacking()]

    def choose(self, policy: ResumePolicy, damaged: Mapping[Path, str]) -> ResumePoint:
        """Choose the starting point of the run over both tiers; see `ResumePolicy.start`."""
        asked = policy.config.load_step
        steps = [n for n in self.whole() if asked in (-1, n)]
        offered = {} if policy.config.resume == "never" else {n: self.path(n) for n in steps[-1:]}
        for step in offered:
            self.describe(step)

        def start() -> tuple[ResumePoint, int]:
            found = policy.start(damaged, offered)
            return found, next((n for n, path in offered.items() if path == found.path), -1)

        found, step = on_rank_0(self.world, start)
        # The path of this node, which need not be that of rank 0's.
        return found if step < 0 else found._replace(path=self.path(step))

    def describe(self, step: int) -> None:
        """Have the index, state and manifest of a checkpoint on every node."""
        known, path = self.known[step], self.path(step)
        manifest = known.manifest
        names = (INDEX, state_file(manifest))
        lacking = {name: set(range(self.nodes.count)) - known.holders[name] for name in names}
        if not any(lacking.values()):
            return
        found: dict[str, bytes] = {}
        for name in names:
            source = self.nodes.ranks[min(known.holders[name])][0]
            read = partial(read_whole, path, manifest, name)
            mine = on_all_ranks(self.world, read if self.world.rank == source else lambda: b"")
            found[name] = self.world.broadcast_object(mine, source)
            known.holders[name].update(range(self.nodes.count))

        def write() -> None:
            path.mkdir(exist_ok=True)
            for name, data in found.items():
                if self.nodes.own in lacking[name]:
                    DISK.write(path / name, data)
            write_manifest(path, manifest)
            DISK.sync(path)

        self.nodes.lead(write)

    def verify(self, step: int) -> str | None:
        """Read all that nodes hold of a checkpoint; return why it is not whole, None if it is."""
        known, own = self.known[step], self.nodes.own
        ranks = self.nodes.ranks[own]
        here = sorted(name for name, nodes in known.holders.items() if own in nodes)
        mine = here[ranks.index(self.world.rank) :: len(ranks)]

        def read() -> dict[str, str]:
            return {
                name: problem
                for name in mine
                for problem in problems_of_files(self.path(step), known.manifest, [name])
            }

        for rank, damaged in enumerate(self.world.gather(on_all_ranks(self.world, read))):
            for name, problem in damaged.items():
                node = self.nodes.of_rank(rank)
                known.holders[name].discard(node)
                logger.error("%s: %s", self.nodes.names[node], problem)
                self.refused |= {step: problem} if not known.holders[name] else {}
        return self.refused.get(step)

    def fetch(self, step: int, saved: SavedTensors, tensors: Mapping[str, Tensor]) -> None:
        """Have what ranks will read of `tensors`, and their nodes lack, sent to their disks."""
        known, own = self.known[step], self.nodes.own
        places = dict.fromkeys(_places(tensors, saved))
        needed = [span for span in places if own not in known.holders[span.name]]
        deliveries = list(self._deliveries(known, self.world.gather(needed)))
        if not deliveries:
            return
        name = f"received-{self.world.rank}"
        deliver(self.world, self.path(step), deliveries, appending(self.path(step) / name))
        mine = [
            span for each in deliveries if each.target == self.world.rank for span in each.spans
        ]
        ends = accumulate(span.size for span in mine)
        for span, end in zip(mine, ends, strict=True):
            saved.moved[span.name, span.begin] = name, end - span.size
        size = sum(span.size for each in deliveries for span in each.spans)
        logger.info("%s: sent %s kB from node to node", KEY, f"{size / 1e3:,.1f}")

    def _deliveries(self, known: Known, needed: Sequence[Sequence[Span]]) -> Iterator[Delivery]:
        """Yield deliveries of the bytes that ranks need, each from a rank whose node has them."""
        for target, spans in enumerate(needed):
            by_source: dict[int, list[Span]] = {}
            for span in spans:
                there = sorted(known.holders[span.name])
                ranks = self.nodes.ranks[there[target % len(there)]]
                by_source.setdefault(ranks[target % len(ranks)], []).append(span)
            for source in sorted(by_source):
                yield Delivery(source, target, tuple(by_source[source]))

    # --- a start ---

    def begin(self, step: int) -> None:
        """Record that the run starts from a step, and delete what is not of its past."""

        def record() -> str:
            name = secrets.token_hex(4)
            self.history.parent.mkdir(parents=True, exist_ok=True)
            starts = [*read_history(self.history), (name, step)]
            write_json(self.history, {"folder": str(self.folder), "starts": starts})
            return name

        self.start = on_rank_0(self.world, record)
        self.starts = [*self.starts, (self.start, step)]
        self.nodes.lead(lambda: self._clear(step))
        self.refused = {}
        if self.replicas and self.group is None:
            # Of its own, as a thread uses it.
            self.group = dist.new_group(backend="gloo", timeout=OBJECT_TIMEOUT, group_desc="copies")

    def _clear(self, step: int) -> None:
        (self.folder / OF_NODE).touch()
        for path in [*self.folder.glob("step-*/received-*"), *self.folder.glob(".rank-*")]:
            path.unlink()
        for name in sweep(self.folder):
            logger.info("deleted %s: an unfinished save", self.folder / name)
        for number, path in saved_steps(self.folder).items():
            if number in self.refused:
                logger.error("renamed %s to %s", path, DISK.set_aside(path))
            elif number > step or not (path / MANIFEST).exists():
                DISK.delete(path)

    def report(self, step: int) -> None:
        """Log the newest checkpoint that is lost to a run that starts from a step, and the cost."""
        if self.starts and not self.known and self.world.rank == 0:
            message = "%s: no node holds a checkpoint of this run in %s"
            logger.warning(message, KEY, self.folder)
        lost = [number for number in self.known if number > step and number not in self.whole()]
        if not lost or self.world.rank:
            return
        newest = lost[-1]
        why = self.refused.get(newest) or "; ".join(self._missing(newest))
        again = f"{newest - step} step{'s are' if newest - step > 1 else ' is'} trained again"
        message = "%s: step-%d is lost: %s. The run goes on from step %d: %s"
        logger.warning(message, KEY, newest, why, step, again)

    def _missing(self, step: int) -> Iterator[str]:
        manifest, lacking = self.known[step].manifest, self.known[step].lacking()
        for name in lacking[:SHOWN]:
            nodes = manifest.nodes.get(name, ())
            yield f"{name} was on {' and '.join(nodes)}" if nodes else f"{name} is on no node"
        if len(lacking) > SHOWN:
            yield f"and {len(lacking) - SHOWN} more files"

    # --- a save ---

    def about_save(self, everyones: Sequence[Written | None]) -> dict[str, Any]:
        """Return the fields of a manifest that say who holds the files of each rank."""
        if self.nodes.count == 1:
            return {"start": self.start}
        nodes = {
            one.name: [self.nodes.names[node] for node in self._keepers(rank)]
            for rank, one in enumerate(everyones)
            if one is not None
        }
        return {"start": self.start, "nodes": nodes}

    def _keepers(self, rank: int) -> list[int]:
        """Return the nodes that keep the file of a rank: its own, and the next ones."""
        first = self.nodes.of_rank(rank)
        return [(first + n) % self.nodes.count for n in range(self.replicas + 1)]

    def spread(self, checkpoint: Path, everyones: Sequence[Written | None]) -> None:
        """Send this rank's file to the next nodes and keep those of others, on a thread.

        The checkpoint is there already; a copy appears in it when all its bytes are on disk.
        """
        for rank, one in enumerate(everyones if self.group else ()):
            for node in self._keepers(rank)[1:] if one else ():
                assert one is not None, "a rank without a file sends none"
                target = self.nodes.ranks[node][rank % len(self.nodes.ranks[node])]
                copy = Delivery(rank, target, (Span(one.name, 0, one.file.bytes),))
                try:
                    self._copy(checkpoint, copy, one.file)
                except (OSError, Damaged) as error:
                    logger.error("%s: %s was not copied: %s", KEY, checkpoint / one.name, error)

    def _copy(self, checkpoint: Path, copy: Delivery, expected: File) -> None:
        """Send or keep a file, if this rank does either."""
        assert self.group is not None, "replicas have a group"
        if copy.source == self.world.rank:
            send(checkpoint, copy, self.group)
        if copy.target == self.world.rank:
            new = checkpoint / f"{copy.spans[0].name}.new"
            receive(checkpoint, copy, self.group, appending(new))
            if hash_file(new) != (expected.bytes, expected.xxh3_128):
                raise Damaged(f"{new}: damaged: its bytes differ from those saved")
            new.replace(checkpoint / copy.spans[0].name)
            DISK.sync(checkpoint)


def open_tier(config: CheckpointConfig, dump_folder: Path, world: World) -> FrequentTier | None:
    """Return the frequent checkpoints of a run; None if it has none."""
    return FrequentTier(config, dump_folder, world) if config.frequent.interval else None


def choose_together(policy: ResumePolicy, world: World) -> ResumePoint:
    """Choose on all ranks together where the run starts; see `ResumePolicy.start`."""
    tier = open_tier(policy.config, policy.dump_folder, world)
    if tier is None:
        return on_rank_0(world, policy.start)
    tier.survey()
    return tier.choose(policy, {})


def _is_there(checkpoint: Path, manifest: Manifest, name: str) -> bool:
    """Whether a file has its size, and, if it is small, its bytes."""
    try:
        if name in (INDEX, state_file(manifest)):
            read_whole(checkpoint, manifest, name)
        return (checkpoint / name).stat().st_size == manifest.files[name].bytes
    except FileNotFoundError:
        return False
    except (OSError, Damaged) as error:
        logger.error("%s", error)
        return False


def _places(tensors: Mapping[str, Tensor], saved: SavedTensors) -> Iterator[Span]:
    """Yield the pieces in which a checkpoint has what this rank holds of `tensors`."""
    found = saved.shapes()
    # Of a replica of the model, which starts as the first if the checkpoint has no other.
    firsts = {n.split(".", 2)[2]: t for n, t in tensors.items() if n.startswith("replica.")}
    wanted = {
        name: tensor
        for name, tensor in [*tensors.items(), *firsts.items()]
        if name in found and found[name][1] == tuple(tensor.shape)
    }
    for block in blocks_to_load(wanted, found):
        yield from starmap(Span, saved.places(*block))
