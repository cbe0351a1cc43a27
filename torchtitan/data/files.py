"""Which files a path stands for, and what kind they are."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from torchtitan.config import ConfigError

Kind = Literal["text", "jsonl", "parquet", "compressed"]
SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}


def find_files(path: Path, kind: Kind | None) -> tuple[list[Path], Kind]:
    """The data files at `path`, sorted by name, and what they are (told by suffix if not given)."""
    if path.is_file():
        compressed = kind == "jsonl" and _kind_of(path) == "compressed"
        return [path], _kind_of(path) if compressed or kind is None else kind
    files = sorted(
        (file for file in path.rglob("*") if file.is_file() and not _hidden(file, path)),
        key=lambda file: file.relative_to(path).as_posix(),
    )
    if kind is None:
        kinds = {_kind_of(file) for file in files} - {"text"}
        if len(kinds) > 1:
            raise ConfigError(
                f"{path} holds {' and '.join(sorted(kinds))} files: choose one kind by "
                'data.dataset = "jsonl" or "parquet", with this folder as data.dataset_path'
            )
        kind = kinds.pop() if kinds else "text"
    if kind == "jsonl" and all(_kind_of(file) != "jsonl" for file in files):
        kind = "compressed"
    if kind != "text":
        files = [file for file in files if _kind_of(file) == kind]
    if not files:
        raise ConfigError(f"{path} holds no {kind} files")
    return files, kind


def _kind_of(file: Path) -> Kind:
    if file.suffix in (".gz", ".zst"):
        return "compressed" if SUFFIXES.get(Path(file.stem).suffix) == "jsonl" else "text"
    return SUFFIXES.get(file.suffix, "text")


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def fingerprint_files(files: Sequence[Path], root: Path) -> str:
    """Digest of the names and sizes of `files`; the names are relative, so that data may move."""
    listing = [(path.relative_to(root).as_posix(), path.stat().st_size) for path in files]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16]
