"""Low-bit Adam moments, from torchao: a half to an eighth of the memory of float32.

A moment is split into blocks; a block is stored as a scale and a code for each element. 8-bit codes
index the steps of a dynamic map (Dettmers et al., 2022, arXiv:2110.02861), 4-bit ones for a smaller
map or a linear one (Li et al., 2023, arXiv:2309.01507), and Float8 codes are the values themselves.
An update is computed in float32, and the new moments are quantized again. It is compiled, once for
each shape.

Small tensors are not worth quantizing, and embeddings would be corrupted: a row unused in a step
has no gradient, and where its second moment was rounded to zero but its first was not, their
quotient is arbitrary, thousands of learning rates in the tests. Both keep the parameter's dtype,
embeddings as in the first of these papers.

A checkpoint holds the dequantized values in float32, which any layout and precision can load.
Loaded into the blocks it came from, it is the same to the bit: see `fill`.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan.optim import adam_and_sgd
from torchtitan.optim.adam_and_sgd import AdamRule, MomentStorage, Update
from torchtitan.optim.parameters import NamedParameter, local
from torchtitan.optim.settings import ParameterGroup
from torchtitan.torch_private.compiler import any_number_of_shapes, without_modes
from torchtitan.torch_private.dtensor import laid_out_as
from torchtitan.torch_private.torchao import quiet_torchao

StateDtype = Literal["bfloat16", "float8", "8bit", "4bit"]

SMALLEST = 4096
"""Minimum number of elements of a quantized tensor."""
BLOCK = {"float8": 256, "8bit": 256, "4bit": 128}
"""Elements per block."""
BYTES = {"bfloat16": 4.0, "float8": 2 + 8 / 256, "8bit": 2 + 8 / 256, "4bit": 1 + 8 / 128}
"""Bytes per parameter of both moments: codes, and a scale of 4 bytes per block."""


@dataclass(frozen=True)
class LowBitStorage(MomentStorage):
    """Storage of low-bit Adam moments."""

    dtype: StateDtype
    rounds = True
    is_compiled = True

    def build(self, rule: AdamRule, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        return LowBitAdam(groups, self, decoupled=rule.decoupled)

    def zeros(self, part: Tensor, *, signed: bool) -> Tensor:
        """Return a zero moment with the shape of `part`; quantized if worthwhile."""
        if self.dtype == "bfloat16":
            return torch.zeros_like(part, dtype=torch.bfloat16)
        if part.numel() < SMALLEST or part.numel() % BLOCK[self.dtype]:
            return torch.zeros_like(part)
        return _quantized_zeros(part, self.dtype, signed)

    def update(self) -> Update:
        return compiled_adam(decoupled=True)

    def values(self, part: Tensor) -> Tensor:
        own: Any = part
        found: Tensor = own.dequantize() if is_quantized(part) else part
        return found

    def saved(self, state: Tensor) -> Tensor:
        """Return the values of a state: itself, or a dequantized float32 copy in host memory."""
        if not is_quantized(state):
            return state
        return laid_out_as(state, self.values(local(state)).cpu())

    def restore(self, state: Tensor, saved: Tensor) -> None:
        fill(state, saved)

    def size(self, state: Tensor) -> int:
        own: Any = local(state)
        return own.codes.nbytes + own.scale.nbytes if is_quantized(state) else super().size(state)

    def state_bytes(self, parameter_bytes: int) -> float:
        return BYTES[self.dtype]

    def describe(self, states: Iterable[tuple[str, Tensor]]) -> str:
        """Describe the bytes stored on this rank, and the states left unquantized and why."""
        moments = [moment for name, moment in states if not name.endswith(".step")]
        elements = sum(local(moment).numel() for moment in moments)
        few = [moment for moment in moments if is_quantized(moment)]
        bits = sum(local(moment).numel() for moment in few)
        message = (
            f"optimizer states in {self.dtype}: {sum(map(self.size, moments)):,} bytes for "
            f"{elements:,} values"
        )
        if self.dtype != "bfloat16":
            rest = len(moments) - len(few)
            message += (
                f"; {bits:,} values in {len(few)} tensors are quantised, {elements - bits:,} in "
                f"{rest} stay as the parameters are (embeddings, and tensors of which this rank "
                f"has fewer than {SMALLEST} elements, or no multiple of the block of "
                f"{BLOCK[self.dtype]})"
            )
        return f"{message}; the update is compiled in the first step, once for each shape"


class LowBitAdam(torch.optim.Optimizer):
    """Adam or AdamW by torchao's arithmetic, with its state allocated at the start, as zeros.

    It computes on the local part of each tensor. torchao's own classes compile for DTensors
    instead, and torch's cache confuses their graphs with those of DTensors with other local shapes:
    the wrong kernel then reads beyond its tensors (torch 2.13).
    """

    def __init__(
        self, groups: Sequence[ParameterGroup], storage: LowBitStorage, *, decoupled: bool
    ) -> None:
        """`decoupled`: whether weight decay is decoupled from the gradient."""
        # Compiled code would specialize on a rate that is a number.
        tensors = [group.options() | {"lr": torch.tensor(group.rule.lr)} for group in groups]
        super().__init__(tensors, {})
        self.update = compiled_adam(decoupled=decoupled)
        for parameter in (parameter for group in groups for parameter in group.parameters):
            made = partial(_zeros, parameter, storage)
            moments = {"exp_avg": made(signed=True), "exp_avg_sq": made(signed=False)}
            self.state[parameter.tensor] = {"step": torch.tensor(0.0), **moments}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        given = ((p, g) for g in self.param_groups for p in g["params"] if p.grad is not None)
        with any_number_of_shapes():
            for parameter, group in given:
                state = self.state[parameter]
                state["step"] += 1
                self.update(local(parameter).detach(), local(parameter.grad), state, group)


def compiled_adam(*, decoupled: bool) -> Update:
    """Return torchao's update of one plain tensor; the rate in its group is a tensor."""
    with quiet_torchao():
        from torchao.optim.adam import single_param_adam
    update = adam_and_sgd.compiled_update(single_param_adam)
    # This warning is for torchao's developers only.
    warnings.filterwarnings("ignore", ".* does not implement _stable_hash_for_caching")

    def adam(
        weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]
    ) -> None:
        update(
            weight,
            gradient,
            state["step"],
            local(state["exp_avg"]),
            local(state["exp_avg_sq"]),
            None,  # AMSGrad state
            group["lr"],
            *group["betas"],
            group["weight_decay"],
            group["eps"],
            decoupled,
            False,  # no stochastic rounding of bfloat16 weights
        )

    return adam


