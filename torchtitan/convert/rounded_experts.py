"""Products of experts with factors of 8 bits, rounded like those of converted linears.

The three products of a matrix (forward, gradient of the rows, gradient of the matrix) round both of
their factors to e4m3, with powers of two as scales: one for all elements that are summed, or one
for each 32 of them. The gradient of a matrix is a sum over the rows of its expert, so rows of two
experts never share a scale there.

A GPU of compute capability 9.0 multiplies Float8 rows as they are. Elsewhere, and in MXFP8, the
rounded values are multiplied in the original dtype, which represents them exactly.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.convert.settings import Conversion, ConversionTarget, LinearConverterConfig
from torchtitan.models.experts import Experts, expert_gradients, expert_products
from torchtitan.torch_private.distributed import max_over

FORMAT = torch.float8_e4m3fn
LARGEST = torch.finfo(FORMAT).max
SMALLEST_MAXIMUM = 1e-12
"""Value that stands for smaller maxima, as in torchao."""
GROUPED_MULTIPLE = 16
"""Divisor that torch's scaled grouped product requires of the number of summed rows."""


def experts(
    model: nn.Module, config: LinearConverterConfig, done: Conversion
) -> Iterator[tuple[str, Experts]]:
    """Yield the experts that `config` converts; `done` records all, with reasons for skipping."""
    for name, module in model.named_modules():
        if not isinstance(module, Experts):
            continue
        _, hidden, dim = module.w1.shape
        if not config.experts:
            done.skipped[name] = "experts = false"
        elif hidden % config.multiple or dim % config.multiple:
            done.skipped[name] = f"{hidden} x {dim}, not multiples of {config.multiple}"
        else:
            done.changed.append(name)
            done.kind = "linears and experts"
            yield name, module


def convert_experts(
    model: nn.Module,
    config: LinearConverterConfig,
    target: ConversionTarget,
    done: Conversion,
    *,
    block: int = 0,
    keeps_gradients: bool,
) -> None:
    """Change the products of the experts that `config` converts; see `RoundedProducts`."""
    group = target.groups.get("tp")
    for _, module in experts(model, config, done):
        module.multiply = RoundedProducts(
            block=block,
            keeps_gradients=keeps_gradients,
            group_name=group.group_name if group else "",
            is_native=not target.emulate,
        )


