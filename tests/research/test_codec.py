"""Numbers in a few bits, and units of which a part is sent in them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.comm import Unit
from torchtitan.logging import logger
from torchtitan.research.common import codec as codecs
from torchtitan.research.common.codec import Codec, WireFormat

FORMS = ["symmetric", "minmax"]
SCALES = [torch.float32, torch.bfloat16]
FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


def unit_of(codec, rows):
    """What two codes of each number are apart (R, n)."""
    slices = [codec.buckets(rows[:, where]) for where in codec.slices(*rows.shape)]
    return torch.cat([codec._ranges(b)[1].expand_as(b).flatten(1) for b in slices], 1)


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@given(bits=st.integers(2, 8), values=st.lists(FINITE, min_size=1, max_size=40))
def test_a_number_is_off_by_half_a_unit_at_most(form, scales, bits, values):
    codec, rows = Codec(bits, 16, form, scales), torch.tensor([values, values[::-1]])
    message = codec.encode(rows)
    assert message.dtype == torch.uint8
    assert message.shape == (2, codec.bytes_of(len(values)))
    off = (codec.decode(message, len(values)) - rows).abs()
    # Float32 itself rounds, where a bucket begins far from zero.
    rounding = rows.abs().amax(1, keepdim=True) * 2 * torch.finfo(torch.float32).eps
    assert bool((off <= 0.5001 * unit_of(codec, rows) + rounding).all())


@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_are_packed_without_gaps(bits):
    codec = Codec(bits, 64)
    assert codec.bytes_of(64 * 10) == 64 * 10 * bits // 8 + 10 * 4
    assert Codec(bits, 64, "minmax", torch.bfloat16).bytes_of(65) == 9 * bits + 2 * 2 * 2


@pytest.mark.parametrize("bits", range(2, 9))
def test_whole_codes_come_back_exactly(bits):
    last = 2 ** (bits - 1) - 1
    rows = torch.arange(-last, last + 1).float()[None]
    codec = Codec(bits, 256)
    assert torch.equal(codec.decode(codec.encode(rows), rows.shape[1]), rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [0.0, 3.3, -1e-42, 1e30])
def test_a_bucket_of_one_value_is_exact(form, value):
    rows, codec = torch.full((1, 64), value), Codec(8, 64, form)
    assert codec.decode(codec.encode(rows), 64) == pytest.approx(rows, rel=1e-6, abs=0)


LEVELS = torch.tensor([[0.0, 0.2, 0.3, 0.45, 0.55, 0.7, 0.8, 1.0]])


@pytest.mark.parametrize("form", [*FORMS, "levels"])
@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden(form, scales, bad):
    codec = Codec(3, 32, "minmax" if form == "levels" else form, scales)
    levels = LEVELS.expand(3, -1) if form == "levels" else None
    rows = torch.ones(1, 96)
    rows[0, 40] = bad
    finite = codec.decode(codec.encode(rows, levels=levels), 96, levels=levels).isfinite()
    finite = finite.view(3, 32)
    assert finite[[0, 2]].all()
    assert not finite[1].any()


def test_zeros_are_read_as_zeros():
    """What is kept in few bits begins so."""
    codec = Codec(8, 64)
    nothing = torch.zeros(2, codec.bytes_of(100), dtype=torch.uint8)
    assert not codec.decode(nothing, 100).any()


def mean_error(codec, rows, is_shifted, levels=None):
    """The mean of what rounding adds, over 2,000 draws."""
    noise = torch.Generator().manual_seed(0)
    total = torch.zeros_like(rows)
    for _ in range(2000):
        shift = float(torch.rand((), generator=noise)) - 0.5 if is_shifted else 0.0
        message = codec.encode(rows, shift, None if is_shifted else noise, levels)
        assert message.shape == (1, codec.bytes_of(rows.shape[1]))
        total += codec.decode(message, rows.shape[1], shift, levels) - rows
    return total / 2000


@pytest.mark.parametrize("shift", [True, False], ids=["shifted", "random"])
def test_rounding_is_right_in_the_mean(shift):
    rows, codec = torch.linspace(-1, 1, 64)[None] ** 3, Codec(3, 64, "minmax")
    # The error of one draw is at most half a unit (shifted), or one (random): by the central limit
    # theorem the mean of 2,000 is within five of these for each of 64 numbers.
    deviation = (1 / math.sqrt(12) if shift else 0.5) / math.sqrt(2000)
    error = mean_error(codec, rows, shift) / unit_of(codec, rows)
    assert error.abs().max() < 5 * deviation
    nearest = codec.decode(codec.encode(rows), 64) - rows
    assert (nearest / unit_of(codec, rows)).abs().max() > 0.3


def test_levels_at_unequal_distances_are_right_in_the_mean():
    rows, codec = torch.linspace(-1, 1, 64)[None] ** 3, Codec(3, 64, "minmax")
    # Off by two neighbours' distance at most: 0.2 of the range, which is 2.
    error = mean_error(codec, rows, is_shifted=False, levels=LEVELS)
    assert error.abs().max() < 5 * 0.5 * 0.4 / math.sqrt(2000)
    nearest = codec.decode(codec.encode(rows, levels=LEVELS), 64, levels=LEVELS)
    expected = (LEVELS[0] * 2 - 1)[(rows[0, :, None] - (LEVELS * 2 - 1)).abs().argmin(1)]
    assert torch.allclose(nearest[0], expected, atol=1e-6)


class Largest(TorchDispatchMode):
    """The largest tensor of numbers, not of bytes, that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if torch.is_tensor(out) and out.is_floating_point():
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("form", [*FORMS, "levels"])
def test_slices_are_the_bytes_of_the_whole_in_less_memory(form, scales, monkeypatch):
    codec = Codec(3, 32, "minmax" if form == "levels" else form, scales)
    rows = torch.randn(4, 1001, generator=torch.Generator().manual_seed(0))
    levels = LEVELS.expand(32, -1) if form == "levels" else None
    whole = codec.encode(rows, levels=levels)
    decoded = codec.decode(whole, 1001, levels=levels)
    monkeypatch.setattr(codecs, "SLICE", 700)
    assert [each.stop for each in codec.slices(4, 1001)] == [*range(128, 992, 128), 992, 1001]
    with Largest() as seen:
        assert torch.equal(codec.encode(rows, levels=levels), whole)
        total = codec.decode(whole, 1001, levels=levels, is_sum=True)
    assert 1001 <= seen.elements < 700 * (8 if form == "levels" else 1) + 1001
    torch.testing.assert_close(total, decoded.sum(0, keepdim=True), rtol=0, atol=0)
    assert torch.equal(codec.decode(whole, 1001, levels=levels), decoded)
    assert codec.decode(whole, 1001, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_code_that_cannot_be_compiled_is_eager_and_says_so(monkeypatch, caplog):
    def fail(*_, **__):
        raise ValueError("no compiler here")

    monkeypatch.setitem(codecs.BACKENDS, "cpu", fail)
    codec, rows = Codec(4, 32), torch.randn(2, 96)
    expected = codec.decode(codec.encode(rows), 96)
    assert float((expected - rows).abs().max()) < 0.3
    [line] = [record.message for record in caplog.records if record.name == logger.name]
    assert "without compilation" in line
    assert "no compiler here" in line


def test_matrices_are_sent_in_few_bits_and_the_rest_as_it_is():
    shapes = {"norm": (24,), "w": (4, 16), "tiny": (2, 3), "w2": (80, 2)}
    unit = Unit("", {n: torch.Size(s) for n, s in shapes.items()}, torch.device("cpu"))
    wire_format = WireFormat(unit, Codec(4, 32))
    rows = torch.randn(3, unit.elements, generator=torch.Generator().manual_seed(0)).bfloat16()
    coarse, exact = wire_format.split(rows)
    assert (coarse.shape, exact.shape) == ((3, 64 + 160), (3, 24 + 6))
    assert torch.equal(wire_format.join(coarse, exact), rows)
    packed = wire_format.pack(wire_format.codec.encode(coarse), exact)
    assert packed.shape == (3, wire_format.codec.bytes_of(64 + 160) + 2 * (24 + 6))
    codes, rest = wire_format.unpack(packed, torch.bfloat16)
    assert torch.equal(rest, exact)
    found = wire_format.codec.decode(codes, wire_format.coarse)
    assert float((found - coarse).abs().max()) < 0.3


def test_a_unit_of_one_matrix_is_not_copied():
    unit = Unit("", {"w": torch.Size([4, 16])}, torch.device("cpu"))
    wire_format, rows = WireFormat(unit, Codec(4, 32)), torch.randn(2, 64)
    coarse, exact = wire_format.split(rows)
    views = (coarse, wire_format.join(coarse, exact))
    assert {(v.shape, v.data_ptr()) for v in views} == {(rows.shape, rows.data_ptr())}


def test_a_unit_without_matrices_is_sent_as_it_is():
    unit = Unit("", {"norm": torch.Size([24])}, torch.device("cpu"))
    wire_format, rows = WireFormat(unit, Codec(4, 32)), torch.randn(2, 24)
    coarse, exact = wire_format.split(rows)
    packed = wire_format.pack(wire_format.codec.encode(coarse), exact)
    codes, rest = wire_format.unpack(packed, torch.float32)
    assert codes.numel() == 0
    assert torch.equal(wire_format.join(wire_format.codec.decode(codes, 0), rest), rows)
