"""torchao, without its warnings."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Suppress torchao's warnings of missing optional CUDA kernels, and others, on import.

    They come from two loggers: its own, and that of torch's pytree.
    """
    noisy = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [each.level for each in noisy]
    for each in noisy:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(noisy, levels, strict=True):
            each.setLevel(level)
