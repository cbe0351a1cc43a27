"""Attention with queries, keys and values of 8 bits, after a rotation that evens out outliers.

Operands are rounded to Float8 (e4m3) or int8 after scaling their largest element to the largest
number of the format. A channel that is much larger than the others dominates the scale. A rotation
by the Walsh-Hadamard matrix H spreads it over a head; it is orthogonal, so without rounding nothing
changes (HadaCore: Agarwal et al., 2024, arXiv:2412.08832):

    (q H) (k H)' = q k'          and          softmax(...) (v H) H = softmax(...) v

Queries and keys are rotated after their rotary embedding. Their products are computed in the dtype
of the model, from the rounded numbers, and gradients pass straight through the rounding: this shows
the effect of 8 bits on a run, and is not faster. Attention kernels that multiply in 8 bits have no
backward.

A scale covers one token and head, one head of a sequence, or all heads of a sequence, and never a
microbatch, so it is the same on every layout. Ranks that share a sequence, or its heads, take their
common largest element.

Shapes: B batch, S sequence, H query heads, K key/value heads, E head dim.

The transform of the last dim is y = x H / sqrt(n), with n a power of two. H is the Kronecker
product of matrices of size 256 and a smaller one, so it takes a product along each of several dims;
usual head sizes take one. Smaller factors take fewer operations but more time, as those of 16 did
on an H100 and on a CPU.

On CUDA the products are in 16 bits and are summed in float32, as 1 and -1 are exact in 16 bits. A
factor in float32 is split into two in bf16, whose sum has 16 of its 24 bits: more than any format
to which the result is rounded.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan.checks.model import model_of
from torchtitan.config import Context, Problem, between
from torchtitan.convert.settings import Conversion, ConversionTarget, ConverterConfig, replace
from torchtitan.losses import at_least_float32
from torchtitan.models.attention import SelfAttention
from torchtitan.models.spec import AttentionShape, ModelSpec, build_empty
from torchtitan.torch_private.distributed import max_over

STEP = 256
"""Size of the factor matrices; the last may be smaller."""


def hadamard(x: Tensor) -> Tensor:
    """Multiply `x` (..., n) by the normalised matrix, in float32 or wider; returned in that dtype.

    Raises:
        ValueError: if n is not a power of two.
    """
    size = x.shape[-1]
    if not is_power_of_two(size):
        raise ValueError(f"the last dim is {size}; a Hadamard transform needs a power of two")
    y: Tensor = _Transform.apply(x)  # type: ignore[no-untyped-call]
    return y


class _Transform(torch.autograd.Function):
    """The transform, which is its own gradient; `mm` has none for a sum in another dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        size = x.shape[-1]
        y = x.reshape(*x.shape[:-1], *factors(size))
        for dim in range(x.ndim - 1, y.ndim):
            y = _times_matrix(y.transpose(dim, -1)).transpose(dim, -1)
        return at_least_float32(y.reshape(x.shape)) / math.sqrt(size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return hadamard(grad)


def _times_matrix(x: Tensor) -> Tensor:
    """Multiply `x` (..., r) by the matrix of size r: float32 or wider."""
    if not _sums_in_float32(x):
        wide = at_least_float32(x)
        return wide @ _matrix(x.shape[-1], wide)
    rows = x.reshape(-1, x.shape[-1])
    first = rows if x.dtype.itemsize == 2 else rows.bfloat16()
    matrix = _matrix(x.shape[-1], first)
    y = _product(first, matrix)
    if first is not rows:
        y = y + _product((rows - first.float()).bfloat16(), matrix)
    return y.view(x.shape)


def _sums_in_float32(x: Tensor) -> bool:
    """Whether there is a product of matrices in 16 bits that is summed in float32."""
    return x.device.type == "cuda" and x.dtype != torch.float64


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices in 16 bits: float32."""
    return torch.mm(a, b, out_dtype=torch.float32)


def is_power_of_two(size: int) -> bool:
    """Whether `size` is a power of two, so that the transform exists."""
    return size > 0 and size & (size - 1) == 0


def factors(size: int) -> list[int]:
    """Factor a power of two into 256s and a remainder."""
    if size <= STEP:
        return [size] if size > 1 else []
    return [STEP, *factors(size // STEP)]


def _matrix(size: int, like: Tensor) -> Tensor:
    """Return the matrix, whose sign at row i and column j is the parity of the bits of i & j."""
    index = torch.arange(size, device=like.device)
    common = index[:, None] & index
    parity = torch.zeros_like(common)
    for bit in range(size.bit_length()):
        parity ^= common >> bit & 1
    return (1 - 2 * parity).to(like.dtype)


Format = Literal["float8", "int8"]
Scales = Literal["token", "head", "tensor"]
Rotation = Literal["none", "qk", "v", "qkv"]

LARGEST: Mapping[Format, float] = {"float8": 448.0, "int8": 127.0}
SHARED_DIMS: Mapping[Scales, tuple[int, ...]] = {"token": (-1,), "head": (-2, -1), "tensor": ()}
"""Dims of (B, heads, S, E) that share a scale; (): all but the first."""
SHARING: Mapping[Scales, tuple[str, ...]] = {"token": (), "head": ("cp",), "tensor": ("cp", "tp")}
"""Axes of the mesh whose ranks have parts of the elements that share a scale."""


class LowPrecisionAttention(ConverterConfig):
    """Attention with queries, keys and values that are rotated and rounded to 8 bits."""

    name: Literal["low_precision_attention"] = "low_precision_attention"
    """Name of the converter."""
    filter_fqns: tuple[str, ...] = ()
    """Skip attention layers whose name contains one of these."""
    dtype: Format = "float8"
    """Format to which queries, keys and values are rounded: e4m3 or int8."""
    scale: Scales = "token"
    """Granularity of the scales: one for each token of a head, each head of a sequence, or the
    whole tensor of a sequence."""
    rotation: Rotation = "none"
    """Tensors that a Hadamard transform rotates before rounding: queries and keys, values, or all;
    the head dim must then be a power of two."""

    def problems(self, context: Context) -> Iterator[Problem]:
        if self.scale != "token":
            message = (
                "a scale depends on all tokens of a sequence, so the rounding of a token depends "
                'on later tokens; use "token" to avoid that'
            )
            yield Problem("scale", message, (), "note")
        yield from between(self._conflicts(context))

    def _conflicts(self, context: Context) -> Iterator[Problem]:
        """Yield conflicts: there must be attention to convert, with heads that can be rotated."""
        recipe, key = context.recipe, context.key
        model = model_of(recipe)
        if model is None:
            return
        names = _attentions(model.empty())
        wanted = [name for name in names if self._wants(name)]
        if not names:
            message = (
                f"{recipe.model.name} does not use SelfAttention, the module that is converted; "
                "leave the converter out"
            )
            yield Problem(f"{key}.name", message, ("model",))
        elif not wanted:
            message = (
                "it excludes all attention from conversion; list fewer names, or leave the "
                "converter out"
            )
            yield Problem(f"{key}.filter_fqns", message, ("model",))
        for number, other in enumerate(recipe.convert[: int(key.rpartition(".")[2])]):
            if isinstance(other, LowPrecisionAttention) and any(map(other._wants, wanted)):
                earlier = f"convert.{number}"
                message = (
                    f"{earlier} converts the same attention; exclude it in one of the two "
                    f"({earlier}.filter_fqns or {key}.filter_fqns)"
                )
                yield Problem(f"{key}.name", message, ("convert", "model"))
                break
        if self.scale == "tensor" and recipe.sharding.never_whole:
            message = (
                f'with sharding.name = "{recipe.sharding.name}" a rank computes attention with '
                'one shard of the heads after another, so none has the whole tensor; use "head" '
                'or "token"'
            )
            yield Problem(f"{key}.scale", message, ("sharding",))
        if unrotatable := self._unrotatable(model.spec.attention(model.args), model.title):
            yield Problem(f"{key}.rotation", f"{unrotatable}, or other heads", ("model",))

    def _unrotatable(self, shape: AttentionShape | None, title: str) -> str | None:
        size = shape.head_dim if shape else 1
        if self.rotation == "none" or is_power_of_two(size):
            return None
        return (
            f"a head of {title} has {size} elements, and a Hadamard transform needs a power of "
            'two; use "none"'
        )

    def unfit_after_training(self, spec: ModelSpec[Any], args: Any) -> str | None:
        if self.scale != "token":
            return (
                f'with scale "{self.scale}" the rounding of a token depends on the texts and the '
                'padding that are computed with it; use "token"'
            )
        names = _attentions(build_empty(spec.build, args, 1))
        if not any(map(self._wants, names)):
            return f"it leaves all attention of {spec.name} as it is"
        return self._unrotatable(spec.attention(args), spec.name)

    def _wants(self, name: str) -> bool:
        return not any(part in name for part in self.filter_fqns)

    def convert(self, model: nn.Module, target: ConversionTarget) -> Conversion:
        done = Conversion(how=f" ({self.described()})", kind="attention modules")
        groups = [target.groups[axis] for axis in SHARING[self.scale] if axis in target.groups]
        for name, module in list(model.named_modules()):
            if not isinstance(module, SelfAttention):
                continue
            if not self._wants(name):
                done.skipped[name] = "filter"
            elif isinstance(module, RoundedAttention):
                done.skipped[name] = "converted before"
            else:
                done.changed.append(name)
                replace(model, name, RoundedAttention(self, groups, module.window))
        return done

    def described(self) -> str:
        """Format, scale and rotation, in a few words."""
        rotated = "not rotated" if self.rotation == "none" else f"{self.rotation} rotated"
        return f"{self.dtype}, a scale for each {self.scale}, {rotated}"


def _attentions(model: nn.Module) -> list[str]:
    """Return the names of the modules that can be converted."""
    return [name for name, module in model.named_modules() if isinstance(module, SelfAttention)]


class RoundedAttention(SelfAttention):
    """`SelfAttention`, with any core, of rounded queries, keys and values."""

    def __init__(
        self, config: LowPrecisionAttention, groups: list[ProcessGroup], window: int = 0
    ) -> None:
        """Share scales over the ranks of `groups`, which have parts of their elements."""
        super().__init__(window)
        self.config, self.groups = config, [group.group_name for group in groups]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        given = {"q": q, "k": k, "v": v}
        wide = {
            name: hadamard(x) if name in self.config.rotation else at_least_float32(x)
            for name, x in given.items()
        }
        q, k, v = (x.to(q.dtype) for x in self.rounded(*wide.values()))
        mixed = self.core(q, k, v, documents, self.window, sinks)
        return hadamard(mixed).to(q.dtype) if "v" in self.config.rotation else mixed

    def rounded(self, *tensors: Tensor) -> list[Tensor]:
        """Round q, k and v, each (B, heads, S, E), by the largest elements of all ranks."""
        largest = [largest_elements(x.detach(), self.config.scale) for x in tensors]
        for group in self.groups:
            sizes = [each.shape[1] for each in largest]
            largest = list(torch.split(max_over(torch.cat(largest, 1), group), sizes, 1))
        pairs = zip(tensors, largest, strict=True)
        return [straight_through(x, most, self.config.dtype) for x, most in pairs]


def largest_elements(x: Tensor, scale: Scales) -> Tensor:
    """Return the largest element for each scale of `x` (B, heads, S, E) on this rank; 4 dims."""
    return x.abs().amax(SHARED_DIMS[scale] or (1, 2, 3), keepdim=True)


def straight_through(x: Tensor, largest: Tensor, format: Format) -> Tensor:
    """Round `x`; its gradient is that of the result."""
    exact, most = x.detach(), LARGEST[format]
    scale = torch.where(largest > 0, largest, 1.0) / most
    scaled = (exact / scale).clamp(-most, most)
    in_float8 = format == "float8"
    rounded = scaled.to(torch.float8_e4m3fn).to(x.dtype) if in_float8 else scaled.round()
    return rounded * scale + (x - exact)  # the difference is zero, and carries the gradient
