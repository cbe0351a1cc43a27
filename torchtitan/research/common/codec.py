"""Encoding of numbers in low bits, and of a unit for sending.

A row of numbers is cut into buckets, and each number becomes a code of 2 to 8 bits:

    symmetric   code = round(x / s),         s = max |x| / (2^(bits-1) - 1)   of its bucket
    minmax      code = round((x - lo) / s),  s = (hi - lo) / (2^bits - 1)

Rounding to the nearest has an error of at most s / 2. Rounding after a shift that sender and
receiver share, `round(t + shift) - shift` with a uniform shift, is unbiased, and so is stochastic
rounding, `floor(t + u)`. Codes can also represent levels at unequal distances from lo to hi; then t
is the position between two adjacent levels, and stochastic rounding decides between them. A bucket
with a NaN or an infinity is decoded as numbers that are not finite: nothing is hidden.

Rows are encoded and decoded in slices of columns, so temporary memory does not grow with a unit.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor

from torchtitan.comm import Unit

Form = Literal["symmetric", "minmax"]
SLICE = 2**24
"""Maximum numbers of a slice: 64 MiB in float32."""
GROUP = 8
"""Number of codes that are packed together, into as many bytes as each has bits."""


@dataclass(frozen=True)
class Codec:
    """Codec of float32 rows as bytes: codes, then the scales of the buckets."""

    bits: int
    bucket: int
    """Numbers per bucket, a multiple of `GROUP`."""
    form: Form = "symmetric"
    scales: torch.dtype = torch.float32
    """Dtype of scales, float32 or bfloat16; scales are rounded up, so that no code overflows."""

    def bytes_of(self, elements: int) -> int:
        """Return the bytes of a row with this number of elements."""
        buckets = -(-elements // self.bucket)
        fields = 1 if self.form == "symmetric" else 2
        codes = -(-elements // GROUP) * self.bits
        return codes + buckets * fields * self.scales.itemsize

    def slices(self, rows: int, length: int) -> list[slice]:
        """Return consecutive columns of (`rows`, `length`) numbers, each of at most `SLICE`; a row
        of a slice consists of whole buckets."""
        columns = max(SLICE // max(rows, 1) // self.bucket, 1) * self.bucket
        return [slice(a, min(a + columns, length)) for a in range(0, length, columns)]

    def encode(
        self,
        rows: Tensor,
        shift: float = 0.0,
        noise: torch.Generator | None = None,
        levels: Tensor | None = None,
    ) -> Tensor:
        """Encode `rows` (R, n) as bytes (R, bytes).

        Args:
            shift: added before rounding; `decode` needs the same.
            noise: generator for stochastic rounding; None: round to the nearest.
            levels: levels of each bucket, ascending from 0 to 1 (buckets, 2^bits), for the form
                `minmax`; None: at equal distances. `decode` needs the same.
        """
        message = self.empty(rows)
        for where in self.slices(*rows.shape):
            self.encode_slice(message, rows[:, where], rows.shape[1], where, shift, noise, levels)
        return message

    def empty(self, rows: Tensor) -> Tensor:
        """Return memory for the bytes of `rows` (R, n)."""
        size = self.bytes_of(rows.shape[1])
        return torch.empty(len(rows), size, dtype=torch.uint8, device=rows.device)

    def encode_slice(
        self,
        message: Tensor,
        rows: Tensor,
        length: int,
        where: slice,
        shift: float = 0.0,
        noise: torch.Generator | None = None,
        levels: Tensor | None = None,
    ) -> None:
        """Write one of the `slices` of rows with `length` columns to their `message`."""
        buckets = self._buckets(rows.float())
        low, scale = self._ranges(buckets)
        position = (buckets - low) / scale
        if levels is not None:
            position = _between(position / self._codes[1], levels[self._of_slice(where)])
        if noise is None:
            position = (position + shift).round()
        else:
            drawn = torch.rand(position.shape, generator=noise, device=position.device)
            position = (position + drawn).floor()
        # If a scale is zero or not finite, the codes are ignored.
        codes = position.nan_to_num(0.0).clamp(*self._codes) - self._codes[0]
        packed = _pack(codes.flatten(1)[:, : rows.shape[1]].to(torch.uint8), self.bits)
        begin = where.start // GROUP * self.bits
        message[:, begin : begin + packed.shape[1]] = packed
        for columns, field in zip(self._fields(length, where), (scale, low), strict=False):
            message[:, columns] = field.squeeze(2).to(self.scales).view(torch.uint8)

    def normalized(self, rows: Tensor) -> Tensor:
        """Scale the numbers of `rows` (R, n) from the smallest (0) to the largest (1) of each
        bucket: (R, buckets, bucket), for the form `minmax`."""
        buckets = self._buckets(rows.float())
        low, scale = self._ranges(buckets)
        return (buckets - low) / (scale * self._codes[1])

    def decode(
        self,
        message: Tensor,
        length: int,
        shift: float = 0.0,
        levels: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Decode the result of `encode` to rows (R, length); zeros decode to zero."""
        rows = message.new_empty(len(message), length, dtype=dtype)
        for where in self.slices(len(message), length):
            rows[:, where] = self.decode_slice(message, length, where, shift, levels)
        return rows

    def sum(self, message: Tensor, length: int, levels: Tensor | None = None) -> Tensor:
        """Decode the result of `encode`, and add up its rows: (1, length) in float32."""
        total = message.new_empty(1, length, dtype=torch.float32)
        for where in self.slices(len(message), length):
            rows = self.decode_slice(message, length, where, levels=levels)
            total[:, where] = rows.sum(0, keepdim=True)
        return total

    def decode_slice(
        self,
        message: Tensor,
        length: int,
        where: slice,
        shift: float = 0.0,
        levels: Tensor | None = None,
    ) -> Tensor:
        """Decode one of the `slices` of rows with `length` columns: in float32."""
        columns = where.stop - where.start
        begin = where.start // GROUP * self.bits
        packed = message[:, begin : begin + -(-columns // GROUP) * self.bits]
        codes = self._buckets(_unpack(packed, self.bits)[:, :columns].float())
        if levels is None:
            codes = codes + self._codes[0] - shift
        else:
            every = levels[self._of_slice(where)].expand(len(codes), -1, -1)
            codes = every.gather(2, codes.long()) * self._codes[1]
        scale, *low = (
            _as(message[:, field], self.scales).float()[..., None]
            for field in self._fields(length, where)
        )
        rows: Tensor = codes * scale
        return (rows + low[0] if low else rows).flatten(1)[:, :columns]

    def _of_slice(self, where: slice) -> slice:
        """Return the buckets of a slice."""
        return slice(where.start // self.bucket, -(-where.stop // self.bucket))

    def _fields(self, length: int, where: slice) -> list[slice]:
        """Return the bytes of a slice's scales, and of its lower ends if they are sent."""
        size, buckets = self.scales.itemsize, self._of_slice(where)
        first = -(-length // GROUP) * self.bits
        begins = [first, first + -(-length // self.bucket) * size]
        return [
            slice(begin + buckets.start * size, begin + buckets.stop * size)
            for begin in begins[: 1 if self.form == "symmetric" else 2]
        ]

    @property
    def _codes(self) -> tuple[int, int]:
        """First and last code, before they are shifted to start at zero."""
        last = 2 ** (self.bits - 1) - 1
        return (-last, last) if self.form == "symmetric" else (0, 2**self.bits - 1)

    def _buckets(self, rows: Tensor) -> Tensor:
        """Split rows into (R, buckets, bucket), padded without changing the last range."""
        missing = -rows.shape[1] % self.bucket
        if missing:
            rows = torch.cat([rows, rows[:, -1:].expand(-1, missing)], 1)
        return rows.view(len(rows), -1, self.bucket)

    def _ranges(self, buckets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower end of each bucket and its scale, as stored: (R, buckets, 1)."""
        kind, (first, last) = torch.finfo(self.scales), self._codes
        smallest = kind.smallest_normal * kind.eps
        if self.form == "symmetric":
            low, steps = torch.zeros_like(buckets[..., :1]), last
            width = buckets.abs().amax(2, keepdim=True)
        else:
            low, steps = buckets.amin(2, keepdim=True), last - first
            if self.scales != torch.float32:
                low = (low - low.abs() * kind.eps - smallest).to(self.scales).float()
            width = buckets.amax(2, keepdim=True) - low
        # By a tensor: CUDA would multiply by the inverse of a number, and round differently.
        scale = width / torch.full_like(width, steps)
        if self.scales != torch.float32:
            scale = (scale * (1 + kind.eps)).to(self.scales).float()
        # A denormal scale is coarse: rounded down, it would clip the largest number.
        return low, torch.where(scale * steps < width, scale + smallest, scale)


def _between(values: Tensor, levels: Tensor) -> Tensor:
    """Return the positions of values (R, buckets, bucket) among levels (buckets, L): 1.5 is halfway
    between the second and the third."""
    every = levels.expand(len(values), -1, -1)
    below = torch.searchsorted(every[..., 1:-1].contiguous(), values.contiguous(), right=True)
    low, high = every.gather(2, below), every.gather(2, below + 1)
    return below + (values - low) / (high - low).clamp(min=torch.finfo(torch.float32).eps)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (R, n), uint8, into bytes: `GROUP` of them in `bits` bytes, the first lowest."""
    missing = -codes.shape[1] % GROUP
    if missing:
        codes = torch.cat([codes, codes.new_zeros(len(codes), missing)], 1)
    per_word, size, dtype = _word(bits)
    codes = codes.view(len(codes), -1, per_word)
    words = codes[..., 0].to(dtype)
    for place in range(1, per_word):
        words = words | codes[..., place].to(dtype) << place * bits
    return words[..., None].view(torch.uint8)[..., :size].flatten(1)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Invert `_pack`, padded to a multiple of `GROUP`."""
    per_word, size, dtype = _word(bits)
    groups = packed.reshape(len(packed), -1, size)
    if missing := dtype.itemsize - size:
        groups = torch.cat([groups, groups.new_zeros(*groups.shape[:2], missing)], 2)
    shifts = torch.arange(0, per_word * bits, bits, dtype=dtype, device=packed.device)
    codes: Tensor = (groups.contiguous().view(dtype) >> shifts) & (2**bits - 1)
    return codes.flatten(1)


def _word(bits: int) -> tuple[int, int, torch.dtype]:
    """Return the fewest codes that fill whole bytes, these bytes, and a dtype that holds them.

    A wider one would multiply the memory that is read and written.
    """
    per_word = GROUP // math.gcd(bits, GROUP)
    size = per_word * bits // 8
    dtype = torch.uint8 if size == 1 else torch.int32 if size <= 3 else torch.int64
    return per_word, size, dtype


def _as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret the bytes of each row as numbers; copied, since they may be unaligned."""
    if not data.numel():
        return data.new_empty(len(data), 0, dtype=dtype)
    return data.clone(memory_format=torch.contiguous_format).view(dtype)


def _bytes(numbers: Tensor) -> Tensor:
    """Reinterpret the numbers of each row as bytes."""
    if not numbers.numel():
        return numbers.new_empty(len(numbers), 0, dtype=torch.uint8)
    return numbers.contiguous().view(torch.uint8)


@dataclass(frozen=True)
class WireFormat:
    """Format in which a unit is sent: matrices in low bits, and the rest unchanged.

    The rest are parameters with one dim, such as norms' weights, and those smaller than a bucket.
    """

    unit: Unit
    codec: Codec

    @cached_property
    def parts(self) -> list[tuple[bool, int]]:
        """Whether each parameter is sent in low bits, and its number of elements, in order."""
        shapes = self.unit.shapes.values()
        return [(len(s) > 1 and s.numel() >= self.codec.bucket, s.numel()) for s in shapes]

    @cached_property
    def coarse(self) -> int:
        """Number of elements sent in low bits."""
        return sum(size for is_coarse, size in self.parts if is_coarse)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split `rows` (R, p) into elements sent in low bits (R, c) and unchanged (R, p - c)."""
        pieces = torch.split(rows, [size for _, size in self.parts], 1)
        kinds = [is_coarse for is_coarse, _ in self.parts]
        both = ([p for p, k in zip(pieces, kinds, strict=True) if k is w] for w in (True, False))
        coarse, exact = (torch.cat([rows[:, :0], *pieces], 1) for pieces in both)
        return coarse, exact

    def join(self, coarse: Tensor, exact: Tensor) -> Tensor:
        """Invert `split`."""
        sizes = ([size for is_coarse, size in self.parts if is_coarse is w] for w in (True, False))
        both = [iter(torch.split(t, s, 1)) for t, s in zip((coarse, exact), sizes, strict=True)]
        return torch.cat([next(both[not is_coarse]) for is_coarse, _ in self.parts], 1)

    def pack(self, codes: Tensor, exact: Tensor) -> Tensor:
        """Concatenate codes and unchanged numbers as bytes, row by row."""
        return torch.cat([codes, _bytes(exact)], 1)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Invert `pack`."""
        codes = self.codec.bytes_of(self.coarse)
        return packed[:, :codes], _as(packed[:, codes:], dtype)


def seed_of(name: str, bits: int = 64) -> int:
    """Return a seed of `bits` bits for the random numbers called `name`."""
    return int.from_bytes(blake2b(name.encode(), digest_size=bits // 8).digest(), "little")
