"""Adam (Kingma and Ba, 2015, arXiv:1412.6980) and AdamW (Loshchilov and Hutter, 2019,
arXiv:1711.05101), as torch implements them, or with states in fewer bits, as torchao does."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from torchtitan.optim import low_bit
from torchtitan.optim.settings import Implemented, ParameterGroups


class _AnyAdam(Implemented):
    """What Adam and AdamW have in common."""

    name: Literal["AdamW", "Adam"]
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    state_dtype: low_bit.StateDtype = Field(
        "parameter",
        description="In what the moments are stored: as the parameters are (training.dtype), or "
        "in 16, 8 or 4 bits; a run may resume with another.",
    )

    def build(self, groups: ParameterGroups) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        settings: dict[str, Any] = {"lr": self.lr, "betas": betas, "eps": self.eps}
        if self.state_dtype != "parameter":
            decoupled = self.name == "AdamW"
            return low_bit.LowBitAdam(groups, self.state_dtype, decoupled=decoupled, **settings)
        kind = torch.optim.AdamW if self.name == "AdamW" else torch.optim.Adam
        return kind(groups, **settings | self.how())

    def describe(self, states: Iterable[tuple[str, Tensor]]) -> str | None:
        if self.state_dtype == "parameter":
            return None
        return low_bit.describe(self.state_dtype, states)


class AdamW(_AnyAdam):
    """Adam with weight decay decoupled from the gradient."""

    name: Literal["AdamW"] = Field("AdamW", description="Which optimizer.")


class Adam(_AnyAdam):
    """Adam; weight decay is added to the gradient."""

    name: Literal["Adam"] = Field("Adam", description="Which optimizer.")
