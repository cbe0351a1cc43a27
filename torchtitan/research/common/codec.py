"""Encoding of numbers in low bits, and of a unit for sending.

A row of numbers is cut into buckets, and each number becomes a code of 2 to 8 bits:

    symmetric   code = round(x / s),         s = max |x| / (2^(bits-1) - 1)   of its bucket
    minmax      code = round((x - lo) / s),  s = (hi - lo) / (2^bits - 1)

Rounding to the nearest has an error of at most s / 2. Rounding after a shift that sender and
receiver share, `round(t + shift) - shift` with a uniform shift, is unbiased, and so is stochastic
rounding, `round(t + u)` with a u of its own for each number. Codes can also represent levels at
unequal distances from lo to hi; then t is the position between two adjacent levels, and stochastic
rounding decides between them. A bucket with a NaN or an infinity is decoded as numbers that are not
finite: nothing is hidden.

Rows are encoded and decoded in slices of columns, so temporary memory does not grow with a unit.
A slice consists of whole buckets; numbers that fill none are a slice of their own. On CUDA, the
code for a slice is compiled, to round as eager code does, so that all ranks decode the same bits:
tested for eight settings on a CPU; on CUDA by `scripts/gpu`, which has not run since.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial, wraps
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from torchtitan.comm import Unit
from torchtitan.logging import logger
from torchtitan.torch_private.compiler import (
    EAGER_ARITHMETIC,
    any_number_of_shapes,
    compiler_error,
    serve_all_sizes,
)

Form = Literal["symmetric", "minmax"]
T = TypeVar("T")
SLICE = 2**24
"""Maximum numbers of a slice: 64 MiB in float32."""
GROUP = 8
"""Number of codes that are packed together, into as many bytes as each has bits."""
ALIGNMENT = 16
"""Bytes; inductor's code for CUDA copies tensors that start elsewhere, and all that is between."""
BACKENDS: dict[str, Any] = {"cuda": "inductor"}
"""Compiler for each type of device; code for others, and where it failed, is eager."""


