"""Linear layers with MXFP8 matrix products: Float8 with a scale for every 32 summed elements.

The scale is a power of two, 8 bits (Open Compute Project, "OCP Microscaling Formats (MX)
Specification" v1.0, 2023; training with it: Mishra et al., 2025, arXiv:2506.08027, whose rounding
of the scale upwards is used). Blackwell supports these products in hardware.
"""

from typing import Literal

from torch import nn

from torchtitan.convert.rounded_experts import convert_experts
from torchtitan.convert.settings import (
    Conversion,
    ConversionTarget,
    LinearConverterConfig,
    linears,
    replace,
)

BLOCK = 32
"""Elements that share a scale."""


class MXFP8(LinearConverterConfig):
    """Linear layers with MXFP8 products: Float8 with a power-of-two scale per 32 elements."""

    name: Literal["mxfp8"] = "mxfp8"
    """Name of the converter."""
    high_precision_weight_gradients: bool = False
    """Compute the gradients of the weights in their original dtype."""

    @property
    def multiple(self) -> int:
        return BLOCK

    def lacks(self, capability: tuple[int, int] | None) -> str | None:
        if capability is None:
            return "a CPU has no matrix products in MXFP8"
        if capability < (10, 0):
            has = ".".join(map(str, capability))
            return f"its compute capability is {has}, and matrix products in MXFP8 need 10.0"
        if self.experts:
            return "products of experts in MXFP8 are emulated on every device"
        return None

    def convert(self, model: nn.Module, target: ConversionTarget) -> Conversion:
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
        from torchao.quantization.quantize_.common import KernelPreference

        done = Conversion()
        kernels = KernelPreference.EMULATED if target.emulate else KernelPreference.AUTO
        for name, linear in linears(model, self, done):
            with linear.weight.device:
                converted = MXFP8Linear(
                    linear.in_features,
                    linear.out_features,
                    bias=False,
                    kernel_preference=kernels,
                    wgrad_with_hp=self.high_precision_weight_gradients,
                )
            converted.weight, converted.bias = linear.weight, linear.bias
            replace(model, name, converted)
        wide = self.high_precision_weight_gradients
        convert_experts(model, self, target, done, block=BLOCK, keeps_gradients=wide)
        return done
