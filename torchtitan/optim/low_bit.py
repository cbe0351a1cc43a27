"""Adam's moments in few bits, by torchao, which take a half to an eighth of the memory of float32.

A moment is cut into blocks of its elements; a block is stored as a scale and a code for each
element. 8-bit codes stand for the steps of a dynamic map (Dettmers et al., 2022,
arXiv:2110.02861), 4-bit ones for those of a smaller map or of a line (Li et al., 2023,
arXiv:2309.01507), and Float8 codes for themselves. An update is computed in float32; what it
leaves of the moments is stored again in few bits. It is compiled, once for each shape.

Not all is stored so. Small tensors are not worth it. Embeddings would be corrupted: a row that
a step does not use has no gradient, and where its second moment was rounded to zero but its first
was not, their quotient is anything, thousands of learning rates in the tests. So theirs stay as
they are, as in the first of these papers.

A checkpoint holds what the codes stand for, in float32, which any layout and any other precision
can load. Loaded into the blocks it came from, it is the same to the bit: see `fill`.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan.optim.norm import local
from torchtitan.optim.parameters import NamedParameter
from torchtitan.optim.settings import ParameterGroup
from torchtitan.torch_private.compiler import any_number_of_shapes
from torchtitan.torch_private.dtensor import laid_out_as
from torchtitan.torch_private.torchao import quiet_torchao

StateDtype = Literal["parameter", "bfloat16", "float8", "8bit", "4bit"]

SMALLEST = 4096
"""Elements; a tensor with fewer is not worth codes."""
BLOCK = {"float8": 256, "8bit": 256, "4bit": 128}
"""Elements of a block."""
BYTES = {"bfloat16": 4.0, "float8": 2 + 8 / 256, "8bit": 2 + 8 / 256, "4bit": 1 + 8 / 128}
"""Of both moments, for each parameter: codes, and a scale of 4 bytes for each block."""


class LowBitAdam(torch.optim.Optimizer):
    """Adam or AdamW by torchao's arithmetic, with its state made from the start: zeros.

    It computes with what this rank holds of each tensor. torchao's own classes compile for DTensors
    instead, whose graphs torch's cache takes for those of DTensors that hold something else: the
    wrong kernel then reads beyond its tensors (torch 2.13).
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        dtype: StateDtype,
        *,
        decoupled: bool,
    ) -> None:
        """`decoupled` says whether the weights decay by themselves, not by their gradients."""
        # Compiled code would take a rate that is a number for a constant.
        tensors = [group.options() | {"lr": torch.tensor(group.rule.lr)} for group in groups]
        super().__init__(tensors, {})
        self.update = CompiledAdam(decoupled)
        for parameter in (parameter for group in groups for parameter in group.parameters):
            made = partial(_zeros, parameter, dtype)
            moments = {"exp_avg": made(signed=True), "exp_avg_sq": made(signed=False)}
            self.state[parameter.tensor] = {"step": torch.tensor(0.0), **moments}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        with any_number_of_shapes():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        state["step"] += 1
        self.update(local(parameter).detach(), local(gradient), state, group)


class CompiledAdam:
    """torchao's update of one plain tensor."""

    def __init__(self, decoupled: bool) -> None:
        with quiet_torchao():
            from torchao.optim.adam import single_param_adam
        self.decoupled = decoupled
        self.update: Callable[..., None] = torch.compile(
            single_param_adam, fullgraph=True, dynamic=False
        )
        # What torch would like of torchao's tensors concerns nobody else.
        warnings.filterwarnings("ignore", ".* does not implement _stable_hash_for_caching")

    def __call__(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        group: Mapping[str, Any],
    ) -> None:
        """Update `weight` and its state; of `group` the rate is a tensor."""
        self.update(
            weight,
            gradient,
            state["step"],
            local(state["exp_avg"]),
            local(state["exp_avg_sq"]),
            None,  # of AMSGrad
            group["lr"],
            *group["betas"],
            group["weight_decay"],
            group["eps"],
            self.decoupled,
            False,  # no stochastic rounding of bfloat16 weights
        )


def _zeros(parameter: NamedParameter, dtype: StateDtype, *, signed: bool) -> Tensor:
    """A moment of a parameter, laid out as it is."""
    part = local(parameter.tensor).detach()
    is_embedding = parameter.role == "embedding" and dtype != "bfloat16"
    made = torch.zeros_like(part) if is_embedding else zeros(part, dtype, signed=signed)
    return laid_out_as(parameter.tensor, made)


def zeros(part: Tensor, dtype: StateDtype, *, signed: bool) -> Tensor:
    """A moment of the shape of `part`, which is plain; in codes, if that is worth it."""
    if dtype == "parameter":
        return torch.zeros_like(part)
    if dtype == "bfloat16":
        return torch.zeros_like(part, dtype=torch.bfloat16)
    if part.numel() < SMALLEST or part.numel() % BLOCK[dtype]:
        return torch.zeros_like(part)
    return _quantized_zeros(part, dtype, signed)


