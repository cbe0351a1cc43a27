"""A digest that no sharding changes, and any exchange of elements does."""

import numpy as np
import pytest
import torch

from torchtitan import digest as module
from torchtitan.digest import digest, unsigned

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float64, torch.int64),
    *(torch.uint8, torch.bool, torch.float8_e4m3fn),
]


def value(tensor, offsets=None):
    return unsigned(int(digest(tensor, offsets).item()))


def drawn(shape, dtype=torch.float32):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50
    return numbers.to(dtype)


def weight(dim, index):
    """SplitMix64, in Python's integers."""
    mask = 2**64 - 1
    state = (index * 0x9E3779B97F4A7C15 + (dim + 1) * 0xD1B54A32D192ED03) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def test_the_formula():
    tensor = drawn((3, 2, 5))
    words = tensor.numpy().view(np.int32)
    expected = sum(
        int(word) * weight(0, at[0]) * weight(1, at[1]) * weight(2, at[2])
        for at, word in np.ndenumerate(words)
    )
    assert value(tensor) == expected % 2**64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7,), (6, 5), (4, 3, 6), (1, 9)])
def test_no_sharding_changes_it(shape, dtype):
    tensor = drawn(shape, dtype)
    for dim in range(len(shape)):
        for parts in (2, 3):
            total, at = 0, [0] * len(shape)
            for part in tensor.chunk(parts, dim):
                total += value(part, tuple(at))
                at[dim] += part.shape[dim]
            assert total % 2**64 == value(tensor)


@pytest.mark.parametrize("dtype", [*DTYPES[:4], torch.uint8], ids=str)
def test_an_exchange_changes_it(dtype):
    tensor = drawn((8, 6), dtype)
    others = {
        "two rows": tensor[[1, 0, *range(2, 8)]],
        "halves of the rows": tensor.roll(4, 0),
        "two columns": tensor[:, [0, 2, 1, 3, 4, 5]],
        "another shape": tensor.reshape(6, 8),
        "transposed": tensor.T,
        "a repeated row": tensor[[0, 0, *range(2, 8)]],
    }
    found = {name: value(other) for name, other in others.items()} | {"itself": value(tensor)}
    assert len(set(found.values())) == len(found), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_equal_changes_do_not_cancel(dtype):
    """The sign is the highest bit of a word."""
    tensor = drawn((4, 4), dtype)
    for places in ([(0, 0), (1, 1)], [(0, 0), (0, 1)], [(0, 0), (0, 1), (1, 0), (1, 1)]):
        other = tensor.clone()
        for place in places:
            other[place] *= -1
        assert value(other) != value(tensor), places


@pytest.mark.parametrize("chunk", [1, 3, 8, 1000])
def test_what_is_multiplied_at_once_does_not_matter(chunk, monkeypatch):
    tensor = drawn((5, 7))
    expected = value(tensor)
    monkeypatch.setitem(module.CHUNKS, "cpu", chunk)
    assert value(tensor) == expected


def test_scalars_and_tensors_without_elements():
    assert value(torch.tensor(3)) != value(torch.tensor(5))
    assert value(torch.zeros(0, 4)) == 0
    assert value(drawn((3, 4)).T) == value(drawn((3, 4)).T.contiguous())
