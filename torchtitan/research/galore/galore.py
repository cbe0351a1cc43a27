"""GaLore (Zhao et al., 2024, arXiv:2403.03507; GaLore 2, 2025, arXiv:2504.20437): Adam's moments of
a low-rank projection of the gradient.

Every `refresh_period` steps each hidden matrix takes a new basis from the leading singular vectors
of its gradient (`low_rank`). In every step its gradient is projected to that basis, Adam computes
moments and an update of the projection, and the update is projected back. All other parameters are
updated by AdamW with the same settings.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Size, Tensor

from torchtitan.config import Context, KeyOf, Problem
from torchtitan.optim.adam_and_sgd import STATE_DTYPES, AdamGroup, AdamWRule, MomentStorage
from torchtitan.optim.grouping import assign
from torchtitan.optim.parameters import NamedParameter, in_layers, local
from torchtitan.optim.settings import OptimizerConfig, ParameterGroup, UpdateRule
from torchtitan.research.galore.low_rank import Method, Projection, find_bases
from torchtitan.torch_private.compiler import any_number_of_shapes


class GaLoreGroup(AdamGroup):
    """Settings of GaLore and its AdamW that differ for some parameters; the first match applies."""

    rank: int | None = Field(None, ge=1)
    """Rank of the projection (default: the optimizer's)."""
    scale: float | None = Field(None, gt=0)
    """Factor of the updates of projected matrices (default: the optimizer's)."""


class GaLore(AdamWRule, OptimizerConfig):
    """AdamW with low-rank moments of hidden matrices."""

    by_role: ClassVar[bool] = True

    name: Literal["GaLore"] = "GaLore"
    """Name of the optimizer."""
    lr: float = Field(5e-3, gt=0)
    """Peak learning rate."""
    eps: float = Field(1e-6, gt=0)
    """Term added to the root of the second moment."""
    rank: int | None = Field(None, ge=1)
    """Rank of the projection, at most the smaller side of a matrix (default: a quarter of it)."""
    refresh_period: int = Field(200, ge=1)
    """Steps between refreshes of the bases from the gradients."""
    scale: float = Field(0.25, gt=0)
    """Factor of the updates of projected matrices."""
    project: Literal["shorter", "longer", "rows", "columns"] = "shorter"
    """Side of a matrix that is projected to the rank: the shorter (the columns, if both are equal),
    the longer, its rows or its columns. The moments keep the other side."""
    basis_dtype: Annotated[str, KeyOf(STATE_DTYPES)] = "parameter"
    """Format of the bases: that of the parameters, at least float32, or a lower precision, in which
    gradients are then projected in their own dtype. A run may resume with another."""
    svd: Literal["randomized", "exact"] = "randomized"
    """Method of computing the singular vectors of a gradient."""
    svd_dtype: Literal["float64", "float32"] = "float64"
    """With svd = randomized: dtype of the products with the gradient. Layouts find the same vectors
    in float64; float32 is faster where float64 is slow, and takes half the memory."""
    power_iterations: int = Field(2, ge=0)
    """With svd = randomized: number of power iterations, which separate close singular values."""
    oversampling: int = Field(8, ge=0)
    """With svd = randomized: number of columns in addition to the rank."""
    moments: Literal["keep", "rotate"] = "keep"
    """Treatment of the moments at a refresh: kept unchanged, as published, or rotated from the old
    basis to the new one."""
    groups: tuple[GaLoreGroup, ...] = ()
    """Settings that differ for some parameters."""

    def rule_for(self, parameter: NamedParameter) -> UpdateRule:
        if parameter.role == "matrix":
            return self
        return AdamWRule.model_validate(self.model_dump(include=set(AdamWRule.model_fields)))

    def width_factor(self, parameter: NamedParameter) -> None:
        return None

    def options(self) -> dict[str, Any]:
        return super().options() | {"scale": self.scale}

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        return LowRankAdamW(groups, self)

    def state_names(self) -> frozenset[str]:
        return super().state_names() | {"projector"}

    def rank_of(self, shape: Sequence[int]) -> int:
        """Return the rank of a matrix's projection."""
        return self.rank or max(min(shape) // 4, 1)

    def projected_dim(self, shape: Sequence[int]) -> int:
        """Return the dim of a matrix that is projected: 1, its columns, or 0, its rows."""
        rows, columns = shape
        if self.project in ("rows", "columns"):
            return int(self.project == "columns")
        return int((columns <= rows) == (self.project == "shorter"))

    def bytes_of(self, shape: Size, parameter_bytes: int, rows: int = 1, columns: int = 1) -> float:
        projected = self.projected_dim(shape)
        found = state_elements(shape, self.rank_of(shape), projected)
        of_moments = found.moments / 2 * self.state_bytes(parameter_bytes) / (rows * columns)
        of_projector = found.projector / 2 * self.basis_storage.state_bytes(max(parameter_bytes, 4))
        return of_moments + of_projector / (columns if projected else rows)

    def method(self) -> Method:
        """Method by which bases are computed."""
        dtype = getattr(torch, self.svd_dtype)
        return Method(self.svd == "exact", self.power_iterations, self.oversampling, dtype)

    @property
    def basis_storage(self) -> MomentStorage:
        """Storage of the bases."""
        return STATE_DTYPES[self.basis_dtype]

    def unplanned(self) -> Iterator[str]:
        dtype = "float64" if self.svd == "exact" else self.svd_dtype
        yield (
            f"refresh_period: the time of new bases every {self.refresh_period:,} steps is left "
            f"out, and so are copies of a gradient in {dtype} for them"
        )

    @property
    def rounded_by(self) -> tuple[str, ...]:
        keys = {"state_dtype": self.storage, "basis_dtype": self.basis_storage}
        return tuple(key for key, storage in keys.items() if storage.rounds)

    @property
    def state_storage(self) -> MomentStorage:
        # Few bits of one format read all.
        return self.storage if self.storage.rounds else self.basis_storage

    def problems(self, context: Context) -> Iterator[Problem]:
        yield from super().problems(context)
        for key in ("power_iterations", "oversampling", "svd_dtype"):
            if self.svd == "exact" and getattr(self, key) != type(self).model_fields[key].default:
                message = 'it only has an effect with self.svd = "randomized"; remove it'
                yield Problem(key, message, ("svd",))
        if self.moments == "rotate" and not (self.beta1 or self.beta2):
            message = (
                'with self.beta1 = 0 and self.beta2 = 0 there are no moments to rotate; use "keep"'
            )
            yield Problem("moments", message, ("beta1", "beta2"))

    def parameter_problems(self, parameters: Sequence[NamedParameter]) -> Iterator[Problem]:
        too_high: dict[str, dict[str, Size]] = {}
        projected = [a for a in assign(parameters, self) if a.chosen is self]
        flat = [a for a in projected if len(a.parameter.shape) == 2]
        if others := {in_layers(a.parameter.name): None for a in projected if a not in flat}:
            message = (
                f"only matrices of two dims are projected, and {', '.join(others)} have others"
            )
            yield Problem("name", message)
        for parameter, _, rule, group in flat:
            assert isinstance(rule, GaLore)
            if rule.rank and rule.rank > min(parameter.shape):
                is_of_group = group is not None and self.groups[group].rank is not None
                key = f"groups.{group}.rank" if is_of_group else "rank"
                too_high.setdefault(key, {})[in_layers(parameter.name)] = parameter.shape
        for key, shapes in too_high.items():
            which = ", ".join(f"{name} ({m} x {n})" for name, (m, n) in shapes.items())
            least = min(min(shape) for shape in shapes.values())
            yield Problem(key, f"it is above the smaller side of {which}; use at most {least}")

    def summary(self, parameters: Sequence[NamedParameter]) -> Iterator[str]:
        kinds: Counter[tuple[int, int, int, int]] = Counter()
        numbers = whole = 0
        for one in assign(parameters, self):
            rule, shape = one.rule, one.parameter.shape
            if isinstance(rule, GaLore):
                rank, dim = rule.rank_of(shape), rule.projected_dim(shape)
                kinds[shape[0], shape[1], rank, dim] += 1
                numbers += sum(state_elements(shape, rank, dim))
                whole += 2 * shape.numel()
        of = [
            f"{count} of {m} x {n} by their {'columns' if dim else 'rows'} to rank {rank}"
            for (m, n, rank, dim), count in kinds.items()
        ]
        yield f"GaLore projects {kinds.total()} matrices: {'; '.join(of)}"
        yield f"their states are {numbers:,} numbers, of AdamW {whole:,}"

    def describe(self, states: Iterable[tuple[str, Tensor]]) -> str | None:
        found = list(states)
        sizes = {
            key: sum(self.size(state) for name, state in found if name.endswith(f".{key}"))
            for key in ("exp_avg", "exp_avg_sq", "projector")
        }
        moments = sizes["exp_avg"] + sizes["exp_avg_sq"]
        return (
            f"GaLore: {moments:,} bytes of moments in {self.state_dtype} and "
            f"{sizes['projector']:,} of projectors in {self.basis_dtype} on this rank"
        )


class Elements(NamedTuple):
    """Numbers of elements of a matrix's state."""

    moments: int
    """Elements of both moments."""
    projector: int


def state_elements(shape: Sequence[int], rank: int, projected: int) -> Elements:
    """Return the state's sizes for a matrix whose dim `projected` becomes `rank`."""
    return Elements(2 * rank * shape[1 - projected], rank * shape[projected])


class LowRankAdamW(torch.optim.Optimizer):
    """Low-rank AdamW, whose state is created at the start, as zeros.

    For a matrix (m, n) with projected columns, the moments are (m, rank) and the projector is
    (n, rank); with projected rows, they are (n, rank) and (m, rank).
    """

    def __init__(self, groups: Sequence[ParameterGroup], config: GaLore) -> None:
        super().__init__([group.options() for group in groups], {})
        self.config = config
        self.storage = config.storage
        self.adam = self.storage.update() or adam
        self.projections: dict[Tensor, Projection] = {}
        for group in groups:
            rule: Any = group.rule
            for parameter in group.parameters:
                rank, dim = rule.rank_of(parameter.shape), rule.projected_dim(parameter.shape)
                projection = Projection(parameter, rank, dim)
                self.projections[parameter.tensor] = projection
                self.state[parameter.tensor] = self._zeros(projection)

    def _zeros(self, projection: Projection) -> dict[str, Tensor]:
        weight = local(projection.parameter.tensor).detach()
        part = weight.new_zeros(projection.rows, projection.rank)
        moments = {
            name: projection.state(self.storage.zeros(part, signed=name == "exp_avg"))
            for name in ("exp_avg", "exp_avg_sq")
        }
        columns = projection.columns.stop - projection.columns.start
        wide = torch.promote_types(weight.dtype, torch.float32)
        like = weight.new_empty(columns, projection.rank, dtype=wide)
        basis = projection.basis(self.config.basis_storage.zeros(like, signed=True))
        return {"step": torch.tensor(0.0), **moments, "projector": basis}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        given = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        period = self.config.refresh_period
        if due := [p for p, _ in given if not int(self.state[p]["step"]) % period]:
            self._refresh(due)
        with any_number_of_shapes():
            for parameter, group in given:
                self._update(parameter, group)

    def _refresh(self, parameters: Sequence[Tensor]) -> None:
        """Compute new bases."""
        projections = [self.projections[parameter] for parameter in parameters]
        steps = [int(self.state[parameter]["step"]) for parameter in parameters]
        seeds = [f"{p.parameter.name}/{step}" for p, step in zip(projections, steps, strict=True)]
        bases = find_bases(projections, seeds, self.config.method())
        for projection, parameter, basis in zip(projections, parameters, bases, strict=True):
            state = self.state[parameter]
            old = local(state["projector"])
            if self.config.moments == "rotate" and state["step"]:
                turn = projection.turned(self._values(old).to(basis.dtype), basis)
                for name, by in (("exp_avg", turn), ("exp_avg_sq", turn.square())):
                    moment = local(state[name])
                    moment.copy_(self.storage.values(moment).to(by.dtype) @ by)
            old.copy_(basis)

    def _values(self, basis: Tensor) -> Tensor:
        return self.config.basis_storage.values(basis)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, projection = self.state[parameter], self.projections[parameter]
        gradient, basis = parameter.grad, self._values(local(state["projector"]))
        assert gradient is not None
        if self.config.basis_storage.rounds:
            basis = basis.to(gradient.dtype)
        state["step"] += 1
        low = projection.down(local(gradient), basis)
        update = torch.zeros_like(low)
        if low.numel():
            # Applied to zeros, at a learning rate of one.
            self.adam(update, low, state, group | {"lr": torch.tensor(1.0), "weight_decay": 0.0})
        weight = local(parameter).detach()
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(projection.up(update, basis), alpha=group["lr"] * group["scale"])


def adam(
    update: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]
) -> None:
    """Subtract Adam's update at a rate of one from `update`; all are plain tensors."""
    beta1, beta2 = group["betas"]
    step, first, second = int(state["step"]), local(state["exp_avg"]), local(state["exp_avg_sq"])
    first.copy_(first.to(gradient.dtype).lerp(gradient, 1 - beta1))
    second.copy_(second.to(gradient.dtype).lerp(gradient.square(), 1 - beta2))
    root = (second.to(gradient.dtype) / (1 - beta2**step)).sqrt()
    update.sub_(first.to(gradient.dtype) / (1 - beta1**step) / (root + group["eps"]))
