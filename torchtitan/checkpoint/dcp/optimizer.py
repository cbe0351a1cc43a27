"""Comparison of the optimizer of a TorchTitan run with that of the recipe that resumes it."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from torchtitan.checkpoint.dcp.torchtitan import OPTION, STATE, TorchTitanCheckpoint
from torchtitan.checkpoint.folder import TrainState
from torchtitan.config import ConfigError, RecipeError
from torchtitan.optim import OPTIMIZERS, NamedParameter, OptimizerConfig, UpdateRule
from torchtitan.optim.grouping import assign

SHOWN = 5
"""Maximum number of mismatched states in a message."""


def rules_of(checkpoint: TorchTitanCheckpoint, optimizer: OptimizerConfig) -> dict[str, UpdateRule]:
    """Return the recipe's update rule of each weight."""
    network = checkpoint.network
    parameters = [
        NamedParameter(torch.empty(shape, device="meta"), name, network.spec.role(name, len(shape)))
        for name, shape in network.parameters().items()
    ]
    return {a.parameter.name: a.rule for a in assign(parameters, optimizer)}


def check_states(checkpoint: TorchTitanCheckpoint, optimizer: OptimizerConfig) -> None:
    """Verify that a checkpoint has exactly the states that an optimizer keeps.

    Raises:
        ConfigError: if it does not.
    """
    found = checkpoint.states()
    kinds = set().union(*found.values())
    wrong = []
    for weight, rule in rules_of(checkpoint, optimizer).items():
        wanted = rule.state_names()
        if wanted is None:  # compared once they are created
            continue
        if not wanted & kinds and wanted != kinds:
            raise ConfigError(
                f"{checkpoint.path}: it holds other optimizer states ({_words(kinds)}) than "
                f"those of optimizer.name = {optimizer.name} ({_words(wanted)}); choose another "
                'optimizer, or do not load them: checkpoint.exclude_from_loading = ["optimizer"]'
            )
        there = found.get(weight, set())
        wrong += [f"missing: {STATE}{weight}.{state}" for state in sorted(wanted - there)]
        wrong += [f"unexpected: {STATE}{weight}.{state}" for state in sorted(there - wanted)]
    if wrong:
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        lines = (f"  {line}" for line in [*wrong[:SHOWN], *more])
        raise RecipeError([f"{checkpoint.path}: not the states of {optimizer.name}:", *lines])


def state_of(checkpoint: TorchTitanCheckpoint) -> dict[str, Any]:
    """Return a full checkpoint's state besides tensors, in our form, without a data position.

    Raises:
        ConfigError: if states of its optimizer or its step are missing.
    """
    weight = next(iter(checkpoint.network.parameters()))
    is_adam = checkpoint.number(f"{OPTION}{weight}.decoupled_weight_decay") is False
    name = "Adam" if is_adam else "AdamW"
    section = {"name": name, **checkpoint.options(weight)}
    check_states(checkpoint, OPTIMIZERS[name].model_validate(section))
    return {
        "train_state": asdict(TrainState()) | checkpoint.counters(),
        "recipe": {f"optimizer.{key}": value for key, value in section.items()},
    }


def changes(
    checkpoint: TorchTitanCheckpoint, optimizer: OptimizerConfig, factor: Callable[[int], float]
) -> list[str]:
    """Return the differences in how the recipe updates weights, one line each.

    Args:
        factor: fraction of the peak learning rate, by step of the schedule.
    """
    rules = rules_of(checkpoint, optimizer)
    lines = _changed_options(checkpoint, rules)
    weight, rule = next(iter(rules.items()))
    decoupled = checkpoint.number(f"{OPTION}{weight}.decoupled_weight_decay")
    if isinstance(decoupled, bool) and getattr(rule, "decoupled", decoupled) != decoupled:
        lines.append(f"optimizer.name: {'AdamW' if decoupled else 'Adam'} -> {optimizer.name}")
    counters = checkpoint.counters()
    next_step = counters["step"] + 1
    there = checkpoint.number(f"{OPTION}{weight}.lr")
    here = rule.lr * factor(next_step - counters["schedule_start"])
    if isinstance(there, float) and not math.isclose(there, here, rel_tol=1e-6):
        lines.append(f"learning rate of step {next_step}: {there:g} -> {here:g}")
    return lines


def _changed_options(
    checkpoint: TorchTitanCheckpoint, rules: Mapping[str, UpdateRule]
) -> list[str]:
    # Options are read for one layer only, since they are the same in all.
    kinds = {weight: re.sub(r"\.\d+\.", ".*.", weight) for weight in rules}
    likes = {kind: weight for weight, kind in kinds.items()}
    options = {kind: checkpoint.options(weight) for kind, weight in likes.items()}
    changed: Counter[tuple[str, float, float]] = Counter()
    for weight, rule in rules.items():
        for key, there in options[kinds[weight]].items():
            here = getattr(rule, key, there)
            if not math.isclose(there, here, rel_tol=1e-6):
                changed[key, there, here] += 1
    return [
        f"optimizer.{key}: {there:g} -> {here:g}"
        + (f" (for {count} of {len(rules)} weights)" if count < len(rules) else "")
        for (key, there, here), count in changed.items()
    ]


def _words(names: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "none"