@dataclass(frozen=True)
class RoundedProducts:
    """Ways to multiply rows with the matrices of their experts in 8 bits."""

    block: int = 0
    """Number of summed elements that share a scale; 0: all of them."""
    keeps_gradients: bool = False
    """Whether the factors of the matrices' gradients are not rounded."""
    group_name: str = ""
    """Process group whose ranks have other hidden features of the same experts, if any."""
    is_native: bool = False
    """Whether the device multiplies Float8; else the products are emulated."""

    def __call__(self, rows: Tensor, weight: Tensor, ends: Tensor, hidden_dim: int) -> Tensor:
        """Compute `expert_products` of rounded factors.

        Args:
            rows, weight, ends: as there: (N, I), (E, O, I) and (E,).
            hidden_dim: dim of `weight` that `group_name` shards.

        Returns:
            (N, O).
        """
        out: Tensor = _RoundedProducts.apply(rows, weight, ends, hidden_dim, self)  # type: ignore[no-untyped-call]
        return out

    def multiply(self, rows: Tensor, weight: Tensor, ends: Tensor, is_sharded: bool) -> Tensor:
        """Multiply (N, I) with (E, O, I); `is_sharded`: ranks have some of the summed elements."""
        group_name = self.group_name if is_sharded and not self.block else ""
        x, x_scale = _round(rows, self.block, group_name)
        w, w_scale = _round(weight, self.block, group_name)
        if self.is_native:
            of_x, of_w = x_scale.reciprocal()[:, 0], w_scale.reciprocal()[..., 0]
            return _multiply(x, w.transpose(1, 2), of_x, of_w, ends).to(rows.dtype)
        x, w = _wide(x, x_scale, rows.dtype), _wide(w, w_scale, weight.dtype)
        product: Tensor = expert_products(x, w, ends)
        return product

    def gradients(self, grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        """Compute the gradient (E, O, I) of the matrices from (N, O) and (N, I)."""
        if not self.keeps_gradients and self.is_native:
            return _native_gradients(grad, rows, ends)
        if not self.keeps_gradients:
            segment, count = _segments(ends, len(rows), self.block)
            rounded = [_round_rows(x, segment, count) for x in (grad, rows)]
            grad, rows = (_wide(x, scale[segment], grad.dtype) for x, scale in rounded)
        found: Tensor = expert_gradients(grad, rows, ends)
        return found


class _RoundedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, hidden_dim: int, rule: RoundedProducts
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        ctx.hidden_dim, ctx.rule = hidden_dim, rule
        return rule.multiply(rows, weight, ends, is_sharded=hidden_dim == 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, ends = ctx.saved_tensors
        rule, is_sharded = ctx.rule, ctx.hidden_dim == 1
        by_outputs = weight.transpose(1, 2).contiguous()
        of_rows = rule.multiply(grad.contiguous(), by_outputs, ends, is_sharded)
        return of_rows, rule.gradients(grad, rows, ends), None, None, None


def _scale(largest: Tensor) -> Tensor:
    """Return the largest power of two that brings `largest` to at most that of the format."""
    ratio = (LARGEST / largest.double().clamp(min=SMALLEST_MAXIMUM)).float()
    return torch.exp2(torch.floor(torch.log2(ratio)))


def _cast(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(FORMAT)


def _wide(rounded: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of rounded elements; their scales may be shared by consecutive ones."""
    by_scale = torch.unflatten(rounded.float(), -1, (scale.shape[-1], -1))
    return (by_scale / scale[..., None]).flatten(-2).to(dtype)


def _round(x: Tensor, block: int, group_name: str) -> tuple[Tensor, Tensor]:
    """Round `x` with scales over the last dim.

    Args:
        block: number of elements that share a scale; 0: all.
        group_name: process group whose ranks have the others of that dim, if any.

    Returns:
        Elements in Float8, as many as in `x`, and the scales (..., number of blocks).
    """
    blocks: Tensor = torch.unflatten(x, -1, (-1, block or x.shape[-1]))
    largest = blocks.abs().amax(-1)
    if group_name:
        largest = max_over(largest, group_name)
    scale = _scale(largest)
    return _cast(blocks, scale[..., None]).flatten(-2), scale


def _segments(ends: Tensor, rows: int, block: int) -> tuple[Tensor, int]:
    """Return which rows of an expert share a scale, (N,) int64, and a bound on their number."""
    row = torch.arange(rows, device=ends.device)
    expert = torch.searchsorted(ends, row, right=True)
    if not block:
        return expert, len(ends)
    counts = ends.diff(prepend=ends.new_zeros(1)).long()
    blocks = (counts + block - 1) // block
    first = blocks.cumsum(0) - blocks
    return first[expert] + (row - (ends - counts)[expert]) // block, rows // block + len(ends)


def _round_rows(x: Tensor, segment: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Round the rows of `x` (N, I); return them, and a scale for each column of a segment."""
    where = segment[:, None].expand_as(x)
    largest = x.new_zeros(count, x.shape[1]).scatter_reduce(0, where, x.abs(), "amax")
    scale = _scale(largest)
    return _cast(x, scale[segment]), scale


def _native_gradients(grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Compute the gradients of matrices by torch's product of Float8 columns.

    It needs multiples of `GROUPED_MULTIPLE` rows, so each expert has rows of zeros in addition. As
    many are allocated as could be needed, so that the host does not wait for their number.
    """
    expert, count = _segments(ends, len(rows), 0)
    counts = ends.diff(prepend=ends.new_zeros(1))
    padded = (counts + GROUPED_MULTIPLE - 1) // GROUPED_MULTIPLE * GROUPED_MULTIPLE
    new_ends = padded.cumsum(0, dtype=torch.int32)
    shift = (new_ends - padded) - (ends - counts)
    place = torch.arange(len(rows), device=rows.device) + shift[expert]
    spaced, scales = list[Tensor](), list[Tensor]()
    for x in (grad, rows):
        rounded, scale = _round_rows(x, expert, count)
        columns = torch.zeros(
            x.shape[1], len(rows) + count * GROUPED_MULTIPLE, dtype=torch.uint8, device=x.device
        )
        columns[:, place] = rounded.view(torch.uint8).t()  # not all operators support Float8
        spaced.append(columns.view(FORMAT))
        scales.append(scale.reciprocal().flatten())
    out = _multiply(spaced[0], spaced[1].t(), scales[0], scales[1], new_ends)
    return out.to(grad.dtype)


def _multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor) -> Tensor:
    """Multiply Float8 in bfloat16; the scales are factors of the result."""
    product: Any = torch._scaled_grouped_mm
    out: Tensor = product(
        a, b, a_scale, b_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return out
