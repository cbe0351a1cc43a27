"""torchao, without its noise."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Import torchao within; it warns of CUDA kernels that it can do without, and of its own ways.

    The noise comes from two loggers: its own, and that of torch's pytree.
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
