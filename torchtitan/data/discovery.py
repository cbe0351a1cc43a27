"""Discovery of data files at a path, and of their kind."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from torchtitan.config import ConfigError

SUFFIXES: dict[str, str] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
"""Kinds of files, keys of `torchtitan.data.documents.FORMATS`; other suffixes are text."""
COMPRESSED = (".gz", ".zst")
PACKED = (*COMPRESSED, ".bz2", ".xz", ".lzma", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".rar")
"""Suffixes of binary files whose bytes could pass for text, such as a tar archive's."""
ABOUT = {".md", ".rst", ".yaml", ".yml", ".toml", ".py", ".sh", ".sha256", ".md5", ".cff", ".png"}
ABOUT |= {"README", "LICENSE", "LICENCE", "COPYING", "NOTICE", "CITATION", "CHANGELOG", "MANIFEST"}
"""Suffixes and names of files that accompany data; they do not make a folder one of mixed kinds."""


def find_files(path: Path, kind: str | None) -> tuple[list[Path], str]:
    """Find the data files at `path`, sorted by name, and their kind (by suffix if not given)."""
    if path.is_file():
        compressed = kind == "jsonl" and _kind_of(path) == "compressed"
        return _unpacked([path], _kind_of(path) if compressed or kind is None else kind)
    files = sorted(
        (file for file in path.rglob("*") if file.is_file() and not _hidden(file, path)),
        key=lambda file: file.relative_to(path).as_posix(),
    )
    if kind is None:
        by_kind = {_kind_of(file): file for file in reversed(files) if not _is_about(file)}
        if len(by_kind) > 1:
            found = " and ".join(f"{what} ({by_kind[what].name})" for what in sorted(by_kind))
            raise ConfigError(
                f"{path} holds files of several kinds: {found}; choose one by data.dataset = "
                '"text", "jsonl" or "parquet", with this folder as data.dataset_path'
            )
        kind = next(iter(by_kind), "text")
    if kind == "jsonl" and all(_kind_of(file) != "jsonl" for file in files):
        kind = "compressed"
    if kind == "jsonl" and (packed := [f for f in files if _kind_of(f) == "compressed"]):
        raise ConfigError(
            f"{path} holds JSON Lines both plain and compressed ({packed[0].name}), which are read "
            "in different orders; put them into two folders, or compress all"
        )
    if kind != "text":
        files = [file for file in files if _kind_of(file) == kind]
    if not files:
        raise ConfigError(f"{path} holds no {kind} files")
    return _unpacked(files, kind)


def _unpacked(files: list[Path], kind: str) -> tuple[list[Path], str]:
    """Return the same files, after checking that none of the text files is compressed."""
    if kind == "text" and (packed := [file for file in files if file.suffix.lower() in PACKED]):
        raise ConfigError(
            f"{packed[0]}: compressed text is not supported, only JSON Lines compressed as "
            f"{' or '.join(COMPRESSED)}; decompress it first"
        )
    return files, kind


def _kind_of(file: Path) -> str:
    if file.suffix in COMPRESSED:
        return "compressed" if SUFFIXES.get(Path(file.stem).suffix) == "jsonl" else "text"
    return SUFFIXES.get(file.suffix, "text")


def _is_about(file: Path) -> bool:
    """Whether a file documents the data next to it, or is empty."""
    if _kind_of(file) == "text" and not file.stat().st_size:
        return True
    return file.suffix.lower() in ABOUT or file.stem.upper() in ABOUT


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def fingerprint_files(files: Sequence[Path], root: Path) -> str:
    """Digest the names and sizes of `files`; the names are relative, so that data may move."""
    listing = [(path.relative_to(root).as_posix(), path.stat().st_size) for path in files]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16]
