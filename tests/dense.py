"""Attention with a mask of S x S elements, as a reference."""

import torch

from torchtitan.models.attention import masked_attention


def dense_attention(q, k, v, documents, window=0, sinks=None):
    """Compute `causal_attention`."""
    if q.is_cuda:  # with grouped heads and a mask, the kernels materialize all scores
        heads = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(heads, dim=1), v.repeat_interleave(heads, dim=1)
    if documents is None:
        documents = torch.zeros(len(q), q.shape[2], dtype=torch.int64, device=q.device)
    return masked_attention(q, k, v, document_mask(documents, window)[:, None], sinks)


def document_mask(documents, window=0):
    """Return the mask of visible tokens: (B, S, S) bool, query before key."""
    same = documents[:, :, None] == documents[:, None, :]
    band = torch.ones_like(same[0]).tril()
    return same & (band.triu(1 - window) if window else band)
