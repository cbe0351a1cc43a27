"""Operators that a CUDA device runs in place of a CPU's, for recordings on fake CPU tensors.

Fake tensors are on the CPU, since a torch without CUDA cannot differentiate any others. Most
operators are the same on both, with the same outputs and the same saved tensors (torch's
`derivatives.yaml`). The exceptions are here:

- `rms_norm` is one kernel that keeps its input and the reciprocal root (`_fused_rms_norm`), where a
  CPU runs one kernel for each of its operations, with intermediates in float32.
- The casts to MXFP8 are kernels of torchao, which need a GPU when they are imported.
- Attention keeps its inputs, its output and the log-sum-exp on both. Only its name differs, and on
  CUDA the backward accumulates the gradients of the queries in float32, and keeps those of keys
  and values for each query head, in memory of its own.
- Segments of a sequence in 16 bits are packed for one call of the flash kernel, where a CPU calls
  its kernel for each of them, or for each block of a band.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.torch_private import segment_kernels
from torchtitan.torch_private.attention_kernels import flash_can
from torchtitan.torch_private.compiler import without_modes

aten = torch.ops.aten
ON_CUDA: dict[str, Any] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": aten._scaled_dot_product_flash_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operators on CUDA, by the name of a CPU's operator in their place."""


def workspace_bytes(function: Any, args: Sequence[Any]) -> int:
    """Return the bytes that a kernel on CUDA allocates and frees."""
    if function._overloadpacket in (
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        aten._flash_attention_backward,
        torch.ops.torchtitan.document_attention_backward,
    ):
        # The gradients of the queries in float32, and a sum for each row of the scores; if heads
        # share keys, the gradients of keys and values of each head before they are added up
        # (torch's flash_api.cpp).
        queries, keys = args[1].shape, args[2].shape
        size: int = 4 * (math.prod(queries) + math.prod(queries[:-1]))
        if queries[1] > keys[1]:
            size += 2 * math.prod(keys) // keys[1] * queries[1] * args[2].itemsize
        return size
    return 0


def is_causal(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator is attention of each token to those before it alone."""
    if is_packed_attention(function):
        return False  # its FLOPs are of the pairs that see each other
    if function.namespace == "torchtitan":
        return "document_attention" in str(function)
    for index, argument in enumerate(function._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[index] if index < len(args) else kwargs.get("is_causal"))
    return False


def is_packed_attention(function: Any) -> bool:
    """Whether an operator is attention within segments that are packed."""
    return function._overloadpacket in (
        aten._flash_attention_forward,
        aten._flash_attention_backward,
    )


def packed_attention_flops(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the FLOPs of packed attention, of two products forward and of five backward."""
    names = (argument.name for argument in function._schema.arguments)
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    left, right = given["window_size_left"], given["window_size_right"]
    with without_modes():
        lengths = [given[bounds].diff().tolist() for bounds in ("cum_seq_q", "cum_seq_k")]
    pairs = sum(pairs_of_band(*each, left, right) for each in zip(*lengths, strict=True))
    product: int = 2 * math.prod(given["query"].shape[1:]) * pairs
    return product * (5 if str(function._overloadpacket).endswith("backward") else 2)


@lru_cache(maxsize=1024)  # all layers have the same segments
def pairs_of_band(queries: int, keys: int, left: int, right: int) -> int:
    """Return the number of queries and keys that see each other, as in `VarlenLayout`."""
    at = np.arange(queries) + keys - queries
    last = np.minimum(at + right, keys - 1) if right >= 0 else keys - 1
    first = np.maximum(at - left, 0) if left >= 0 else 0
    return int(np.broadcast_to(np.maximum(last - first + 1, 0), queries).sum())


class FusedNorm(torch.autograd.Function):
    """`rms_norm` on CUDA."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():  # where it is not yet made of others
            out, reciprocal = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
        context.save_for_backward(x, weight, reciprocal)
        context.shape = shape
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, reciprocal = context.saved_tensors
        needed = [context.needs_input_grad[0], context.needs_input_grad[2]]
        of_x, of_weight = torch.ops.aten._fused_rms_norm_backward(
            gradient, x, context.shape, reciprocal, weight, needed
        )
        return of_x, None, of_weight, None


rms_norm = F.rms_norm


def fused_rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Normalize as a CUDA device does."""
    is_mixed = weight is not None and weight.dtype != x.dtype
    if is_mixed or torch.compiler.is_compiling():  # the compiler takes it apart
        return rms_norm(x, shape, weight, eps)
    out: Tensor = FusedNorm.apply(x, shape, weight, eps)  # type: ignore[no-untyped-call]
    return out


@torch.library.custom_op("torchtitan::mxfp8_rows", mutates_args=())
def mxfp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast a matrix to MXFP8, with a scale for 32 elements of a row."""
    raise NotImplementedError("it is recorded, and never run")


@torch.library.custom_op("torchtitan::mxfp8_columns", mutates_args=())
def mxfp8_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast a matrix to MXFP8, with a scale for 32 elements of a column."""
    raise NotImplementedError("it is recorded, and never run")


@mxfp8_rows.register_fake
def _cast(x: Tensor) -> tuple[Tensor, Tensor]:
    data = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return data, x.new_empty((len(x), x.shape[1] // 32), dtype=torch.float8_e8m0fnu)


@mxfp8_columns.register_fake
def _cast_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    data, scales = _cast(x.t())
    return data.t(), scales


@cache
def _shard_casts() -> None:
    """Let DTensor shard the casts as their input."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    casts = torch.ops.torchtitan
    for cast, turn in ((casts.mxfp8_rows.default, 0), (casts.mxfp8_columns.default, 1)):
        found: list[Any] = [([Replicate(), Replicate()], [Replicate()])]
        found += [([Shard(dim), Shard(dim ^ turn)], [Shard(dim)]) for dim in (0, 1)]
        register_sharding(cast)(lambda x, found=found: found)


@contextmanager
def mxfp8_kernels() -> Iterator[None]:
    """Record torchao's casts to MXFP8 inside."""
    from torchao.prototype.mx_formats import kernels, mx_tensor

    def by_rows(x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = mxfp8_rows(x)
        return found

    def by_columns(x: Tensor, **_: Any) -> tuple[None, Tensor, None, Tensor]:
        data, scales = mxfp8_columns(x)
        return None, data, None, scales

    _shard_casts()
    with (
        mock.patch.object(mx_tensor, "triton_to_mxfp8_dim0", by_rows),
        mock.patch.object(kernels, "mxfp8_quantize_cuda", by_columns),
    ):
        yield


@contextmanager
def cuda_operators() -> Iterator[None]:
    """Run the operators of a CUDA device inside."""
    varlen_layouts = segment_kernels.varlen_layouts

    def with_values(*args: Any) -> Any:
        with without_modes():  # the FLOPs depend on the lengths of segments
            return varlen_layouts(*args)

    with (
        mock.patch.object(F, "rms_norm", fused_rms_norm),
        mock.patch.object(
            segment_kernels, "has_varlen_kernels", lambda _, dtype, dim: flash_can(dtype, dim)
        ),
        mock.patch.object(segment_kernels, "varlen_layouts", with_values),
    ):
        yield
