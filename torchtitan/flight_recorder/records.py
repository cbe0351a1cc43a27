"""The collectives that torch's Flight Recorder recorded, as Python objects.

Torch keeps the last collectives of a process in a ring buffer and writes them as a pickle. A trace
comes from a process that failed, perhaps on another machine, so it is read as data: only
containers, strings and numbers are made of it, and nothing in it is executed.

Gloo records less than NCCL: no send and no receive, no times of start and end, and a collective
that failed is marked like one that succeeded. A reduce-scatter is carried out as an all-reduce, and
is recorded so; what was called is read from the stack.
"""

import io
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import torchtitan
from torchtitan.comm import sent_bytes
from torchtitan.config import ConfigError
from torchtitan.torch_private.distributed import flight_records, group_members

# Dtypes that Python calls by another name than C++; torch has `half`, `long` and so on too.
DTYPES = {"Byte": "uint8", "Char": "int8"}
OPERATIONS = (
    *("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "barrier", "broadcast"),
    *("reduce", "gather", "scatter", "send", "recv"),
)
PACKAGE = Path(torchtitan.__file__).parent
CALLS = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")


class Shape(NamedTuple):
    """Sizes and dtype of a tensor."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size of its elements."""
        return math.prod(self.sizes) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.sizes)}"


class Group(NamedTuple):
    """A process group: its name is the same on all its ranks."""

    name: str
    purpose: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        known = f" ({name_ranks(self.ranks)})" if self.ranks else ""
        return f"{self.purpose}{known}"


@dataclass(frozen=True)
class Collective:
    """A collective, or a send or receive, as one rank recorded it."""

    number: int
    """Index among all records of the process."""
    operation: str
    """Function that the program called."""
    carried_out: str
    """Operation with which the backend implemented it."""
    group: Group
    sequence: int
    """Index among the collectives, or the sends and receives, of the group on all its ranks."""
    is_p2p: bool
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    finished: bool
    created: float
    """Unix seconds."""
    caller: str
    """Innermost caller outside torch, as `file:line (function)`; empty if unknown."""

    @property
    def bytes_in(self) -> int:
        """Bytes that this rank supplied."""
        return sum(shape.bytes for shape in self.inputs)

    def __str__(self) -> str:
        return f"{self.operation} #{self.sequence} on {self.group}"

    @property
    def tensors(self) -> str:
        """The tensors as text; empty for a barrier."""
        given, taken = (_several(shapes) for shapes in (self.inputs, self.outputs))
        return given if given == taken or not taken else f"{given} to {taken}"


def recorded(device_type: str = "cpu") -> list[Collective]:
    """The last collectives of this process, at most comm.trace_buf_size, oldest first."""
    dumps = [load(dump, "this process") for dump in flight_records(device_type)]
    members = group_members()
    return [collective for dump in dumps for collective in collectives(dump, members)]


def sent_by_kind(collectives: Sequence[Collective]) -> dict[tuple[str, str], tuple[int, float]]:
    """Count collectives, and the bytes that this rank sends in them, by purpose and operation."""
    sent: dict[tuple[str, str], tuple[int, float]] = {}
    for one in collectives:
        ranks = len(one.group.ranks)
        if one.is_p2p:
            size = float(one.bytes_in) if one.operation == "send" else 0.0
        elif ranks:
            # Gloo does not always record the whole of an all-gather, but each rank gives a part.
            whole = one.bytes_in * (ranks if one.operation == "all_gather" else 1)
            size = sent_bytes(one.operation, whole, ranks)
        else:
            continue
        if size:
            kind = one.group.purpose, one.operation
            count, before = sent.get(kind, (0, 0.0))
            sent[kind] = count + 1, before + size
    return sent