def _quantized_zeros(part: Tensor, dtype: StateDtype, signed: bool) -> Tensor:
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    shape, block, device = part.shape, BLOCK[dtype], part.device
    if dtype == "float8":
        made = OptimStateFp8.zeros(shape, block, device)
    else:
        kind = OptimState8bit if dtype == "8bit" else OptimState4bit
        made = kind.zeros(shape, signed, block, device)
    fill(made, torch.zeros_like(part))
    return made  # type: ignore[no-any-return]


def is_quantized(state: Tensor) -> bool:
    """Whether a state, or this rank's part of it, is stored as codes."""
    return hasattr(local(state), "codes")


def values(state: Tensor) -> Tensor:
    """What a state stands for: itself, or a copy of it in float32, in host memory."""
    if not is_quantized(state):
        return state
    return laid_out_as(state, dequantized(local(state)).cpu())


def dequantized(part: Tensor) -> Tensor:
    """What a plain tensor stands for: itself, or what its codes do."""
    own: Any = part
    found: Tensor = own.dequantize() if is_quantized(part) else part
    return found


@torch.no_grad()
def fill(state: Tensor, wanted: Tensor) -> None:
    """Let codes stand for what is `wanted`: exactly, if they can, else for what is nearest.

    Rounding what was rounded gives it back, with two exceptions. Maps of signed numbers have a 1
    but no -1, so a block's largest element, when negative, was stored as less, and the scale it had
    is no longer to be seen. And the line of 4 bits has no 0, so only a scale of 0 gives that.
    """
    if not is_quantized(state):
        return  # a live tensor, which was filled itself
    own: Any = local(state)
    part = local(wanted).to(own.device, torch.float32)
    own.copy_(part)
    if not hasattr(own, "qmap"):
        return
    blocks = part.reshape(-1, own.block_size)
    rounded = own.dequantize().reshape(blocks.shape)
    left = (rounded != blocks).any(1).nonzero()[:, 0]
    for scale in _other_scales(blocks.abs().amax(1), -own.qmap[0]):
        found, tried = blocks[left], scale[left, None]
        codes = _nearest(own.qmap, found / torch.where(tried > 0, tried, 1.0))
        is_exact = (own.qmap[codes] * tried == found).all(1)
        exact = left[is_exact]
        own.scale[exact] = scale[exact]
        own.codes.view(len(blocks), -1)[exact] = _packed(own, codes[is_exact])
        left = left[~is_exact]


def _other_scales(largest: Tensor, extreme: Tensor) -> Iterator[Tensor]:
    """What scales blocks can have had that do not show it, by their largest elements.

    Args:
        largest: of each block.
        extreme: what the code of the most negative numbers stands for, as a positive number.
    """
    yield torch.zeros_like(largest)
    if extreme > 0:
        # Product and quotient were rounded: it may be a neighbour of the quotient.
        below = above = largest / extreme
        yield below
        for _ in range(2):
            below = torch.nextafter(below, torch.zeros_like(below))
            above = torch.nextafter(above, torch.full_like(above, torch.inf))
            yield below
            yield above


def _nearest(qmap: Tensor, scaled: Tensor) -> Tensor:
    """The code of what is nearest to each element, where the scale is 1."""
    return torch.bucketize(scaled, (qmap[1:] + qmap[:-1]) / 2, out_int32=True)


def _packed(own: Any, codes: Tensor) -> Tensor:
    """Codes as bytes, as they are stored."""
    codes = codes.to(torch.uint8)
    return (codes[:, ::2] << 4) | codes[:, 1::2] if len(own.qmap) == 16 else codes


def size(state: Tensor) -> int:
    """Bytes that this rank keeps of a state."""
    own: Any = local(state)
    kept = (own.codes, own.scale) if is_quantized(state) else (own,)
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)


def describe(dtype: StateDtype, states: Iterable[tuple[str, Tensor]]) -> str:
    """What this rank stores in how many bytes, and what is left as the parameters are and why."""
    moments = [moment for name, moment in states if not name.endswith(".step")]
    elements = sum(local(moment).numel() for moment in moments)
    few = [moment for moment in moments if is_quantized(moment)]
    bits = sum(local(moment).numel() for moment in few)
    message = (
        f"optimizer states in {dtype}: {sum(map(size, moments)):,} bytes for {elements:,} values"
    )
    if dtype != "bfloat16":
        rest = len(moments) - len(few)
        message += (
            f"; {bits:,} values in {len(few)} tensors are quantised, {elements - bits:,} in {rest} "
            "stay as the parameters are (embeddings, and tensors of which this rank has fewer than "
            f"{SMALLEST} elements, or no multiple of the block of {BLOCK[dtype]})"
        )
    return f"{message}; the update is compiled in the first step, once for each shape"
