"""Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/): matrices are updated by
their orthogonalized momentum, so that all directions are learned at the same rate.

The momentum G = U S V^T becomes about U V^T by a few steps of a Newton-Schulz iteration, which uses
only matrix products. Scaled by 0.2 sqrt(max(rows, columns)), the update has the root mean square
that AdamW's usually has, so rate and weight decay are those of AdamW (Liu et al., 2025,
arXiv:2502.16982). AdamW updates everything except hidden matrices: embeddings, norms and the head.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from torchtitan.config import Context, Problem, allowed_names, shorten, show
from torchtitan.logging import logger
from torchtitan.optim.adam_and_sgd import AdamGroup, AdamWRule
from torchtitan.optim.matrices import Area, Exchange
from torchtitan.optim.parameters import NamedParameter, local
from torchtitan.optim.settings import Compiled, OptimizerConfig, ParameterGroup, UpdateRule
from torchtitan.torch_private.compiler import any_number_of_shapes, without_compiler

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's quintic: steep at 0, and within 0.7 and 1.2 where it has converged."""
EXPERT = "expert"
EPS = 1e-7
"""Minimum norm that a matrix is divided by."""
MIB = 2**20


class MuonGroup(AdamGroup):
    """Settings of Muon that differ for some parameters; the first match applies."""

    momentum: float | None = Field(None, ge=0, lt=1)
    """Decay of the running gradient (default: the optimizer's)."""


class AdamWPart(AdamWRule):
    """AdamW, for the parameters that Muon does not update."""

    lr: float | None = Field(None, gt=0)  # type: ignore[assignment]
    """Peak learning rate (default: the optimizer's)."""
    weight_decay: float | None = Field(None, ge=0)  # type: ignore[assignment]
    """Weight decay (default: the optimizer's)."""

    def over(self, optimizer: UpdateRule) -> AdamWRule:
        """Return this rule, with unset values taken from `optimizer`."""
        values = self.model_dump(exclude_none=True)
        return AdamWRule(**{"lr": optimizer.lr, "weight_decay": optimizer.weight_decay} | values)


