"""Inspect checkpoints, and convert weights between formats."""

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import typer
import xxhash

from torchtitan.checkpoint.dcp.reader import DcpCheckpoint, saved_by_dcp
from torchtitan.checkpoint.dcp.torchtitan import NO_WEIGHTS, STEP, TOKENS, translated
from torchtitan.checkpoint.folder import read_state, read_verified_manifest
from torchtitan.checkpoint.manifest import Damaged, Manifest, problems_of_files, read_manifest
from torchtitan.checkpoint.storage import Renamed, SavedTensors, TensorSource
from torchtitan.checkpoint.weights import conversion as weights
from torchtitan.checkpoint.weights.opening import find
from torchtitan.checks import load_job
from torchtitan.config import ConfigError, hub, import_modules, is_hub_id
from torchtitan.digest import digest
from torchtitan.logging import logger, make_console, on_terminal
from torchtitan.provenance import versions
from torchtitan.remote import RemotePath, location
from torchtitan.tools.options import (
    Choice,
    Flag,
    Flavor,
    Imports,
    Model,
    Text,
    Verb,
    count,
    number,
    readable,
    separated,
    verb,
)

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 20
"""Tensors that differ, at most, in `Difference.lines`."""
OTHERS = NO_WEIGHTS | {"rng", "communication", "replica"}
"""First parts of the names of tensors that are no weights."""
WHERE = "Checkpoints (step-N), folders of them, or folders of runs: paths or URLs."


def Place(help: str) -> Any:
    """An argument that is a path or a URL."""
    return typer.Argument(parser=readable, metavar="<Path>", help=help)


Paths = Annotated[list[Path], Place(WHERE)]
OnePath = Annotated[Path, Place("Checkpoint, or a folder whose newest is used: path or URL.")]

app = verb(help=__doc__)


@app.command("ls", cls=Verb)
def list_checkpoints(paths: Paths) -> None:
    """List checkpoints: step, layout, size, digest, and whether all files are present.

    Of frequent checkpoints, it lists those on this node.
    """
    # Without a terminal every checkpoint has one line, whatever the length of its path.
    console = make_console(width=None if on_terminal(sys.stdout) else 10_000)
    console.print(table([p for folder in paths for p in find(folder, True)]))


@app.command("verify", cls=Verb)
def verify_checkpoints(paths: Paths) -> int:
    """Read every byte of checkpoints, and report corrupted ones.

    Of frequent checkpoints, it reads those on this node.
    """
    damaged = 0
    for path in (p for folder in paths for p in find(folder, frequent=True)):
        is_sound, lines = verify(path)
        damaged += not is_sound
        print(*lines, sep="\n", flush=True)
    return 1 if damaged else 0


@app.command(cls=Verb)
def diff(
    first: OnePath,
    second: OnePath,
    everything: Annotated[
        bool, Flag("--all", "Show every tensor that differs, not only the first ones.")
    ] = False,
) -> int:
    """Compare two checkpoints of any layouts; the exit status is 1 if they differ."""
    found = difference(*(find(path)[-1] for path in (first, second)))
    print("\n".join(found.lines(None if everything else SHOWN)))
    return 1 if found else 0


