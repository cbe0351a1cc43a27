"""Attention kernels that return the normalizer, which the public function does not."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention by a fused kernel that returns its normalizer.

    Args:
        q: (B, H, Sq, E).
        k, v: (B, K, Sk, E); each serves H/K query heads.
        causal: a query sees the keys up to its own index; only for Sq = Sk and without `bias`.
        bias: added to the scores, (B, 1, Sq, Sk) in q's dtype. Must be finite: for a row of only
            minus infinity, the CPU kernel returns a log-sum-exp of 0.

    Returns:
        The output (B, H, Sq, E), and the log-sum-exp of the scores (B, H, Sq) in fp32.
    """
    aten = torch.ops.aten
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=causal, attn_mask=bias
        )
    elif bias is None and _takes_cudnn(q, k, v, causal):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, compute_log_sumexp=True, is_causal=causal
        )
        lse = lse.view(q.shape[:3])
    elif bias is None and flash_can(q.dtype, q.shape[-1]):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)
    else:
        keys, values, bias = _for_efficient(q, k, v, bias)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, keys, values, bias, compute_log_sumexp=True, is_causal=causal
        )
        lse = lse[..., : q.shape[2]]  # the kernel pads it
    return out, lse


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v in `attention_forward`.

    `out` and `lse` may come from attention over more keys than these; the result is then the
    contribution of these keys to the gradients.
    """
    aten = torch.ops.aten
    if q.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=bias
        )
        return grads[0], grads[1], grads[2]
    no_dropout = torch.empty(0, dtype=torch.int64, device=q.device)  # in place of a random state
    # The kernels assume without a check that `lse` is contiguous.
    given, lengths = (grad_out, q, k, v, out), (None, None, q.shape[2], k.shape[2])
    if bias is None and _takes_cudnn(q, k, v, causal):
        rows = lse.contiguous()[..., None]
        state = (no_dropout, no_dropout, None)
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            *given, rows, *state, *lengths, 0.0, causal
        )
        return grads[0], grads[1], grads[2]
    if bias is None and flash_can(q.dtype, q.shape[-1]):
        grads = aten._scaled_dot_product_flash_attention_backward(
            *given, lse.contiguous(), *lengths, 0.0, causal, no_dropout, no_dropout
        )
        return grads[0], grads[1], grads[2]
    keys, values, bias = _for_efficient(q, k, v, bias)
    grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_out,
        q,
        keys,
        values,
        bias,
        # It assumes that the heads of a token are adjacent, and that rows of `lse` have its
        # padding.
        out.transpose(1, 2).contiguous().transpose(1, 2),
        F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf).contiguous(),
        no_dropout,
        no_dropout,
        0.0,
        [True, True, True, False],
        causal,
    )
    heads = (k.shape[1], -1)
    return grad_q, grad_k.unflatten(1, heads).sum(2), grad_v.unflatten(1, heads).sum(2)


def flash_can(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the flash kernel takes heads of `head_dim` elements, without a bias."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return is_half and head_dim % 8 == 0 and head_dim <= 256


def _takes_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether torch's own attention takes cuDNN's kernel, which is the fastest on Hopper."""
    choice: int = torch._fused_sdp_choice(q, k, v, is_causal=causal, enable_gqa=True)
    is_chosen = choice == SDPBackend.CUDNN_ATTENTION.value
    return is_chosen and not torch.are_deterministic_algorithms_enabled()


def _for_efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys, values and bias for the memory-efficient kernel.

    It requires as many key heads as query heads, and a bias for each whose rows start at multiples
    of 16 elements.
    """
    heads = q.shape[1]
    k, v = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (k, v))
    if bias is not None:
        keys = bias.shape[-1]
        bias = F.pad(bias, (0, -keys % 16))[..., :keys].expand(len(q), heads, -1, -1)
    return k, v, bias
