"""Adam (Kingma and Ba, 2015, arXiv:1412.6980) and AdamW (Loshchilov and Hutter, 2019,
arXiv:1711.05101), both as torch implements them."""

from typing import Literal

import torch
from pydantic import Field

from torchtitan.optim.settings import Implemented, ParameterGroups


class AdamW(Implemented):
    """Adam with weight decay decoupled from the gradient."""

    name: Literal["AdamW"] = Field("AdamW", description="Which optimizer.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")

    def build(self, groups: ParameterGroups) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        return torch.optim.AdamW(groups, lr=self.lr, betas=betas, eps=self.eps, **self.how())


class Adam(Implemented):
    """Adam; weight decay is added to the gradient."""

    name: Literal["Adam"] = Field("Adam", description="Which optimizer.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")

    def build(self, groups: ParameterGroups) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        return torch.optim.Adam(groups, lr=self.lr, betas=betas, eps=self.eps, **self.how())