@app.command(cls=Verb)
def convert(
    source: Annotated[
        Path,
        Place(
            "Folder of weights, or of checkpoints or a run, whose newest is used: path, URL, or "
            "repository of the Hugging Face hub, hf://org/name[@revision]."
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(parser=location, help="Folder to create: path or URL.")
    ],
    source_format: Annotated[
        str | None,
        Choice(weights.OPEN, "Format of the source (default: detected from the files).", "--from"),
    ] = None,
    target_format: Annotated[
        str | None,
        Choice(
            weights.FORMATS,
            ("Format to write (default: hf if the source is ours, otherwise ours)."),
            "--to",
        ),
    ] = None,
    model: Model = None,
    flavor: Flavor = None,
    recipe: Annotated[
        str | None,
        Text("RECIPE", "Recipe of weights in the format dcp (default: the matching flavor)."),
    ] = None,
    dtype: Annotated[
        str | None, Choice(weights.DTYPES, "Dtype of all weights (default: each keeps its own).")
    ] = None,
    max_shard_size: Annotated[
        str | None, Text("SIZE", "Maximum size of a file (default: 5GB).")
    ] = None,
    with_optimizer: Annotated[
        bool,
        typer.Option(
            "--with-optimizer",
            help=(
                "Also convert optimizer states and counters, so that the run can be resumed; "
                "between ours and dcp."
            ),
        ),
    ] = False,
    average: Annotated[
        bool, Flag("--average", "Convert the average of the weights that optimizer.average keeps.")
    ] = False,
    push: Annotated[
        str | None,
        Text("hf://org/name", "Also upload the folder to this repository of the hub.", "--push"),
    ] = None,
    imports: Imports = None,
) -> None:
    """Convert weights, or a run, to our format, Hugging Face's, Meta's or TorchTitan's.

    For weights of Hugging Face or Meta it prints the section [model] of a recipe that starts from
    them, and writes it to model_section.toml in the new folder.
    """
    import_modules(imports or (), "--imports")
    if push and not is_hub_id(push):
        raise ConfigError(f"--push: got {push}; wanted a repository of the hub, hf://org/name")
    if push and isinstance(destination, RemotePath):
        raise ConfigError(f"--push: it uploads a folder on a disk, and {destination} is a URL")
    if push:
        hub.open_repository(push)  # before the work
    options = weights.ConvertOptions(
        source_format=source_format,
        target_format=target_format,
        model=model,
        flavor=flavor,
        recipe=_effective_settings(recipe) if recipe else None,
        dtype=dtype,
        max_shard_size=max_shard_size,
        with_optimizer=with_optimizer,
        average=average,
    )
    section = weights.convert(source, destination, options, {"versions": versions()})
    if section is not None:
        print(section, end="")
    if push:
        print(f"uploaded: {hub.push(destination, push)}")


@app.command(cls=Verb)
def merge(
    sources: Annotated[
        list[Path],
        Place("Runs, folders of checkpoints, checkpoints, or folders of weights: paths or URLs."),
    ],
    output: Annotated[
        Path, typer.Option("--output", parser=location, metavar="<Path>", help="Folder to create.")
    ],
    steps: Annotated[
        Any, Text("N,N,...", "Steps of each source (default: the newest).", parser=separated(count))
    ] = None,
    shares: Annotated[
        Any,
        Text(
            "W,W,...",
            "Weight of each checkpoint (default: all alike).",
            "--weights",
            parser=separated(number("a number", math.isfinite)),
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """Write the weighted mean of the weights of checkpoints, for `checkpoint.initial_load_path`.

    They may be of one run or of several, in any format, but must be of one network.
    """
    import_modules(imports or (), "--imports")
    found = weights.chosen(sources, steps or ())
    weights.merge(found, shares or [1.0] * len(found), output, {"versions": versions()})


def _effective_settings(recipe: str) -> dict[str, Any]:
    """A recipe by dotted keys; its tokenizer need not be here."""
    read = load_job(recipe, [], None, "cpu", exempt={"model.tokenizer_path"})
    for notice in read.notices:
        logger.info("note: %s", notice)
    return read.config.in_effect()


def table(checkpoints: Iterable[Path]) -> "Table":
    """A line for each: what it holds, and whether its files are there."""
    from rich.table import Table
    from rich.text import Text

    headings = ("checkpoint", "step", "holds", "ranks", "layout", "tokens", "size", "digest", "")
    found = Table(*headings, box=None, padding=(0, 2, 0, 0))
    for path in checkpoints:
        try:
            found.add_row(str(path), *_row(path))
        except ConfigError as error:
            found.add_row(str(path), *[""] * 7, Text(str(error), style="red"))
    return found


def _row(path: Path) -> list[str]:
    """The columns after the name; empty what a checkpoint does not say."""
    if saved_by_dcp(path):
        saved = DcpCheckpoint(path)
        step, tokens = saved.number(STEP), saved.number(TOKENS)
        holds = {name.partition(".")[0] for name in saved.shapes()}
        told = ["" if step is None else str(step), "run" if "optimizer" in holds else "weights"]
        ranks = {re.sub(r"_\d+\.distcp$", "", file) for file in saved.files}
        said = "" if tokens is None else f"{tokens:,}"
        return [*told, str(len(ranks)), "DCP", said, f"{saved.bytes / 1e6:,.1f} MB", "", "complete"]
    manifest = read_verified_manifest(path)
    used = [f"{axis} {size}" for axis, size in manifest.layout.items() if size > 1]
    tokens = read_state(path, manifest)["train_state"]["tokens"]
    return [
        *(str(manifest.step), "weights" if manifest.model_only else "run"),
        *(str(manifest.ranks), ", ".join(used) or "one rank", f"{tokens:,}"),
        *(f"{manifest.bytes / 1e6:,.1f} MB", manifest.digest, _part(manifest) or "complete"),
    ]


def _part(manifest: Manifest) -> str:
    """Say of how many ranks a frequent checkpoint has the files; empty if of all."""
    here = sum(name.startswith("rank-") for name in manifest.files)
    return f"{here} of {manifest.ranks} ranks" if manifest.start and here < manifest.ranks else ""


def verify(checkpoint: Path) -> tuple[bool, list[str]]:
    """Read every byte of a checkpoint: whether it is sound, as far as that can be known; why."""
    if saved_by_dcp(checkpoint):
        return _verify_dcp(checkpoint)
    problems = list(damage(checkpoint))
    if problems:
        return False, problems
    part = _part(read_manifest(checkpoint))
    return True, [f"{checkpoint}: OK{f', the files of {part}' if part else ''}"]


def _verify_dcp(checkpoint: Path) -> tuple[bool, list[str]]:
    try:
        source = DcpCheckpoint(checkpoint)
        found = [*source.verify(), *_doubled_experts(source, checkpoint)]
    except ConfigError as error:
        return False, [str(error)]
    if problems := [problem for problem in found if problem]:
        return False, problems
    unknown = "files are those of another checkpoint of the same shapes"
    if missing := found.count(None):
        known = f"{missing:,} of {len(found):,} items were saved without checksums"
        unknown = f"bits of these were flipped, or {unknown}"
    else:
        known = "every item matches its CRC-32"
    return True, [f"{checkpoint}: complete; {known}. The format cannot tell whether {unknown}"]


def damage(checkpoint: Path) -> Iterator[str]:
    """Read every byte of a checkpoint, and describe what differs from what was saved, a line each.

    Besides the hashes of the files, the digests of their tensors are computed again.
    """
    try:
        manifest = read_manifest(checkpoint)
        problems = list(problems_of_files(checkpoint, manifest))
        if problems or not _part(manifest):
            yield from problems or _wrong_digests(checkpoint)
    except Damaged as error:
        yield str(error)


def _wrong_digests(checkpoint: Path) -> Iterator[str]:
    source = SavedTensors(checkpoint)
    for name in source.shapes():
        tensor = source.read(name)
        if not source.is_intact(name, tensor):
            yield f"{checkpoint}: damaged: {name} does not match its digest"
    yield from _doubled_experts(source, checkpoint)


def _doubled_experts(source: TensorSource, checkpoint: Path) -> Iterator[str]:
    """Find experts with the same weights, as in files that have one rank's experts for all."""
    for name, (_, shape) in source.shapes().items():
        if not (_is_weight(name) and ".experts." in name and len(shape) == 3):
            continue
        first: dict[int, int] = {}
        for index, expert in enumerate(weight := source.read(name)):
            same = first.setdefault(int(digest(expert)), index)
            if same != index and torch.equal(weight[same], expert):
                yield (
                    f"{checkpoint}: {name} has expert {same} again as expert {index}, so another "
                    "is missing"
                )
                break


@dataclass(frozen=True)
class Difference:
    """In what two checkpoints differ."""

    recipe: tuple[str, ...]
    counters: tuple[str, ...]
    names: tuple[str, ...]
    tensors: tuple[str, ...]
    """Tensors that differ in value, weights first, the largest difference first."""
    equal: int
    """Number of tensors that are equal to the bit."""

    def __bool__(self) -> bool:
        return bool(self.names or self.tensors or self.counters)

    def lines(self, shown: int | None = SHOWN) -> Iterator[str]:
        """For a reader; the recipe, too, which may differ between checkpoints that are equal.

        Args:
            shown: tensors of each kind, at most; None: all.
        """
        parts = self.tensors, self.names
        for part in parts:
            yield from part[:shown]
        if more := sum(len(part) - len(part[:shown]) for part in parts):
            yield f"and {more} more tensors; --all shows them"
        yield from self.counters
        yield from self.recipe
        weights = sum(_is_weight(line) for line in self.tensors)
        yield (
            f"{self.equal} tensors are equal, {len(self.tensors)} differ in value, {weights} of "
            "them weights"
        )


class Compared(NamedTuple):
    """A checkpoint as `difference` compares it."""

    tensors: TensorSource
    counters: Mapping[str, Any]
    prefix: str = ""
    """Prefix of the names of the counters."""
    recipe: Mapping[str, Any] = MappingProxyType({})


def _opened(path: Path, is_mixed: bool) -> Compared:
    """`is_mixed`: under our names, and only what both formats have."""
    if saved_by_dcp(path):
        theirs = DcpCheckpoint(path)
        if not is_mixed:
            return Compared(theirs, {name: _plain(theirs.value(name)) for name in theirs.values()})
        found = {"step": theirs.number(STEP), "tokens": theirs.number(TOKENS)}
        counters = {key: value for key, value in found.items() if value is not None}
        return Compared(Renamed(theirs, translated(theirs)), counters)
    manifest = read_verified_manifest(path)
    state, saved = read_state(path, manifest), SavedTensors(path)
    if not is_mixed:
        return Compared(saved, state["train_state"], "train_state.", state["recipe"])
    common = [n for n in saved.shapes() if n.partition(".")[0] in ("model", "optimizer")]
    keys = () if manifest.model_only else ("step", "tokens")
    counters = {key: state["train_state"][key] for key in keys}
    return Compared(Renamed(saved, {name: name for name in common}), counters)


def _plain(value: Any) -> Any:
    """Convert a value to one that can be compared and shown in a line."""
    if isinstance(value, bytes):
        return f"{len(value):,} bytes, {xxhash.xxh3_64_hexdigest(value)}"
    parts = value if isinstance(value, tuple) else (value,)
    return value if all(isinstance(p, int | float | str | None) for p in parts) else repr(value)


def difference(first: Path, second: Path) -> Difference:
    """Compare two checkpoints of any layouts, one tensor at a time.

    Raises:
        Damaged: where one of them is not what was saved.
    """
    is_mixed = saved_by_dcp(first) != saved_by_dcp(second)
    a, b = (_opened(path, is_mixed) for path in (first, second))
    one, other = a.tensors, b.tensors
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
        recipe=tuple(_changes(a.recipe, b.recipe, "")),
        counters=tuple(_changes(a.counters, b.counters, a.prefix)),
        names=tuple(names),
        tensors=tuple(
            f"{line} ({relative:.1e} of the largest)"
            for relative, line in sorted(
                tensors, key=lambda found: (not _is_weight(found[1]), -found[0])
            )
        ),
        equal=equal,
    )


def _is_weight(name: str) -> bool:
    return name.partition(".")[0] not in OTHERS


def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key in sorted(before.keys() | after.keys()):
        if isinstance(before.get(key), dict):
            continue  # the history of losses, which differs from step to step
        if before.get(key) != after.get(key):
            yield f"{prefix}{key}: {before.get(key)!r} -> {after.get(key)!r}"
