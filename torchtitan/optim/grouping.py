"""Which parameter is updated by which rule, with which numbers; and torch optimizers of that."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from torchtitan.optim.parameters import NamedParameter
from torchtitan.optim.settings import OptimizerConfig, ParameterGroup, UpdateRule


class Assignment(NamedTuple):
    """How one parameter is updated."""

    parameter: NamedParameter
    chosen: UpdateRule
    """What updates parameters of its role."""
    rule: UpdateRule
    """The same, with the numbers that hold for this one."""


def assign(parameters: Iterable[NamedParameter], config: OptimizerConfig) -> list[Assignment]:
    """How each parameter is updated; what is equal is one object."""
    rules: list[UpdateRule] = []

    def known(rule: UpdateRule) -> UpdateRule:
        equal = next((other for other in rules if other == rule), None)
        if equal is None:
            rules.append(rule)
        return equal or rule

    found = []
    for parameter in parameters:
        chosen = known(config.rule_for(parameter))
        is_free = ("norms" in config.no_weight_decay_on and parameter.tensor.ndim == 1) or (
            "embeddings" in config.no_weight_decay_on and parameter.role == "embedding"
        )
        changes = {"weight_decay": 0.0} if is_free else {}
        found.append(Assignment(parameter, chosen, known(chosen.model_copy(update=changes))))
    return found


def build_all(assignments: Sequence[Assignment]) -> dict[torch.optim.Optimizer, UpdateRule]:
    """A torch optimizer for each rule that has parameters."""
    chosen = {id(a.chosen): a.chosen for a in assignments}.values()
    return {
        rule.build(groups_of([a for a in assignments if a.chosen is rule])): rule for rule in chosen
    }


def groups_of(assignments: Sequence[Assignment]) -> list[ParameterGroup]:
    """Parameters that are updated alike, together."""
    rules = {id(a.rule): a.rule for a in assignments}.values()
    return [
        ParameterGroup(tuple(a.parameter for a in assignments if a.rule is rule), rule)
        for rule in rules
    ]
