"""Linear layers with Float8 and MXFP8 products, through torchao (https://github.com/pytorch/ao).

Both factors of each matrix product are rounded to 8 bits (e4m3; gradients e5m2 where a tensor has
one scale; Micikevicius et al., 2022, arXiv:2209.05433) after a scale has brought their largest
element to the largest that Float8 has. A scale for each row, a power of two, takes more time than
one for each tensor, but an outlier reduces the precision of its row only; and a row does not depend
on the layout, while a tensor's part of the batch does.

MXFP8 has a scale for every 32 summed elements, a power of two of 8 bits (Open Compute Project, "OCP
Microscaling Formats (MX) Specification" v1.0, 2023; training with it: Mishra et al., 2025,
arXiv:2506.08027, whose rounding of the scale upwards is used). Blackwell supports these products in
hardware.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from torchtitan.config import Context, Problem
from torchtitan.convert.settings import (
    Conversion,
    ConversionTarget,
    LinearConverterConfig,
    Wire,
    linears,
    replace,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

MULTIPLE = 16
"""Divisor required of the dims of a Float8 matrix product."""
LARGEST_OF_1B = 2048 * 8192


class Float8(LinearConverterConfig):
    """Linear layers with Float8 matrix products, through torchao."""

    name: Literal["float8"] = "float8"
    """Name of the converter."""
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """Granularity of the scales: one per tensor; one per row; or one per row, with the weights'
    gradients in high precision."""
    enable_fsdp_float8_all_gather: bool = False
    """Gather the parameters of FSDP2 in Float8 (tensorwise only)."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all gathered weights with one reduction before each step, instead of
    one per weight and gather."""
    enable_tensor_parallel_float8_all_gather: bool = False
    """Gather activations over tensor-parallel ranks in Float8 (tensorwise only)."""

    def problems(self, context: Context) -> Iterator[Problem]:
        yield from super().problems(context)
        for name in filter(None, (self.packs_weights, self.gathers_inputs)):
            if self.recipe != "tensorwise":
                message = (
                    "tensors that are gathered in Float8 need one scale per tensor; use "
                    f'recipe = "tensorwise", not "{self.recipe}"'
                )
                yield Problem(name, message, ("recipe",))
        if self.precompute_float8_dynamic_scale_for_fsdp and not self.packs_weights:
            needs = "enable_fsdp_float8_all_gather"
            message = f"it computes the scales for {needs} = true; set that too, or use false"
            yield Problem("precompute_float8_dynamic_scale_for_fsdp", message, (needs,))

    @property
    def packs_weights(self) -> str | None:
        is_on = self.enable_fsdp_float8_all_gather
        return "enable_fsdp_float8_all_gather" if is_on else None

    @property
    def gathers_inputs(self) -> str | None:
        is_on = self.enable_tensor_parallel_float8_all_gather
        return "enable_tensor_parallel_float8_all_gather" if is_on else None

    @property
    def multiple(self) -> int:
        return MULTIPLE

    def measured(self, elements: int) -> str | None:
        if elements > LARGEST_OF_1B:
            return None
        times = "as fast" if self.recipe == "tensorwise" else "0.87 times as fast"
        return f"Llama 1B, with matrices of up to 2048 x 8192, was {times} as in bf16 on one H100"

    def lacks(self, capability: tuple[int, int] | None) -> str | None:
        if capability is None:
            return "a CPU has no matrix products in Float8"
        first = (9, 4) if torch.version.hip else (8, 9)
        if capability < first:
            has, needs = (".".join(map(str, version)) for version in (capability, first))
            return f"its compute capability is {has}, and matrix products in Float8 need {needs}"
        return None

    def convert(self, model: nn.Module, target: ConversionTarget) -> Conversion:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = dataclasses.replace(
            Float8LinearConfig.from_recipe_name(self.recipe),
            emulate=target.emulate,
            enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather and target.has_fsdp,
        )
        done = Conversion(how=f" {self.recipe}{self._gathers(target)}")
        wanted = {name for name, _ in linears(model, self, done)}
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, name: name in wanted
        )
        if self.enable_tensor_parallel_float8_all_gather:
            _gather_as_bytes()
            for name in wanted:
                linear: Any = model.get_submodule(name)
                linear.wire = Wire(_Cast(linear), _CastGradient(linear))
        return done

    def _gathers(self, target: ConversionTarget) -> str:
        """Describe what is gathered in Float8, or why it is not although requested."""
        note = ""
        if self.enable_fsdp_float8_all_gather:
            note += ", parameters gathered in Float8" if target.has_fsdp else ", none gathered here"
        if self.enable_tensor_parallel_float8_all_gather:
            note += ", activations gathered in Float8"
        return note

    def before_pass(self, parts: Iterable[nn.Module]) -> None:
        if not self.precompute_float8_dynamic_scale_for_fsdp:
            return
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        for part in parts:
            precompute_float8_dynamic_scale_for_fsdp(part)


def _gather_as_bytes() -> None:
    """Patch torchao to gather Float8 as plain bytes, as gloo does not support Float8."""
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    def gather(operator: Any, arguments: Any, keywords: Any = None) -> Float8TrainingTensor:
        x, *rest = arguments
        data = operator(x._data.contiguous().view(torch.uint8), *rest, **(keywords or {}))
        return Float8TrainingTensor(
            data.view(x._data.dtype),
            x._scale,
            x._orig_dtype,
            x._linear_mm_config,
            x._gemm_input_role,
        )

    FLOAT8_OPS_TABLE[torch.ops._c10d_functional.all_gather_into_tensor.default] = gather


@dataclasses.dataclass(frozen=True)
class _Cast:
    """Cast of a linear's input, with the scale of the whole tensor."""

    linear: Any

    def __call__(self, x: "DTensor") -> "DTensor":
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

        dtype = self.linear.config.cast_config_input.target_dtype
        cast: DTensor = hp_tensor_to_float8_dynamic(
            x, dtype, self.linear.linear_mm_config, gemm_input_role=GemmInputRole.INPUT
        )
        return cast


@dataclasses.dataclass(frozen=True)
class _CastGradient:
    """Identity on a linear's output that casts the gradient in the backward."""

    linear: Any

    def __call__(self, y: "DTensor") -> "DTensor":
        from torchao.float8.float8_scaling_utils import NoopFwToFloat8BwDynamic

        dtype = self.linear.config.cast_config_grad_output.target_dtype
        same: DTensor = NoopFwToFloat8BwDynamic.apply(y, self.linear.linear_mm_config, dtype)
        return same


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
        return done