def _zeros(parameter: NamedParameter, storage: LowBitStorage, *, signed: bool) -> Tensor:
    """Return a zero moment of a parameter, laid out as the parameter is."""
    part = local(parameter.tensor).detach()
    is_embedding = parameter.role == "embedding" and storage.dtype != "bfloat16"
    made = torch.zeros_like(part) if is_embedding else storage.zeros(part, signed=signed)
    return laid_out_as(parameter.tensor, made)


def compute_tables() -> None:
    """Compute torchao's tables of codes outside of dispatch modes.

    torchao caches them for the process. In a plan, tensors have no values, so the tables would be
    wrong for a run that follows.
    """
    from torchao.optim import subclass_4bit, subclass_8bit

    with without_modes():
        for module in (subclass_4bit, subclass_8bit):
            module.get_qmap_signed()
            module.get_qmap_unsigned()


def _quantized_zeros(part: Tensor, dtype: StateDtype, signed: bool) -> Tensor:
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    compute_tables()
    block, device = BLOCK[dtype], part.device

    def made(shape: Sequence[int]) -> Any:
        if dtype == "float8":
            return OptimStateFp8.zeros(shape, block, device)
        kind = OptimState8bit if dtype == "8bit" else OptimState4bit
        return kind.zeros(shape, signed, block, device)

    # To quantize all of it would take several int64 for each element for a moment.
    one, whole = made((block,)), made(part.shape)
    fill(one, torch.zeros(block, device=device))
    whole.codes.view(-1, one.codes.numel()).copy_(
        one.codes.view(1, -1).expand(part.numel() // block, -1)
    )
    whole.scale.copy_(one.scale.expand_as(whole.scale))
    return whole  # type: ignore[no-any-return]


def is_quantized(state: Tensor) -> bool:
    """Whether a state, or this rank's part of it, is stored as codes."""
    return hasattr(local(state), "codes")


@torch.no_grad()
def fill(state: Tensor, wanted: Tensor) -> None:
    """Quantize `wanted` into `state`: exactly, if possible, else to the nearest values.

    Requantizing dequantized values is exact, with two exceptions. Signed maps have a 1 but no -1,
    so a block whose largest element is negative stored it as less, and its original scale is not
    visible in the values. The linear 4-bit map has no 0, so only a scale of 0 represents that.
    """
    if not is_quantized(state):
        return  # live tensor, already filled
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
        scaled = found / torch.where(tried > 0, tried, 1.0)
        codes = torch.bucketize(scaled, (own.qmap[1:] + own.qmap[:-1]) / 2, out_int32=True)
        is_exact = (own.qmap[codes] * tried == found).all(1)
        exact = left[is_exact]
        own.scale[exact] = scale[exact]
        own.codes.view(len(blocks), -1)[exact] = _packed(own, codes[is_exact])
        left = left[~is_exact]


def _other_scales(largest: Tensor, extreme: Tensor) -> Iterator[Tensor]:
    """Yield the scales that blocks may have had where their values do not show it.

    Args:
        largest: largest element of each block.
        extreme: magnitude of the value of the most negative code.
    """
    yield torch.zeros_like(largest)
    if extreme > 0:
        # Product and quotient were rounded, so a neighbour of the quotient is possible.
        below = above = largest / extreme
        yield below
        for _ in range(2):
            below = torch.nextafter(below, torch.zeros_like(below))
            above = torch.nextafter(above, torch.full_like(above, torch.inf))
            yield below
            yield above


def _packed(own: Any, codes: Tensor) -> Tensor:
    """Return the codes as bytes, in storage format."""
    codes = codes.to(torch.uint8)
    return (codes[:, ::2] << 4) | codes[:, 1::2] if len(own.qmap) == 16 else codes


BFLOAT16 = LowBitStorage("bfloat16")
FLOAT8 = LowBitStorage("float8")
EIGHT_BITS = LowBitStorage("8bit")
FOUR_BITS = LowBitStorage("4bit")
