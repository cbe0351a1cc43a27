"""All parameters of a run under one optimizer, with state keyed by parameter name.

A name means the same on every layout, so state saved under any layout loads under any other,
whatever number of model parts or parameter groups held it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.optim import low_bit
from torchtitan.optim.norm import global_norm, local
from torchtitan.optim.settings import OptimizerConfig, ParameterGroup, ParameterGroups

__all__ = ["Optimizers", "local"]


class Optimizers:
    """The optimizer over every model part of this rank."""

    in_backward = False
    """Whether weights change while the backward runs, so that no step can be skipped."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        config: OptimizerConfig,
        stages: dist.ProcessGroup | None = None,
    ) -> None:
        """`stages` are the ranks that hold the other parts of the model, if there are any."""
        self.stages = stages
        self.names: dict[Tensor, str] = {
            p: name for part in parts for name, p in part.named_parameters() if p.requires_grad
        }
        self.optimizers = self._build(config, _groups(parts, self.names, config))
        self.peak_lr = config.lr

    def _build(
        self, config: OptimizerConfig, groups: ParameterGroups
    ) -> list[torch.optim.Optimizer]:
        """One optimizer of all parameters, or several of some each."""
        return [config.build(groups)]

    def begin(self, factor: float) -> float:
        """Prepare a step: set rates to `factor` times their peaks and drop the gradients.

        Returns:
            The learning rate of the step.
        """
        self.zero_grad()
        return self.set_lr_factor(factor)

    def set_lr_factor(self, factor: float) -> float:
        """Set the learning rate to `factor` times its peak and return it."""
        self._set_lr(self.peak_lr * factor)
        return self.peak_lr * factor

    def _set_lr(self, rate: float) -> None:
        for group in self._groups():
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # compiled code would take another number for a constant
            else:
                group["lr"] = rate

    def _groups(self) -> ParameterGroups:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.names:
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """What this rank holds of the gradients, to be changed in place."""
        return [local(p.grad) for p in self.names if p.grad is not None]

    def clip(
        self, max_norm: float, agree: Callable[[Tensor], Tensor] = lambda norm: norm
    ) -> Tensor:
        """Scale the gradients so that their global 2-norm is at most `max_norm` (0: no limit).

        Args:
            max_norm: the limit.
            agree: from the norm of these ranks to that of all who take this step.

        Returns:
            The global norm before clipping, a plain 0-d tensor that is the same on every rank.
        """
        gradients = [p.grad for p in self.names if p.grad is not None]
        norm = agree(global_norm(gradients, self.stages))
        if max_norm > 0:
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(self.gradients(), scale)
        return norm

    def step(self) -> None:
        """Update the parameters."""
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Tensor]:
        """`{"<parameter>.<state>": tensor}`, to save, or to load into.

        The tensors are the live ones, but for those that are stored in few bits. After loading,
        `load_state_dict` is to be called.
        """
        if not any(optimizer.state for optimizer in self.optimizers):
            self._allocate()
        return {name: low_bit.values(state) for name, state in self.states()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave, after it was loaded into; weights may be others too."""
        for name, state in self.states():
            if name in tensors:
                low_bit.fill(state, tensors[name])

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """`<parameter>.<state>` and the live tensor of each, as it is stored."""
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        yield f"{self._name(parameter)}.{key}", value

    def _name(self, updated: Tensor) -> str:
        """Of what the optimizer updates."""
        return self.names[updated]

    def _allocate(self) -> None:
        """Have the optimizer make its state, by a step that cannot move a weight."""
        rates = [group["lr"] for group in self._groups()]
        for group in self._groups():
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        # Where nothing is loaded into it, the first update must find what it would have found.
        for _, state in self.states():
            state.zero_()
        for group, rate in zip(self._groups(), rates, strict=True):
            group["lr"] = rate


def _groups(
    parts: Sequence[nn.Module], parameters: Iterable[Tensor], config: OptimizerConfig
) -> ParameterGroups:
    """The parameters that are treated alike, together."""
    modules = [module for part in parts for module in part.modules()]
    embeddings = {m.weight for m in modules if isinstance(m, nn.Embedding)}
    groups: dict[tuple[bool, bool], ParameterGroup] = {}
    for parameter in parameters:
        is_embedding = parameter in embeddings
        is_free = ("norms" in config.no_weight_decay_on and parameter.ndim == 1) or (
            "embeddings" in config.no_weight_decay_on and is_embedding
        )
        decay = 0.0 if is_free else config.weight_decay
        alike = {"params": [], "weight_decay": decay, "is_embedding": is_embedding}
        groups.setdefault((is_free, is_embedding), alike)["params"].append(parameter)
    return list(groups.values())
