"""Tensor parallelism: each matrix is split over ranks (Megatron-LM; Shoeybi et al., 2019,
arXiv:1909.08053), from the roles that a model's plan declares.

A block's first matrices are split by columns and its last by rows, so that between them each rank
computes its own heads and features, and one sum over ranks completes them. Between blocks is the
*stream* of activations. With sequence parallelism (Korthikanti et al., 2022, arXiv:2205.05198) each
rank keeps a part of its sequence; without, every rank keeps all of it.

    role              weights   input                  output
    embedding         rows      tokens                 partial sums -> stream
    norm              whole     stream                 stream
    head_norm         whole     a part of the heads    a part of the heads
    joint_norm        rows      a part of the heads    a part of the heads
    whole             whole     stream                 stream
    input_gather      -         stream -> whole        -
    colwise           rows (*)  whole                  a part of the features
    gathered_colwise  rows (*)  stream -> whole        a part of the features
    gathered          -         stream -> whole        whole, for a part of the heads
    sinks             rows      a part of the heads    a part of the heads
    rowwise           columns   a part of the features partial sums -> stream
    logits            rows (*)  stream -> whole        a part of the vocabulary, or whole
    router            whole     stream                 stream -> whole
    experts           features  stream -> whole        partial sums -> stream

(*) `nn.Linear` stores its weight as (outputs, inputs), so its columns are the tensor's rows.

Weights become DTensors; modules exchange plain tensors.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.convert import Wire
from torchtitan.models.experts import Experts, Router
from torchtitan.models.layers import JointNorm
from torchtitan.models.spec import TensorRole
from torchtitan.optim.parameters import redistribute_grads
from torchtitan.parallel.activation_checkpoint import KEPT_OPERATORS
from torchtitan.torch_private.distributed import process_group

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


INPUT_DIMS: Mapping[TensorRole, int] = {"norm": 3, "head_norm": 4, "joint_norm": 3}
"""Number of input dims, which distinguishes a norm of the stream from one of heads."""


class Style(NamedTuple):
    """Placements on the tensor axis of a module with some role."""

    weight: "Placement | None"
    given: "Placement"
    """Placement of the input as it arrives, a plain tensor."""
    needed: "Placement"
    """Placement to which the input is redistributed before the module runs."""
    left: "Placement | None"
    """Placement to which the output is redistributed; None: it is left unchanged."""
    gradient: "Placement | None" = None
    """Placement of the gradient of an output that is already placed as `left`, if it is another."""


def styles(sequence_parallel: bool, loss_parallel: bool) -> dict[TensorRole, Style]:
    """Return the table above."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole, rows, columns, features = Replicate(), Shard(0), Shard(1), Shard(2)
    heads = Shard(2)
    stream: Placement = Shard(1) if sequence_parallel else whole
    logits: Placement = features if loss_parallel else whole
    return {
        "embedding": Style(rows, given=whole, needed=whole, left=stream),
        "norm": Style(whole, given=stream, needed=stream, left=stream),
        "head_norm": Style(whole, given=heads, needed=heads, left=heads),
        "joint_norm": Style(rows, given=features, needed=features, left=features),
        "whole": Style(whole, given=stream, needed=stream, left=stream),
        "input_gather": Style(None, given=stream, needed=whole, left=None),
        "colwise": Style(rows, given=whole, needed=whole, left=features),
        "gathered_colwise": Style(rows, given=stream, needed=whole, left=features),
        "gathered": Style(None, given=stream, needed=whole, left=whole, gradient=Partial()),
        "sinks": Style(rows, given=columns, needed=columns, left=rows),
        "rowwise": Style(columns, given=features, needed=features, left=stream),
        "logits": Style(rows, given=stream, needed=whole, left=logits),
        "router": Style(whole, given=stream, needed=stream, left=None),
        "experts": Style(whole, given=stream, needed=whole, left=stream),
    }