class Muon(OptimizerConfig):
    """Orthogonal updates of matrices, with AdamW for other parameters."""

    by_role: ClassVar[bool] = True
    multiplies_matrices: ClassVar[bool] = True
    needs_all_gradients: ClassVar[str] = (
        "Muon assigns matrices to ranks when all gradients are complete; during the backward, all "
        "ranks but one would wait for each matrix"
    )

    name: Literal["Muon"] = "Muon"
    """Name of the optimizer."""
    roles: tuple[str, ...] = Field(("matrix", EXPERT), min_length=1)
    """Roles of the parameters that Muon updates: matrices, or stacks of matrices with three dims.
    AdamW updates the rest. A dense model has no parameters of the role expert."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay of the running gradient."""
    nesterov: bool = True
    """Nesterov's momentum: look a step ahead (needs momentum > 0)."""
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of a matrix's learning rate: 0.2 sqrt(max(rows, columns)), for rates like AdamW's; or
    sqrt(max(1, rows / columns)), for rates of about 0.02."""
    ns_steps: int = Field(5, ge=1, lt=100)
    """Newton-Schulz iterations per update."""
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the iterations and of sent matrices; with bfloat16, layouts differ by rounding."""
    whole_mib: int = Field(64, ge=0)
    """MiB of unsharded matrices of one shape that a rank updates at once; a larger matrix is
    updated alone; 0: each matrix alone. The rank receives and sends as many MiB meanwhile."""
    by_head: bool = False
    """Treat each attention head as a separate matrix: rows of queries, keys and values, columns of
    the output."""
    adamw: AdamWPart = AdamWPart()
    """For parameters other than matrices."""
    groups: tuple[MuonGroup, ...] = ()
    """Settings that differ for some parameters."""

    def rule_for(self, parameter: NamedParameter) -> UpdateRule:
        return self if parameter.role in self.roles else self.adamw.over(self)

    def options(self) -> dict[str, Any]:
        return super().options() | {"momentum": self.momentum}

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        return without_compiler(
            MuonOptimizer,
            [group.options() for group in groups],
            config=self,
            parameters=[parameter for group in groups for parameter in group.parameters],
        )

    def allocate(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}

    def prepare(self, optimizer: torch.optim.Optimizer, compiled: Compiled | None) -> None:
        assert isinstance(optimizer, MuonOptimizer)
        if compiled is not None:
            optimizer.iterate = _for_any_shape(compiled(newton_schulz))
        how = "compiled" if compiled else "not compiled, as [compile] is off"
        logger.info("%s; Newton-Schulz in %s is %s", optimizer.exchange, self.ns_dtype, how)

    @property
    def rounds_state(self) -> bool:
        return self.adamw.rounds_state

    @property
    def rounded_by(self) -> tuple[str, ...]:
        return ("adamw.state_dtype",) if self.rounds_state else ()

    @property
    def is_compiled(self) -> bool:
        return self.adamw.is_compiled

    def state_names(self) -> frozenset[str]:
        return frozenset({"momentum_buffer"})

    def state_bytes(self, parameter_bytes: int) -> float:
        return parameter_bytes

    def parameter_problems(self, parameters: Sequence[NamedParameter]) -> Iterator[Problem]:
        known = list(dict.fromkeys(parameter.role for parameter in parameters))
        for role in self.roles:
            if role not in (*known, EXPERT):
                message = f"no parameter has the role {shorten(role)}; {allowed_names(role, known)}"
                yield Problem("roles", message)
        if self.by_head and not any(p.heads for p in parameters if p.role in self.roles):
            message = f"no parameter of {show(list(self.roles))} has heads; use false"
            yield Problem("by_head", message, ("roles",))
        if self.by_head and any(p.growth != (1.0, 1.0) for p in parameters):
            message = "no rule of rates by width is published for single heads; use false"
            yield Problem("by_head", message)
        flat = [p for p in parameters if p.role in self.roles and len(p.shape) not in (2, 3)]
        if flat:
            other = [role for role in self.roles if role not in {p.role for p in flat}]
            message = (
                f"Muon updates matrices, of 2 or 3 dims; {flat[0].name}, which is of the role "
                f"{flat[0].role}, has {len(flat[0].shape)}"
                + (f", as have {len(flat) - 1} others" if len(flat) > 1 else "")
                + (f"; use {show(other)}" if other else "; use another self.name")
            )
            yield Problem("roles", message, ("name",))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which momentum and updates are sent."""
        dtype: torch.dtype = getattr(torch, self.ns_dtype)
        return dtype

    @property
    def limit(self) -> int:
        """Maximum elements of whole matrices of one shape on a rank."""
        return self.whole_mib * MIB // self.dtype.itemsize

    def matrices(self, parameter: NamedParameter) -> list[Area]:
        """Return the areas of a parameter that are orthogonalized separately."""
        *_, rows, columns = map(range, parameter.shape)
        if len(parameter.shape) == 3:
            return [Area(rows, columns, range(e, e + 1)) for e in range(parameter.shape[0])]
        if not self.by_head or parameter.heads is None:
            return [Area(rows, columns)]
        dim, count = parameter.heads
        if dim == 0:
            return [Area(part, columns) for part in _equal_parts(rows, count)]
        return [Area(rows, part) for part in _equal_parts(columns, count)]

    def factor(self, rows: float, columns: float) -> float:
        """Return the multiplier of the learning rate for a matrix."""
        if self.scale == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))

    def width_factor(self, parameter: NamedParameter) -> float:
        """The spectral norm of an update grows as sqrt(outputs / inputs) (Yang et al., 2023,
        arXiv:2310.17813, condition 1)."""
        inputs, outputs = parameter.growth
        *_, rows, columns = parameter.shape
        wanted = math.sqrt(outputs / inputs) * self.factor(rows / outputs, columns / inputs)
        return wanted / self.factor(rows, columns)

    def cost(self, rows: int, columns: int) -> float:
        """Return the floating-point operations of an update."""
        short, long = sorted((rows, columns))
        return self.ns_steps * (4.0 * short * short * long + 2.0 * short**3)

    def problems(self, context: Context) -> Iterator[Problem]:
        yield from super().problems(context)
        if self.nesterov and not self.momentum:
            yield Problem("nesterov", "it needs self.momentum > 0; use false", ("momentum",))


class MuonOptimizer(torch.optim.Optimizer):
    """Muon over matrices, with any placement on a mesh."""

    def __init__(
        self, groups: list[dict[str, Any]], config: Muon, parameters: Sequence[NamedParameter]
    ) -> None:
        super().__init__(groups, {})
        self.config = config
        self.iterate: Callable[[Tensor, int], Tensor] = newton_schulz
        self.factors = {p.tensor: config.factor(*config.matrices(p)[0].shape) for p in parameters}
        self.exchange = Exchange(parameters, config.matrices, config.cost, limit=config.limit)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        updates = {
            parameter: update
            for group in self.param_groups
            for parameter, update in self._momentum(group).items()
        }
        self.exchange.apply([*updates.values()], self._orthogonalize)
        for group in self.param_groups:
            lr, decay = group["lr"], group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    weight = local(parameter)
                    weight.mul_(1 - lr * decay)
                    weight.add_(updates[parameter], alpha=-lr * self.factors[parameter])

    def _momentum(self, group: dict[str, Any]) -> dict[Tensor, Tensor]:
        """Return this rank's part of the momentum to orthogonalize; zeros without a gradient."""
        momentum, found = group["momentum"], {}
        for parameter in group["params"]:
            if parameter.grad is None:
                found[parameter] = torch.zeros_like(local(parameter), dtype=self.config.dtype)
                continue
            state, gradient = self.state[parameter], local(parameter.grad)
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffer = local(state["momentum_buffer"])
            buffer.lerp_(gradient, 1 - momentum)
            ahead = gradient.lerp(buffer, momentum) if self.config.nesterov else buffer.clone()
            found[parameter] = ahead.to(self.config.dtype)
        return found

    def _orthogonalize(self, matrices: Tensor) -> Tensor:
        return self.iterate(matrices, self.config.ns_steps)


def _equal_parts(whole: range, count: int) -> list[range]:
    size = len(whole) // count
    return [whole[begin : begin + size] for begin in whole[::size]]


def _for_any_shape(function: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """Compile a function of matrices, once for each shape."""

    def call(matrices: Tensor, steps: int) -> Tensor:
        with any_number_of_shapes():
            return function(matrices, steps)

    return call


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """Orthogonalize `matrices` (number, rows, columns) approximately: singular values near 1.

    Iterates x = a x + b (x x^T) x + c (x x^T)^2 x, which maps each singular value alike.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if is_tall else matrices
    # No singular value is larger than the norm.
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        squares = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(squares, squares, squares, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
