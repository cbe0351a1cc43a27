"""Frequent checkpoints, in a folder that may be on a disk of each node.

    <folder>/step-40   on each node: the files of its ranks, with their index, state and manifest

Each node commits a save by itself, so `step-40` on one node says nothing of the others. A run
resumes from the newest step that each node has for its ranks: with the files of all ranks, on any
layout; otherwise on the layout and the nodes that saved it. If there is none, it resumes from the
newest in `checkpoint.folder`.

A node that was away may come back with checkpoints of steps that the run has trained again since;
the history of the run's starts, next to the other checkpoints, tells which ones still count.
"""

import json
import secrets
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash

from torchtitan.checkpoint.folder import (
    delete_unfinished,
    read_verified_manifest,
    saved_steps,
    state_file,
)
from torchtitan.checkpoint.manifest import Damaged, File, Manifest, write_json
from torchtitan.checkpoint.placement import find_nodes, on_rank_0
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.start import NONE, ResumePoint, ResumePolicy
from torchtitan.checkpoint.store import DISK, HISTORY, OF_NODE, store_of
from torchtitan.config import first_of
from torchtitan.logging import logger
from torchtitan.parallel import World

KEY = "checkpoint.frequent"
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


class FrequentTier:
    """The frequent checkpoints of a run; all methods are called by every rank."""

    def __init__(self, config: CheckpointConfig, dump_folder: Path, world: World) -> None:
        self.config, self.world = config.frequent, world
        self.history = config.path_in(dump_folder) / HISTORY
        full = dump_folder.resolve()
        own = f"{full.name}-{xxhash.xxh3_64_hexdigest(str(full).encode())[:8]}"
        mark = f".rank-{secrets.token_hex(4)}-"
        own, mark, self.starts = on_rank_0(world, lambda: (own, mark, read_history(self.history)))
        folder = dump_folder / self.config.folder
        self.folder = folder / own if Path(self.config.folder).is_absolute() else folder
        self.nodes = find_nodes(world, self.folder, mark, socket.gethostname(), f"{KEY}.folder")
        self.problems: dict[int, str] = {}
        """By step, why not all nodes have it for their ranks; empty if they have."""
        self.damaged: dict[int, str] = {}
        """Steps with files that are not what was saved, with the reasons."""

    def path(self, step: int) -> Path:
        """Return the folder of a checkpoint on this node."""
        return self.folder / f"step-{step}"

    def holds(self, path: Path | None) -> bool:
        """Whether a checkpoint is of this tier."""
        return path is not None and path.parent == self.folder

    # --- what there is ---

    def survey(self) -> None:
        """Find out which checkpoints there are, and which of them each node has for its ranks."""
        by_node = self.nodes.lead(self._found)
        self.problems = {}
        for step in sorted({step for found in by_node for step in found}):
            pairs = zip(self.nodes.names, by_node, strict=True)
            absent = [name for name, found in pairs if step not in found]
            if absent:
                self.problems[step] = f"it is not on {first_of(absent)}"
            elif None in (states := {found[step] for found in by_node}):
                self.problems[step] = "it has the files of another layout, or of other nodes"
            elif len(states) > 1:
                self.problems[step] = "its state differs between nodes: a rollback was interrupted"
            else:
                self.problems[step] = ""

    def _found(self) -> dict[int, File | None]:
        """Return the steps of the run's past on this node: their state, None if not for its ranks.

        The state is the same on all nodes, by its size and digest.
        """
        found: dict[int, File | None] = {}
        for step, path in saved_steps(self.folder).items():
            try:
                manifest = read_verified_manifest(path)
            except Damaged as error:
                logger.error("%s", error)
                continue
            if is_past(self.starts, manifest.start, step):
                state = manifest.files[state_file(manifest)]
                found[step] = state if self._is_for_ranks(manifest) else None
        return found

    def _is_for_ranks(self, manifest: Manifest) -> bool:
        """Whether a checkpoint has all that the ranks of this node read."""

        def has(ranks: Iterable[int]) -> bool:
            return all(f"rank-{rank}.safetensors" in manifest.files for rank in ranks)

        is_same = dict(manifest.layout) == self.world.degrees._asdict()
        return has(range(manifest.ranks)) or (is_same and has(self.nodes.here))

    def steps(self) -> list[int]:
        """Return the steps that can be resumed from, as far as known, in order."""
        return [n for n, problem in self.problems.items() if not problem and n not in self.damaged]

    # --- a start ---

    def begin(self, step: int) -> str:
        """Record that the run starts at a step, and delete later ones; return the start's name."""

        def record() -> str:
            name = secrets.token_hex(4)
            self.history.parent.mkdir(parents=True, exist_ok=True)
            starts = [*read_history(self.history), (name, step)]
            write_json(self.history, {"folder": str(self.folder), "starts": starts})
            store_of(self.history).sync(self.history.parent)
            return name

        start = on_rank_0(self.world, record)
        self.starts = [*self.starts, (start, step)]
        self.nodes.lead(lambda: self._clear(step))
        self.damaged = {}
        return start

    def _clear(self, step: int) -> None:
        (self.folder / OF_NODE).touch()
        for path in self.folder.glob(".rank-*"):
            path.unlink()
        delete_unfinished(self.folder)
        for number, path in saved_steps(self.folder).items():
            if number in self.damaged:
                logger.error("renamed %s to %s", path, DISK.set_aside(path))
            elif number > step:
                DISK.delete(path)

    def report(self, step: int) -> None:
        """Log the newest checkpoint that is lost to a run that starts from a step, and the cost."""
        if self.starts and not self.problems and self.world.rank == 0:
            message = "%s: no node holds a checkpoint of this run in %s"
            logger.warning(message, KEY, self.folder)
        lost = [n for n in self.problems if n > step and n not in self.steps()]
        if not lost or self.world.rank:
            return
        newest = lost[-1]
        why = self.damaged.get(newest) or self.problems[newest]
        again = f"{newest - step} step{'s are' if newest - step > 1 else ' is'} trained again"
        message = "%s: step-%d is lost: %s. The run goes on from step %d: %s"
        logger.warning(message, KEY, newest, why, step, again)


def open_tier(config: CheckpointConfig, dump_folder: Path, world: World) -> FrequentTier | None:
    """Return the frequent checkpoints of a run; None if it has none."""
    return FrequentTier(config, dump_folder, world) if config.frequent.interval else None


def choose(
    policy: ResumePolicy,
    world: World,
    tier: FrequentTier | None,
    damaged: Mapping[Path, str] = NONE,
) -> ResumePoint:
    """Choose on all ranks together where the run starts, over both tiers; see `ResumePolicy`."""
    asked = policy.config.load_step
    offered = {n: tier.path(n) for n in tier.steps() if asked in (-1, n)} if tier else {}

    def start() -> tuple[ResumePoint, bool]:
        found = policy.start(damaged, offered)
        return found, tier is not None and tier.holds(found.path)

    found, is_frequent = on_rank_0(world, start)
    # The path of this node, which need not be that of rank 0's.
    return found._replace(path=offered[max(offered)]) if is_frequent else found


def choose_together(policy: ResumePolicy, world: World) -> ResumePoint:
    """Choose on all ranks together where the run starts; see `ResumePolicy.start`."""
    tier = open_tier(policy.config, policy.dump_folder, world)
    if tier:
        tier.survey()
    return choose(policy, world, tier)
