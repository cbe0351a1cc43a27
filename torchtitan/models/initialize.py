"""Initial weights that do not depend on how they are sharded.

Every weight is a function of (seed, parameter name, position in the whole parameter) alone: a
parameter is divided into blocks of rows, and each block has its own generator, whose state is a
hash. A rank draws only the blocks it owns a part of, so any layout starts bit-identical to one
rank, with no seed checkpoint, and initializing a large model costs a rank about its share. Weights
are drawn in fp32 on the CPU, so the device and dtype of a parameter affect only the final rounding.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from torchtitan.models.spec import InitialWeight
from torchtitan.torch_private.dtensor import is_dtensor, local_extent
from torchtitan.torch_private.runtime import generator_of

BLOCK = 2**20
"""Approximate elements per block. Changing it changes the weights of every seed.

Small blocks waste little where a rank owns part of one; large ones need few generators.
"""


@torch.no_grad()
def initialize(
    parameters: Iterable[tuple[str, Tensor]], rule: Callable[[str], InitialWeight], seed: int
) -> None:
    """Overwrite `parameters` (name, plain tensor or `DTensor`) in place.

    Names must be those of the plain model, without wrappers; `rule` returns how each one starts.
    """
    for name, parameter in parameters:
        initial = rule(name)
        if is_dtensor(parameter):
            local, (_, offset) = parameter.to_local(), local_extent(parameter)
        else:
            local, offset = parameter, (0,) * parameter.ndim
        if isinstance(initial, str):
            local.fill_({"ones": 1.0, "zeros": 0.0}[initial])
        else:
            fill_normal(local, offset, parameter.shape, initial, f"{seed}/{name}")


def fill_normal(
    local: Tensor, offset: tuple[int, ...], shape: torch.Size, std: float, stream: str
) -> None:
    """Fill `local`, the part at `offset` of a parameter of `shape`, from the named stream."""
    rows, *rest = shape
    block_rows = max(1, BLOCK // torch.Size(rest).numel())
    first, last = offset[0], offset[0] + local.shape[0]
    columns = [slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:], strict=True)]
    for start in range(first - first % block_rows, last, block_rows):
        stop = min(start + block_rows, rows)
        generator = generator_of(f"{stream}/{start // block_rows}")
        block = torch.empty(stop - start, *rest, device="cpu", dtype=torch.float32)
        block.normal_(0.0, std, generator=generator)
        begin, end = max(first, start), min(last, stop)
        mine = block[begin - start : end - start][:, *columns]
        local[begin - first : end - first].copy_(mine)