def compiled(function: Callable[..., T]) -> Callable[..., T]:
    """Compile a function of tensors (R, buckets, n), and lists of them, on its first call.

    A graph serves any number of buckets, except one, and any distance between rows, so slices of
    all units share it. The rest is constant in it, as code for one bucket size is faster.
    """
    options = {"fullgraph": True, "dynamic": False, "options": EAGER_ARITHMETIC}
    compiled_by = cache(partial(torch.compile, function, **options))

    @wraps(function)
    def run(*args: Any) -> T:
        if torch.compiler.is_compiling():
            return function(*args)
        every = [each for value in args for each in (value if type(value) is list else [value])]
        tensors = [each for each in every if isinstance(each, Tensor) and each.ndim == 3]
        device = tensors[0].device.type
        if device in BACKENDS and tensors[0].shape[1] > 1:
            for tensor in tensors:
                serve_all_sizes(tensor, 1)
            try:
                with any_number_of_shapes():
                    found: T = compiled_by(backend=BACKENDS[device])(*args)
                    return found
            except compiler_error() as error:
                BACKENDS.pop(device, None)  # another thread may have failed, too
                reason = str(getattr(error, "inner_exception", error)).strip().partition("\n")[0]
                logger.warning("low-bit messages are encoded without compilation: %s", reason)
        return function(*args)

    return run


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

    def empty(self, rows: Tensor) -> Tensor:
        """Return memory for the bytes of `rows` (R, n)."""
        size = self.bytes_of(rows.shape[1])
        return torch.empty(len(rows), size, dtype=torch.uint8, device=rows.device)

    def slices(self, rows: int, length: int) -> list[slice]:
        """Return consecutive columns of (`rows`, `length`) numbers, each of at most `SLICE`."""
        step = math.lcm(self.bucket, GROUP * ALIGNMENT)
        columns = max(SLICE // max(rows, 1) // step, 1) * step
        whole = length // self.bucket * self.bucket
        ends = sorted({*range(0, whole, columns), whole, length})
        return [slice(*each) for each in pairwise(ends)]

    def buckets(self, rows: Tensor) -> Tensor:
        """View a slice of rows as (R, buckets, n)."""
        return rows.view(len(rows), -1, min(self.bucket, rows.shape[1]))

    def parts(self, message: Tensor, length: int, where: slice) -> list[Tensor]:
        """View what a slice of rows with `length` columns has in its message, as (R, buckets, n):
        codes, scales, and lower ends if they are sent."""
        buckets, size = self._of_slice(where), self.scales.itemsize
        every = -(-length // self.bucket) * size
        first = -(-length // GROUP) * self.bits
        spans = [(where.start // GROUP * self.bits, -(-where.stop // GROUP) * self.bits)]
        for begin in range(first, message.shape[1], every):
            spans.append((begin + buckets.start * size, begin + buckets.stop * size))
        count = buckets.stop - buckets.start
        return [message[:, slice(*span)].view(len(message), count, -1) for span in spans]

    def read(self, message: Tensor, length: int, where: slice) -> list[Tensor]:
        """Return `parts` that can be decoded, all of them aligned."""
        codes, *fields = self.parts(message, length, where)
        return [codes, *(field.clone() for field in fields)]

    def encode(
        self,
        rows: Tensor,
        shift: Tensor | float = 0.0,
        noise: torch.Generator | None = None,
        levels: Tensor | None = None,
    ) -> Tensor:
        """Encode `rows` (R, n) as bytes (R, bytes).

        Args:
            shift: added before rounding; `decode` needs the same. A tensor, if it varies.
            noise: generator for stochastic rounding; None: without.
            levels: levels of each bucket, ascending from 0 to 1 (buckets, 2^bits), for the form
                `minmax`; None: at equal distances. `decode` needs the same.
        """
        message = self.empty(rows)
        for where in self.slices(*rows.shape):
            buckets = self.buckets(rows[:, where])
            if noise is not None:
                shift = torch.rand(buckets.shape, generator=noise, device=rows.device) - 0.5
            own = None if levels is None else levels[None, self._of_slice(where)]
            parts = self.encode_buckets(buckets, shift, own)
            copy(parts, self.parts(message, rows.shape[1], where))
        return message

    @compiled
    def encode_buckets(
        self, buckets: Tensor, shift: Tensor | float = 0.0, levels: Tensor | None = None
    ) -> list[Tensor]:
        """Return the `parts` of a slice, given its numbers (R, buckets, n)."""
        buckets = buckets.float()
        low, scale = self._ranges(buckets)
        if levels is None:
            position = (buckets - low) / scale
        else:
            position = _between((buckets - low) / (scale * self._codes[1]), levels)
        # If a scale is zero or not finite, the codes are ignored.
        codes = (position + shift).round().nan_to_num(0.0).clamp(*self._codes) - self._codes[0]
        fields = [scale] if self.form == "symmetric" else [scale, low]
        packed = _pack(codes.to(torch.uint8), self.bits)
        return [packed, *(_bytes(field.to(self.scales)) for field in fields)]

    def normalized(self, rows: Tensor) -> Tensor:
        """Scale the numbers of `rows` (R, n) from the smallest (0) to the largest (1) of each
        bucket, for the form `minmax`."""
        found = [rows[:, :0].float()]
        for where in self.slices(*rows.shape):
            buckets = self.buckets(rows[:, where].float())
            low, scale = self._ranges(buckets)
            found.append(((buckets - low) / (scale * self._codes[1])).flatten(1))
        return torch.cat(found, 1)

    def decode(
        self,
        message: Tensor,
        length: int,
        shift: Tensor | float = 0.0,
        levels: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        is_sum: bool = False,
    ) -> Tensor:
        """Decode the result of `encode` to rows (R, length), or their sum (1, length); zeros decode
        to zero."""
        found = message.new_empty(1 if is_sum else len(message), length, dtype=dtype)
        for where in self.slices(len(message), length):
            parts = self.read(message, length, where)
            own = None if levels is None else levels[None, self._of_slice(where)]
            buckets = self.decode_buckets(parts, shift, own, dtype, is_sum)
            found[:, where] = buckets.flatten(1)[:, : where.stop - where.start]
        return found

    @compiled
    def decode_buckets(
        self,
        parts: list[Tensor],
        shift: Tensor | float = 0.0,
        levels: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        is_sum: bool = False,
    ) -> Tensor:
        """Decode the parts of a slice to (R, buckets, n), padded to a multiple of `GROUP`."""
        codes = _unpack(parts[0], self.bits).float()
        scale, *low = (as_numbers(field, self.scales).float() for field in parts[1:])
        if levels is None:
            codes = codes + self._codes[0] - shift
        else:
            every = levels.expand(len(codes), -1, -1)
            codes = every.gather(2, codes.long()) * self._codes[1]
        found: Tensor = codes * scale
        found = found + low[0] if low else found
        return (found.sum(0, keepdim=True) if is_sum else found).to(dtype)

    def _of_slice(self, where: slice) -> slice:
        """Return the buckets of a slice."""
        return slice(where.start // self.bucket, -(-where.stop // self.bucket))

    @property
    def _codes(self) -> tuple[int, int]:
        """First and last code, before they are shifted to start at zero."""
        last = 2 ** (self.bits - 1) - 1
        return (-last, last) if self.form == "symmetric" else (0, 2**self.bits - 1)

    def _ranges(self, buckets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower end of each bucket and its scale, as stored: (R, buckets, 1)."""
        last = self._codes[1]
        if self.form == "symmetric":
            low = torch.zeros_like(buckets[..., :1])
            width = buckets.abs().amax(2, keepdim=True)
        else:
            low = self._stored(buckets.amin(2, keepdim=True), up=False)
            width = buckets.amax(2, keepdim=True) - low
        # By a tensor: CUDA would multiply by the inverse of a number, and round differently.
        scale = self._stored(width / torch.full_like(width, last), up=True)
        # A denormal scale is coarse: rounded down, it would clip the largest number.
        smallest = torch.finfo(self.scales).smallest_normal * torch.finfo(self.scales).eps
        return low, torch.where(scale * last < width, scale + smallest, scale)

    def _stored(self, numbers: Tensor, *, up: bool) -> Tensor:
        """Round numbers up or down to those of the dtype of scales; by bits, since a compiler may
        remove a conversion to a dtype and back."""
        if self.scales == torch.float32:
            return numbers
        bits = numbers.view(torch.int32) & -(2**16)
        nearer, further = bits.view(torch.float32), (bits + 2**16).view(torch.float32)
        return torch.where(nearer < numbers if up else nearer > numbers, further, nearer)


def copy(parts: list[Tensor], places: list[Tensor]) -> None:
    """Copy each part to its place."""
    for part, place in zip(parts, places, strict=True):
        place.copy_(part)


def _between(values: Tensor, levels: Tensor) -> Tensor:
    """Return the positions of values (R, buckets, bucket) among levels (buckets, L): 1.5 is halfway
    between the second and the third."""
    every = levels.expand(len(values), -1, -1)
    below = torch.searchsorted(every[..., 1:-1].contiguous(), values.contiguous(), right=True)
    low, high = every.gather(2, below), every.gather(2, below + 1)
    return below + (values - low) / (high - low).clamp(min=torch.finfo(torch.float32).eps)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., n), uint8, into bytes: `GROUP` of them in `bits` bytes, the first lowest."""
    missing = -codes.shape[-1] % GROUP
    if missing:
        codes = torch.cat([codes, codes.new_zeros(*codes.shape[:-1], missing)], -1)
    per_word, size, dtype = _word(bits)
    codes = codes.view(*codes.shape[:-1], -1, per_word)
    words = codes[..., 0].to(dtype)
    for place in range(1, per_word):
        words = words | codes[..., place].to(dtype) << place * bits
    return words[..., None].view(torch.uint8)[..., :size].flatten(-2)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Invert `_pack`, padded to a multiple of `GROUP`."""
    per_word, size, dtype = _word(bits)
    groups = packed.view(*packed.shape[:-1], -1, size)
    if missing := dtype.itemsize - size:
        groups = torch.cat([groups, groups.new_zeros(*groups.shape[:-1], missing)], -1)
    shifts = torch.arange(0, per_word * bits, bits, dtype=dtype, device=packed.device)
    codes: Tensor = (groups.contiguous().view(dtype) >> shifts) & (2**bits - 1)
    return codes.flatten(-2)


def _word(bits: int) -> tuple[int, int, torch.dtype]:
    """Return the fewest codes that fill whole bytes, these bytes, and a dtype that holds them.

    A wider one would multiply the memory that is read and written.
    """
    per_word = GROUP // math.gcd(bits, GROUP)
    size = per_word * bits // 8
    dtype = torch.uint8 if size == 1 else torch.int32 if size <= 3 else torch.int64
    return per_word, size, dtype


def as_numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret the bytes of each row as numbers; copied, since they may be unaligned."""
    if not data.numel():
        return data.new_empty(*data.shape[:-1], 0, dtype=dtype)
    return data.clone(memory_format=torch.contiguous_format).view(dtype)


def _bytes(numbers: Tensor) -> Tensor:
    """Reinterpret the numbers of each row as bytes."""
    if not numbers.numel():
        return numbers.new_empty(*numbers.shape[:-1], 0, dtype=torch.uint8)
    return numbers.contiguous().view(torch.uint8)


def _joined(columns: list[Tensor]) -> Tensor:
    """Concatenate columns, without a copy if all but one are empty, and that one is aligned."""
    first, *others = [each for each in columns if each.numel()] or columns
    is_aligned = first.storage_offset() * first.itemsize % ALIGNMENT == 0
    return first if is_aligned and not others else torch.cat([first, *others], 1)


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
        coarse, exact = (_joined([rows[:, :0], *pieces]) for pieces in both)
        return coarse, exact

    def join(self, coarse: Tensor, exact: Tensor) -> Tensor:
        """Invert `split`."""
        sizes = ([size for is_coarse, size in self.parts if is_coarse is w] for w in (True, False))
        both = [iter(torch.split(t, s, 1)) for t, s in zip((coarse, exact), sizes, strict=True)]
        return _joined([next(both[not is_coarse]) for is_coarse, _ in self.parts])

    def pack(self, codes: Tensor, exact: Tensor) -> Tensor:
        """Concatenate codes and unchanged numbers as bytes, row by row."""
        return _joined([codes, _bytes(exact)])

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Invert `pack`."""
        codes = self.codec.bytes_of(self.coarse)
        return packed[:, :codes], as_numbers(packed[:, codes:], dtype)


def seed_of(name: str, bits: int = 64) -> int:
    """Return a seed of `bits` bits for the random numbers called `name`."""
    return int.from_bytes(blake2b(name.encode(), digest_size=bits // 8).digest(), "little")
