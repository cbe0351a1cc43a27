"""Looks at checkpoints without a run: `torchtitan checkpoint ls`, `verify` and `diff`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchtitan.checkpoint.folder import look_at, read_state, saved_steps
from torchtitan.checkpoint.manifest import MANIFEST, Damaged, problems_of_files, read_manifest
from torchtitan.checkpoint.storage import SavedTensors, digest
from torchtitan.config import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 20
"""Tensors that differ, at most, in `Difference.lines`."""


def find(path: Path) -> list[Path]:
    """The checkpoints at `path`: itself, a folder of them, or a run's dump folder; by step.

    Raises:
        ConfigError: where there is none.
    """
    if (path / MANIFEST).is_file() or (path.name.startswith("step-") and path.is_dir()):
        return [path]
    folders = [path, *(sorted(p for p in path.iterdir() if p.is_dir()) if path.is_dir() else [])]
    found = [step for folder in folders for step in saved_steps(folder).values()]
    if not found:
        raise ConfigError(
            f"{path}: there is no checkpoint (step-N) in it; wanted one, a folder of them, "
            "or the job.dump_folder of a run"
        )
    return found


def table(checkpoints: Iterable[Path]) -> "Table":
    """A line for each: what it holds, and whether its files are there."""
    from rich.table import Table

    headings = ("checkpoint", "step", "holds", "ranks", "layout", "tokens", "size", "digest", "")
    found = Table(*headings, box=None, padding=(0, 2, 0, 0))
    for path in checkpoints:
        try:
            manifest = look_at(path)
        except Damaged as error:
            found.add_row(str(path), *[""] * 7, f"[red]{error}[/red]")
            continue
        used = [f"{axis} {size}" for axis, size in manifest.layout.items() if size > 1]
        tokens = read_state(path, manifest)["train_state"]["tokens"]
        found.add_row(
            *(str(path), str(manifest.step), "weights" if manifest.model_only else "run"),
            *(str(manifest.ranks), ", ".join(used) or "one rank", f"{tokens:,}"),
            *(f"{manifest.bytes / 1e6:,.1f} MB", manifest.digest, "complete"),
        )
    return found


def damage(checkpoint: Path) -> Iterator[str]:
    """Read every byte of a checkpoint; what is not as it was saved, a line each.

    Besides the hashes of the files, the digests of the tensors that are in them are made anew.
    """
    try:
        manifest = read_manifest(checkpoint)
        problems = list(problems_of_files(checkpoint, manifest))
        yield from problems or _wrong_digests(checkpoint)
    except Damaged as error:
        yield str(error)


def _wrong_digests(checkpoint: Path) -> Iterator[str]:
    source = SavedTensors(checkpoint)
    for name, expected in source.digests().items():
        if int(digest(source.read(name)).item()) != expected:
            yield f"{checkpoint}: {name} does not have the digest that it was saved with"


@dataclass(frozen=True)
class Difference:
    """In what two checkpoints differ."""

    recipe: tuple[str, ...]
    counters: tuple[str, ...]
    names: tuple[str, ...]
    tensors: tuple[str, ...]
    equal: int
    """Tensors that are, bit for bit."""

    def __bool__(self) -> bool:
        return bool(self.names or self.tensors or self.counters)

    def lines(self) -> Iterator[str]:
        """For a reader; the recipe, too, which may differ between checkpoints that are equal."""
        yield from self.recipe
        yield from self.counters
        yield from self.names[:SHOWN]
        yield from self.tensors[:SHOWN]
        if more := max(len(self.names) - SHOWN, 0) + max(len(self.tensors) - SHOWN, 0):
            yield f"and {more} tensors more"
        yield f"{self.equal} tensors are equal, {len(self.tensors)} differ in value"


def difference(first: Path, second: Path) -> Difference:
    """Compare two checkpoints of any layouts, one tensor at a time.

    Raises:
        Damaged: where one of them is not what was saved.
    """
    a, b = (read_state(path, look_at(path)) for path in (first, second))
    one, other = SavedTensors(first), SavedTensors(second)
    here, there = one.shapes(), other.shapes()
    names = [
        *(f"only in {first}: {name}" for name in sorted(here.keys() - there.keys())),
        *(f"only in {second}: {name}" for name in sorted(there.keys() - here.keys())),
    ]
    tensors, equal = [], 0
    for name in sorted(here.keys() & there.keys()):
        if here[name] != there[name]:
            names.append(f"{name}: {_kind(*here[name])} -> {_kind(*there[name])}")
            continue
        x, y = one.read(name), other.read(name)
        if torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)):
            equal += 1
            continue
        off = (x.double() - y.double()).abs().max().item()
        largest = max(tensor.double().abs().max().item() for tensor in (x, y))
        tensors.append((off / largest if largest else off, f"{name}: off by {off:.3g} at most"))
    return Difference(
        recipe=tuple(_changes(a["recipe"], b["recipe"], "")),
        counters=tuple(_changes(a["train_state"], b["train_state"], "train_state.")),
        names=tuple(names),
        tensors=tuple(
            f"{line} ({relative:.1e} of the largest)"
            for relative, line in sorted(tensors, reverse=True)
        ),
        equal=equal,
    )


def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def _changes(before: dict[str, Any], after: dict[str, Any], prefix: str) -> Iterator[str]:
    for key in sorted(before.keys() | after.keys()):
        if isinstance(before.get(key), dict):
            continue  # the history of losses, which differs from step to step
        if before.get(key) != after.get(key):
            yield f"{prefix}{key}: {before.get(key)!r} -> {after.get(key)!r}"