def apply(
    model: nn.Module,
    plan: Mapping[str, TensorRole],
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
) -> None:
    """Split the modules of `model` that `plan` names over `mesh` (tp), in place."""
    table = styles(sequence_parallel, loss_parallel)
    # Shared by all modules of a role, so that blocks stay alike for the compiler.
    checks = {role: partial(_check_input, role, dims) for role, dims in INPUT_DIMS.items()}
    for name, module in model.named_modules():
        roles = [role for pattern, role in plan.items() if fnmatchcase(name, pattern)]
        assert len(roles) <= 1, f"{name} has several roles: {roles}"
        if roles:
            wire = _wire(module, name, plan, roles[0])
            _distribute(module, mesh, table[roles[0]], wire)
            if roles[0] in checks:
                module.register_forward_pre_hook(checks[roles[0]])


def _check_input(role: TensorRole, dims: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuse an input that is not split as `role` requires: a gradient would lack a sum."""
    assert inputs[0].ndim == dims, (
        f"{module} has the role {role}, whose input has {dims} dims, but it received "
        f"{inputs[0].ndim}"
    )


def _wire(
    module: nn.Module, name: str, plan: Mapping[str, TensorRole], role: TensorRole
) -> Wire | None:
    """Return the wire format that a converter requests for the module's input or output, if any.

    A gathered input is shared by several linear layers, so all of them must request it.
    """
    if role == "rowwise":
        return getattr(module, "wire", None)
    if role != "input_gather":
        return None
    columns = [pattern for pattern, other in plan.items() if other == "colwise"]
    wires = [
        getattr(child, "wire", None)
        for inner, child in module.named_modules()
        if any(fnmatchcase(f"{name}.{inner}", pattern) for pattern in columns)
    ]
    return wires[0] if wires and all(wires) else None


def _distribute(module: nn.Module, mesh: DeviceMesh, style: Style, wire: Wire | None) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    for name, parameter in list(module.named_parameters(recurse=False)):
        assert style.weight is not None, f"{name} is in a module without weights of its own"
        # A bias has no input dim to split.
        splits_inputs = style.weight.is_shard(1) and parameter.ndim == 1
        placement = Replicate() if splits_inputs else style.weight
        if isinstance(module, Experts):
            placement = Shard(module.SPLIT_DIM[name])
        # No values are sent, since all are drawn later, by name.
        placed = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(placed))

    module.__class__ = SPLIT.get(type(module), type(module))
    if isinstance(module, SplitJointNorm):
        module.group_name = mesh.get_group().group_name
    if isinstance(module, nn.Embedding):
        module.forward = partial(_look_up, module)  # type: ignore[method-assign]
    if type(module) is nn.Linear and style.weight == Replicate():  # converted multiply themselves
        module.__class__ = WholeLinear

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = inputs
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [style.given], run_check=False)
        # Even if it changes nothing, a redistribution would complete the sums of the backward one
        # by one; without it, those of several modules accumulate and are completed together.
        if x.placements != (style.needed,):
            x = wire.shrink(x) if wire else x
            x = x.redistribute(placements=[style.needed])
        return (x, *rest)

    def leave(_: nn.Module, inputs: tuple[Any, ...], output: DTensor) -> Tensor:
        assert style.left is not None
        if style.gradient is not None:  # which a redistribution would complete here, as above
            return output.to_local(grad_placements=[style.gradient])
        output = output.redistribute(placements=[style.left])
        local: Tensor = (wire.shrink_gradient(output) if wire else output).to_local()
        return local

    module.register_forward_pre_hook(enter)
    if style.left is not None:
        module.register_forward_hook(leave)


def _look_up(module: nn.Embedding, tokens: "DTensor") -> "DTensor":
    """Look up the tokens whose rows this rank has; return zeros for the others.

    On plain tensors, since DTensor would compute the gradient of the whole table on every rank.
    """
    from torch.distributed.tensor import DTensor, Partial

    weight = module.weight
    assert isinstance(weight, DTensor)
    rows = weight.to_local()
    first = -(-len(weight) // weight.device_mesh.size()) * weight.device_mesh.get_local_rank()
    local = tokens.to_local() - first
    is_mine = (local >= 0) & (local < len(rows))
    found = F.embedding(torch.where(is_mine, local, 0), rows) * is_mine[..., None]
    return DTensor.from_local(found, weight.device_mesh, [Partial()], run_check=False)


def _whole(x: "DTensor", weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return weights that every rank has as plain tensors, for this rank's positions of `x`."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    assert isinstance(weight, DTensor)
    grads = [Partial() if x.placements[0].is_shard() else Replicate()]
    own_bias = bias.to_local(grad_placements=grads) if isinstance(bias, DTensor) else None
    return weight.to_local(grad_placements=grads), own_bias


class WholeLinear(nn.Linear):
    """Linear that multiplies this rank's positions with the whole matrix, which every rank has.

    On plain tensors, since torch 2.11's DTensor does not fold a split sequence into a batch.
    """

    def forward(self, x: "DTensor") -> "DTensor":  # type: ignore[override]
        from torch.distributed.tensor import DTensor

        product = F.linear(x.to_local(), *_whole(x, self.weight, self.bias))
        return DTensor.from_local(product, x.device_mesh, x.placements, run_check=False)


class SplitRouter(Router):
    """Router that chooses for this rank's part of the stream, and gathers the choices of all."""

    def forward(  # type: ignore[override]
        self, x: "DTensor", counted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if counted is not None and x.placements[0].is_shard():
            counted = counted.chunk(x.device_mesh.size(), 1)[x.device_mesh.get_local_rank()]
        weight, bias = _whole(x, self.weight, self.logit_bias)
        found = self.route(x.to_local(), weight, bias, counted)
        mine = [DTensor.from_local(t, x.device_mesh, x.placements, run_check=False) for t in found]
        scores, chosen = (each.redistribute(placements=[Replicate()]) for each in mine)
        # The gradient of a score is a sum over the features of an expert, of which ranks have some.
        return scores.to_local(grad_placements=[Partial()]), chosen.to_local()


class SplitExperts(Experts):
    """Experts with some hidden features each, for all tokens."""

    def forward(self, x: "DTensor", scores: Tensor, chosen: Tensor) -> "DTensor":  # type: ignore[override]
        from torch.distributed.tensor import DTensor, Partial

        whole = x.to_local(grad_placements=[Partial()])
        weights = [w.to_local() for w in self.weights if isinstance(w, DTensor)]
        if self.b2 is not None:
            # Added once to the sum over ranks: each adds its features of the model.
            own, width = weights[4], x.shape[-1]
            first = -(-width // x.device_mesh.size()) * x.device_mesh.get_local_rank()
            weights[4] = F.pad(own, (first, width - first - own.shape[1]))
        out = self.mix(whole, scores, chosen, *weights)
        return DTensor.from_local(out, x.device_mesh, [Partial()], run_check=False)


@torch.library.custom_op("torchtitan::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor, group_name: str) -> Tensor:
    """Add up `x` over ranks, which use the sum for different features: so gradients add up, too."""
    total = x.clone()
    dist.all_reduce(total, group=process_group(group_name))
    return total


@sum_over_ranks.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(x)


def _save_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group_name = inputs[1]


def _differentiate_sum(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return sum_over_ranks(gradient.contiguous(), ctx.group_name), None


sum_over_ranks.register_autograd(_differentiate_sum, setup_context=_save_group)
KEPT_OPERATORS.add(torch.ops.torchtitan.sum_over_ranks.default)


class SplitJointNorm(JointNorm):
    """Norm of features of which each rank has some."""

    group_name: str

    def forward(self, x: "DTensor") -> "DTensor":  # type: ignore[override]
        from torch.distributed.tensor import DTensor

        assert isinstance(self.weight, DTensor)
        own, weight = x.to_local(), self.weight.to_local()
        wide = own.to(torch.promote_types(x.dtype, torch.float32))
        squares = sum_over_ranks(wide.square().sum(-1, keepdim=True), self.group_name)
        square = squares / x.shape[-1]
        normed = (wide * torch.rsqrt(square + self.eps) * weight).to(x.dtype)
        return DTensor.from_local(normed, x.device_mesh, x.placements, run_check=False)


SPLIT: dict[type[nn.Module], type[nn.Module]] = {
    Router: SplitRouter,
    Experts: SplitExperts,
    JointNorm: SplitJointNorm,
}
"""Classes of modules that compute on plain tensors. A class, where a function for each module would
make blocks differ for the compiler."""


def complete_gradients(parts: Iterable[nn.Module]) -> None:
    """Complete the tensor-parallel gradients of `parts` after a backward."""
    redistribute_grads(p for part in parts for p in part.parameters())