def load(dump: bytes, name: str) -> dict[str, Any]:
    """The plain values of a trace.

    Raises:
        EOFError, pickle.UnpicklingError: if the trace is truncated.
        ConfigError: if it is not a trace, or would make or call anything that is not plain.
    """
    values = _PlainUnpickler(dump, name).load()
    if not isinstance(values, dict) or not {"entries", "version"} <= values.keys():
        raise ConfigError(f"{name}: not a trace of torch's Flight Recorder")
    return values


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler of containers, strings and numbers, for which a pickle names no class."""

    def __init__(self, dump: bytes, name: str) -> None:
        super().__init__(io.BytesIO(dump))
        self.name = name

    def find_class(self, module: str, name: str) -> Any:
        raise ConfigError(
            f"{self.name}: refused: it refers to {module}.{name}, which no trace of torch's "
            "Flight Recorder does"
        )


def collectives(
    dump: Mapping[str, Any], members: Mapping[str, tuple[str, Sequence[int]]]
) -> list[Collective]:
    """The records of a trace, oldest first.

    Args:
        members: of each group its purpose and ranks, where the trace does not contain them.
    """
    listed = {
        name: (group["desc"], json.loads(group["ranks"] or "[]"))
        for name, group in dump.get("pg_config", {}).items()
    }
    # Gloo's trace has one group, without a name and without ranks.
    known = {**{name: group for name, group in listed.items() if group[1]}, **members}
    return [_collective(entry, known) for entry in dump["entries"]]


def _collective(
    entry: Mapping[str, Any], members: Mapping[str, tuple[str, Sequence[int]]]
) -> Collective:
    name, purpose = entry["process_group"]
    frames = entry.get("frames") or []
    carried_out = entry["profiling_name"].partition(":")[2]
    is_gloo = entry["profiling_name"].startswith("gloo:")
    is_p2p = entry["is_p2p"]
    return Collective(
        number=entry["record_id"],
        operation=carried_out if is_p2p else _operation(_called(frames) or carried_out),
        carried_out=carried_out,
        group=Group(name, _purpose(purpose), tuple(members.get(name, ("", ()))[1])),
        sequence=entry["p2p_seq_id" if is_p2p else "collective_seq_id"],
        is_p2p=is_p2p,
        inputs=_shapes(entry["input_sizes"], entry["input_dtypes"]),
        outputs=_shapes(entry["output_sizes"], entry["output_dtypes"]),
        finished=entry["state"] == "completed" or (is_gloo and entry["retired"]),
        created=entry["time_created_ns"] / 1e9,
        caller=place([(f["filename"], f["line"], f["name"]) for f in frames]),
    )


def _purpose(description: str) -> str:
    axis = description.removeprefix("mesh_")
    return {"default_pg": "all", "undefined": "a group without a name"}.get(axis, axis)


def _called(frames: Sequence[Mapping[str, Any]]) -> str:
    """The function of torch.distributed that was called."""
    found = (f["name"] for f in frames if f["filename"].endswith(CALLS))
    return next((name for name in found if name.startswith(OPERATIONS)), "")


def _operation(name: str) -> str:
    """Strip the suffix of a variant: reduce_scatter_tensor becomes reduce_scatter."""
    found = [known for known in OPERATIONS if name.lstrip("_").startswith(known)]
    return max(found, key=len, default=name)


def _shapes(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> tuple[Shape, ...]:
    # The dtype may be listed once for several tensors.
    dtypes = [*dtypes, *([dtypes[-1]] * (len(sizes) - len(dtypes)) if dtypes else [])]
    return tuple(
        Shape(tuple(size), getattr(torch, DTYPES.get(dtype, dtype.lower())))
        for size, dtype in zip(sizes, dtypes, strict=True)
    )


def _several(shapes: Sequence[Shape]) -> str:
    more = f" and {len(shapes) - 2} more" if len(shapes) > 2 else ""
    return " + ".join(map(str, shapes[:2])) + more


def place(frames: Sequence[tuple[str, int, str]]) -> str:
    """Find the innermost frame outside torch in frames given innermost first."""
    for file, line, function in frames:
        if not file.startswith("<") and (name := _outside_torch(file)):
            return f"{name}:{line} ({function})"
    return ""


@cache
def _outside_torch(file: str) -> str:
    """The name of a file from this package on, or else with its folder; empty for one of torch.

    Any folder above may be called `torch` or `torchtitan`. A trace may come from another machine,
    where only the path tells.
    """
    path, folder = Path(file), "/".join(file.split("/")[-2:])
    if path.is_file():
        packages = (above for above in path.parents if (above / "__init__.py").is_file())
        package = next((above for above in packages if above.name in ("torch", PACKAGE.name)), None)
        if package is None:
            return folder
        return "" if package.name == "torch" else path.relative_to(package.parent).as_posix()
    tails = (Path(*path.parts[at:]) for at, part in enumerate(path.parts) if part == PACKAGE.name)
    if inside := next((tail for tail in tails if (PACKAGE.parent / tail).is_file()), None):
        return inside.as_posix()
    return "" if "/torch/" in file else folder


def name_ranks(ranks: Sequence[int]) -> str:
    """Write ranks as text: `rank 3`, `ranks 0, 1 and 5-7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [
        word
        for run in runs
        for word in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run])
    ]
    listed = " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    return f"rank{'s' * (len(ranks) > 1)} {listed}"
