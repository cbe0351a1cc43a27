"""Files that a launcher reads for all ranks of its machine: recipes and tokenizers.

Each rank needs all of them at the start. The launcher has read them before, to check the recipe,
and keeps them in memory, where a rank reads them from the launcher's open files.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

VARIABLE = "TORCHTITAN_NODE_FILES"
"""Environment variable with the launcher's file for each path that it has read."""

POINTER = b"version https://git-lfs.github.com/spec/"
"""Start of the small file that Git LFS leaves in place of a large one (its specification)."""
ONLY_POINTER = (
    "it is only the pointer of a file that Git LFS stores; run `git lfs pull` in its repository, "
    "or download the file itself"
)

KEPT = ContextVar[ExitStack | None]("KEPT", default=None)
"""Files of this process, if it is a launcher."""


@contextmanager
def kept_for_ranks() -> Iterator[None]:
    """Keep what `read_for_node` reads inside for the ranks that this process starts (on Linux)."""
    before = os.environ.pop(VARIABLE, None)
    with ExitStack() as files:
        token = KEPT.set(files if hasattr(os, "memfd_create") else None)
        try:
            yield
        finally:
            KEPT.reset(token)
            os.environ.pop(VARIABLE, None)
            if before is not None:
                os.environ[VARIABLE] = before


def read_for_node(path: Path) -> bytes:
    """Return the content of a file, or of the launcher's copy of it."""
    copies: dict[str, str] = json.loads(os.environ.get(VARIABLE, "{}"))
    if copy := copies.get(os.path.abspath(path)):
        with suppress(OSError):  # the launcher is gone, or hides its files
            return Path(copy).read_bytes()
    content = path.read_bytes()
    if files := KEPT.get():
        file = os.memfd_create(path.name[:200])
        files.callback(os.close, file)
        os.write(file, content)
        copies[os.path.abspath(path)] = f"/proc/{os.getpid()}/fd/{file}"
        os.environ[VARIABLE] = json.dumps(copies)
    return content
