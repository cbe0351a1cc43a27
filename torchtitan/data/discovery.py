"""Discovery of data files at a path, and of their kind."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchtitan.config import ConfigError
from torchtitan.data.file_cache import reading
from torchtitan.remote import dangling, refuse_pointer

SUFFIXES: dict[str, str] = {
    ".jsonl": "jsonl",
    ".jsonlines": "jsonl",
    ".jl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
"""Kinds of files, keys of `torchtitan.data.documents.FORMATS`; other suffixes are text."""
COMPRESSED = (".gz", ".zst")
PACKED = {*COMPRESSED, ".gzip", ".zstd", ".bz2", ".xz", ".lzma", ".lz4", ".br", ".z"}
PACKED |= {".zip", ".tar", ".tgz", ".7z", ".rar"}
"""Suffixes of binary files whose bytes could pass for text, such as a tar archive's."""
TOKENS = {
    ".bin": (
        'of Megatron, name the .idx next to it; of nanoGPT or llm.c, set data.format.name = "raw", '
        'with suffix = ".bin", end and dtype'
    ),
    ".tokens": "their index.json is missing or damaged; restore it, or tokenize the text again",
    ".mds": "their index.json is missing or damaged; restore it",
}
"""Suffixes of tokens that no format has recognized, and how to read them."""
ABOUT = {".md", ".rst", ".yaml", ".yml", ".toml", ".py", ".sh", ".sha256", ".md5", ".cff", ".png"}
ABOUT |= {"README", "LICENSE", "LICENCE", "COPYING", "NOTICE", "CITATION", "CHANGELOG", "MANIFEST"}
"""Suffixes and names of files that accompany data; they do not make a folder one of mixed kinds."""
SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")
"""Files that `save_to_disk` of `datasets` writes next to the data."""
TABLES = {".csv": '"csv", ', ".tsv": '"csv", sep="\\t", ', ".arrow": '"arrow", '}
"""Suffixes of tables that are no text, unless `SUFFIXES` has them, and how `datasets` loads one."""


def walk(path: Path) -> Iterator[Path]:
    """Yield the file at `path`, or every file below that folder, without hidden ones.

    Links are followed. A folder that is inside of itself, by a link, is not entered again.

    Raises:
        ConfigError: if a link leads nowhere, something is no file, or a folder cannot be read.
    """
    with reading(path):
        if path.is_file():
            yield path
        elif path.is_dir():
            yield from _below(str(path), ())
        elif path.is_symlink() or path.exists():
            raise _unusable(str(path))


def _below(folder: str, above: tuple[os.stat_result, ...]) -> Iterator[Path]:
    """Yield the files below a folder, which the folders `above` lead to."""
    status = os.stat(folder)
    if any(os.path.samestat(status, each) for each in above):
        return
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_file():
            yield Path(entry.path)
        elif entry.is_dir():
            yield from _below(entry.path, (*above, status))
        else:
            raise _unusable(entry.path)


def _unusable(path: str) -> ConfigError:
    """Return an error about a link that leads nowhere, or a pipe, a socket or a device."""
    odd = f"{path}: it is neither a file nor a folder; move it out of the data"
    return ConfigError(dangling(path) or odd)


@reading()
def find_files(path: Path, kind: str | None) -> tuple[list[Path], str]:
    """Find the data files at `path`, sorted by name, and their kind (by suffix if not given).

    Raises:
        ConfigError: if there are none, one cannot be read, or their format cannot be.
    """
    if path.is_file():
        if kind is None:
            _refuse_tokens([path])
        compressed = kind == "jsonl" and _kind_of(path) == "compressed"
        return _readable([path], _kind_of(path) if compressed or kind is None else kind)
    files = sorted(walk(path), key=lambda file: file.relative_to(path).as_posix())
    if any(file.suffix.lower() == ".arrow" for file in files):
        files = [file for file in files if file.name not in SAVED]
    if kind is None:
        _refuse_tokens(files)
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
    chosen = [file for file in files if kind == "text" or _kind_of(file) == kind]
    if not chosen:
        _readable([file for file in files if _kind_of(file) in TABLES], "")
        raise ConfigError(f"{path} holds no {kind} files")
    return _readable(chosen, kind)


def _readable(files: list[Path], kind: str) -> tuple[list[Path], str]:
    """Return the same files, after checking that they are what their kind says.

    Raises:
        ConfigError: if one is a table, a pointer of Git LFS, or compressed text.
    """
    for file in files:
        refuse_pointer(file)
        suffix = _kind_of(file)
        if suffix in TABLES and kind in (suffix, "text", ""):
            # A folder of `save_to_disk` is a table in several files.
            table = file.parent / f"*{file.suffix}" if suffix == ".arrow" else file
            name = (table.parent if suffix == ".arrow" else file).stem
            raise ConfigError(
                f"{file}: {suffix} files are not read; write the data as Parquet: python -c '"
                f'__import__("datasets").load_dataset({TABLES[suffix]}data_files="{table}", '
                f'split="train").to_parquet("{name}.parquet")\''
            )
        if kind in ("text", "jsonl", "parquet") and file.suffix.lower() in PACKED:
            raise ConfigError(
                f"{file}: compressed text is not supported, only JSON Lines compressed as "
                f"{' or '.join(COMPRESSED)}; decompress it first"
            )
    return files, kind


def _refuse_tokens(files: Sequence[Path]) -> None:
    """Refuse tokens among the files of text."""
    for file in files:
        if (suffix := file.suffix.lower()) in TOKENS and suffix not in SUFFIXES:
            refuse_pointer(file)
            raise ConfigError(f"{file}: {suffix} files are tokens; {TOKENS[suffix]}")


def _kind_of(file: Path) -> str:
    """Return the kind of a file by its suffix, which is itself the kind of a table."""
    suffix = file.suffix.lower()
    if suffix in COMPRESSED:
        return "compressed" if SUFFIXES.get(Path(file.stem).suffix.lower()) == "jsonl" else "text"
    return SUFFIXES.get(suffix, suffix if suffix in TABLES else "text")


def _is_about(file: Path) -> bool:
    """Whether a file documents the data next to it, or is empty."""
    if _kind_of(file) == "text" and not file.stat().st_size:
        return True
    return file.suffix.lower() in ABOUT or file.stem.upper() in ABOUT


def fingerprint_files(files: Sequence[Path], root: Path) -> str:
    """Digest the names and sizes of `files`; the names are relative, so that data may move."""
    listing = [(path.relative_to(root).as_posix(), path.stat().st_size) for path in files]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16]
