"""Repositories of the Hugging Face hub, `hf://org/name[@revision]`, as folders of its cache.

huggingface_hub, with its cache, token and offline switch, is imported where one is used. Ranks read
what their launcher has downloaded without asking the hub. Without a launcher of ours each rank
asks, and huggingface_hub locks what it downloads, so that a node fetches each file once.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import tomli

from torchtitan.config.settings import ConfigError
from torchtitan.config.words import HUB_ID

VARIABLE = "TORCHTITAN_HUB"
"""Environment variable with the ids that a launcher has read and their commits, and with the files
of these commits that are in the cache."""


class RepositoryFiles(NamedTuple):
    """Files of a repository."""

    name: str
    """Contents of the files: tokenizer, weights or data."""
    kind: str
    """Type of the repository."""
    patterns: tuple[str, ...] | None = None
    """Names; None: all."""


OF_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "*.jinja")
TOKENIZER = RepositoryFiles("tokenizer", "model", OF_TOKENIZER)
WEIGHTS = RepositoryFiles("weights", "model", (*OF_TOKENIZER, "*.json", "*.safetensors"))
DATA = RepositoryFiles("data", "dataset")


@cache
def folder(text: str, files: RepositoryFiles) -> Path:
    """Return the folder in the cache with the files of a repository, downloaded if need be.

    A revision is one commit for this process and the ranks that it starts.

    Raises:
        ConfigError: if they are neither on the hub nor in the cache.
    """
    known = dict(each.split("=") for each in os.environ.get(VARIABLE, "").split())
    name, revision = _parts(text)
    key = f"{files.kind}:{text}"
    commit = known.get(key, revision)
    is_cached = f"{files.name}:{name}@{commit}" in known

    def download(hub: Any) -> str:
        what = {"repo_type": files.kind, "revision": commit, "allow_patterns": files.patterns}
        found: str = hub.snapshot_download(name, **what, local_files_only=is_cached)
        return found

    path = Path(_call(text, f"the files of the {files.kind} {name}, {commit or 'main'}", download))
    known |= {key: path.name, f"{files.name}:{name}@{path.name}": path.name}
    os.environ[VARIABLE] = " ".join(map("=".join, known.items()))
    return path


def pinned(text: str, files: RepositoryFiles) -> str:
    """Return the id of a repository with the commit that is read, which is downloaded.

    Raises:
        ConfigError: as of `folder`.
    """
    return f"hf://{_parts(text)[0]}@{folder(text, files).name}"


def recorded(text: str, key: Sequence[str], recipe: Path) -> str:
    """Return the id with the commit in the recipe of an earlier launch, if that has read it."""
    found: Any = {}
    with suppress(OSError, ValueError):
        found = tomli.loads(recipe.read_text(encoding="utf-8"))
    for name in key:
        found = found.get(name) if isinstance(found, Mapping) else _item(found, name)
    name, revision = _parts(text)
    is_same = isinstance(found, str) and found.partition("@")[0] == f"hf://{name}"
    return found if is_same and revision is None else text


def open_repository(text: str) -> None:
    """Create a private repository for weights, unless it is there.

    Raises:
        ConfigError: if it cannot be written to.
    """
    name, _ = _parts(text)
    _call(
        text,
        f"to create {name}",
        lambda hub: hub.HfApi().create_repo(name, private=True, exist_ok=True),
    )


def push(folder: Path, text: str) -> str:
    """Upload a folder as one commit of a repository; return the URL of the commit.

    Raises:
        ConfigError: if it is refused; the repository then has no part of it.
    """
    name, revision = _parts(text)

    def upload(hub: Any) -> str:
        commit = hub.HfApi().upload_folder(repo_id=name, folder_path=folder, revision=revision)
        return str(commit.commit_url)

    found: str = _call(text, f"an upload to {name}", upload)
    return found


def _item(found: Any, name: str) -> Any:
    is_item = isinstance(found, list) and name.isdecimal() and int(name) < len(found)
    return found[int(name)] if is_item else None


def _parts(text: str) -> tuple[str, str | None]:
    match = HUB_ID.fullmatch(text)
    assert match, text
    return match[1], match[2]


def _call(text: str, what: str, function: Callable[[Any], Any]) -> Any:
    """Call a function with the module huggingface_hub; its errors become those of the id."""
    try:
        hub, constants = map(import_module, ("huggingface_hub", "huggingface_hub.constants"))
    except ImportError:
        message = "it needs the package huggingface_hub: pip install huggingface_hub"
        raise ConfigError(f"{text}: {message}") from None
    offline = " (HF_HUB_OFFLINE is set)" * bool(constants.HF_HUB_OFFLINE)
    try:
        return function(hub)
    except Exception as error:  # of the hub, of a network, or of a disk
        lines = [line for line in str(error).splitlines() if line.strip()]
        why = " ".join(" ".join(lines[:2]).split()).rstrip(".") or type(error).__name__
        raise ConfigError(
            f"{text}: tried {what}, at {constants.ENDPOINT}{offline}: {why}; correct the id, or, "
            "if it is private or gated, log in: hf auth login"
        ) from error
