"""Modules of a decoder for auxiliary losses (`torchtitan.losses`), after its blocks.

Multi-token prediction follows DeepSeek-V3 (2024, arXiv:2412.19437, section 2.2): the module of
depth k receives the hidden states of depth k - 1 and the embeddings of the tokens k positions
later, and its result goes through the output of the model:

    h_k = Block(M [RMSNorm(h_(k-1)); RMSNorm(Emb(t_(i+k)))]),  loss_k: that of t_(i+k+1) by h_k

The modules are chained, so every prediction sees the whole causal chain. The embedding and the
output are shared with the model.

Shapes: B batch, S sequence, D model dim, A number of tokens predicted ahead.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchtitan.models.output import AuxiliaryLoss


class AheadModule(nn.Module):
    """Module of one depth."""

    def __init__(
        self, depth: int, dim: int, norm: Callable[[], nn.Module], block: nn.Module
    ) -> None:
        super().__init__()
        self.hidden_norm = norm()
        self.token_norm = norm()
        self.project = nn.Linear(2 * dim, dim, bias=False)
        self.block = block
        self.norm = norm()
        self.loss = AuxiliaryLoss(f"multi_token_{depth}", 1.0)

    def forward(self, hidden: Tensor, embedded: Tensor, *of_tokens: Tensor | None) -> Tensor:
        """Compute the hidden states of this depth from those of the one before; all (B, S, D).

        Args:
            embedded: embeddings of the later tokens.
            of_tokens: the other arguments of a block.
        """
        both = torch.cat((self.hidden_norm(hidden), self.token_norm(embedded)), -1)
        made: Tensor = self.block(self.project(both), *of_tokens)
        return made
