"""Assignment of update rules and their settings to parameters, and the torch optimizers for it."""

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchtitan.config import Problem, allowed_names, shorten
from torchtitan.device import Device
from torchtitan.optim.parameters import NamedParameter, in_layers
from torchtitan.optim.settings import OptimizerConfig, ParameterGroup, UpdateRule


class Assignment(NamedTuple):
    """Update rule of one parameter."""

    parameter: NamedParameter
    chosen: UpdateRule
    """Rule for parameters of its role."""
    rule: UpdateRule
    """The same rule with the settings for this parameter."""
    group: int | None
    """Index of the recipe's group it is in, if any."""


def assign(parameters: Iterable[NamedParameter], config: OptimizerConfig) -> list[Assignment]:
    """Return the update rule of each parameter; equal rules are one object."""
    rules: list[UpdateRule] = []

    def known(rule: UpdateRule) -> UpdateRule:
        equal = next((other for other in rules if other == rule), None)
        if equal is None:
            rules.append(rule)
        return equal or rule

    found = []
    for parameter in parameters:
        chosen = known(config.rule_for(parameter))
        number = next((n for n, each in enumerate(config.groups) if each.matches(parameter)), None)
        changes: dict[str, Any] = {}
        if ("norms" in config.no_weight_decay_on and parameter.tensor.ndim == 1) or (
            "embeddings" in config.no_weight_decay_on and parameter.role == "embedding"
        ):
            changes = {"weight_decay": 0.0}
        if number is not None:
            group = config.groups[number]
            changes |= {**group.changes(), "lr": chosen.lr * group.lr_factor}
        rule = chosen.model_copy(update=changes)
        if parameter.growth != (1.0, 1.0) and (factor := rule.width_factor(parameter)):
            # A step of decay is their product, which does not depend on the width.
            decay = rule.weight_decay / factor
            rule = rule.model_copy(update={"lr": rule.lr * factor, "weight_decay": decay})
        found.append(Assignment(parameter, chosen, known(rule), number))
    return found


def build_all(
    assignments: Sequence[Assignment], stages: dist.ProcessGroup | None = None
) -> dict[torch.optim.Optimizer, UpdateRule]:
    """Build a torch optimizer for each rule with parameters; for `stages` see `ParameterGroup`."""
    chosen = {id(a.chosen): a.chosen for a in assignments}.values()
    return {
        rule.build(groups_of([a for a in assignments if a.chosen is rule], stages)): rule
        for rule in chosen
    }


def groups_of(
    assignments: Sequence[Assignment], stages: dist.ProcessGroup | None = None
) -> list[ParameterGroup]:
    """Group the parameters that are updated alike."""
    rules = {id(a.rule): a.rule for a in assignments}.values()
    return [
        ParameterGroup(tuple(a.parameter for a in assignments if a.rule is rule), rule, stages)
        for rule in rules
    ]


def describe_groups(
    config: OptimizerConfig,
    assignments: Sequence[Assignment],
    stages: dist.ProcessGroup,
    device: Device,
) -> Iterator[str]:
    """Describe each of the recipe's groups, over all stages of the model."""
    counts = torch.zeros(len(config.groups), 2, dtype=torch.int64)
    for parameter, _, _, number in assignments:
        if number is not None:
            counts[number] += torch.tensor([1, parameter.tensor.numel()])
    counts = counts.to(device.torch_device)
    dist.all_reduce(counts, group=stages)
    for number, (group, (tensors, elements)) in enumerate(
        zip(config.groups, counts.tolist(), strict=True)
    ):
        named = {"roles": group.roles, "names": group.names}
        selectors = [f"{key} {', '.join(value)}" for key, value in named.items() if value]
        other = {"lr_factor": group.lr_factor, **group.changes()}
        yield (
            f"optimizer.groups.{number}: {'; '.join(selectors)}: {tensors} tensors, {elements:,} "
            f"parameters, with {', '.join(f'{key} {value:g}' for key, value in other.items())}"
        )


def describe_rules(config: OptimizerConfig, parameters: Sequence[NamedParameter]) -> Iterator[str]:
    """Describe the rule of each role, unless one rule updates all."""
    if not config.by_role:
        return
    found: dict[str, dict[str, list[int]]] = {}
    for parameter in parameters:
        roles = found.setdefault(config.rule_for(parameter).title, {})
        roles.setdefault(parameter.role, []).append(parameter.tensor.numel())
    for title, roles in found.items():
        counts = (f"{role} ({len(n)} tensors, {sum(n):,} parameters)" for role, n in roles.items())
        yield f"{title} updates {', '.join(counts)}"
    yield from config.summary(parameters)


def state_bytes(
    config: OptimizerConfig, parameters: Iterable[NamedParameter], itemsize: int
) -> float:
    """Return a lower bound on the bytes of optimizer state; elements have `itemsize` bytes."""
    assigned = assign(parameters, config)
    return sum(one.rule.bytes_of(one.parameter.shape, itemsize) for one in assigned)


def group_problems(
    config: OptimizerConfig, parameters: Sequence[NamedParameter]
) -> Iterator[Problem]:
    """Find problems in the groups of a section, given all parameters of the model."""
    assignments = assign(parameters, config)
    roles = list(dict.fromkeys(parameter.role for parameter in parameters))
    names = [parameter.name for parameter in parameters]
    patterns = list(dict.fromkeys(map(in_layers, names)))
    for number, group in enumerate(config.groups):
        key, found = f"groups.{number}", [a for a in assignments if a.group == number]
        lost_roles = [role for role in group.roles if role not in roles]
        lost_names = [name for name in group.names if not fnmatch.filter(names, name)]
        for role in lost_roles:
            message = f"no parameter has the role {shorten(role)}; {allowed_names(role, roles)}"
            yield Problem(f"{key}.roles", message)
        for name in lost_names:
            message = f"no parameter matches {shorten(name)}; {allowed_names(name, patterns)}"
            yield Problem(f"{key}.names", message)
        if not group.roles and not group.names:
            yield Problem(key, "it selects no parameters; wanted roles, names or both")
        elif not found and not lost_roles and not lost_names:
            is_taken = any(group.matches(parameter) for parameter in parameters)
            why = "all that match are in earlier groups"
            why = why if is_taken else "none matches both roles and names"
            yield Problem(key, f"no parameter is left for it: {why}")
        for name in group.changes():
            without = [a.parameter for a in found if name not in type(a.chosen).model_fields]
            if without:
                which = f"{without[0].name}, which is of the role {without[0].role},"
                yield Problem(f"{key}.{name}", f"the update rule of {which} has no {name}")
