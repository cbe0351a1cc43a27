"""Chooses which of a step's repeated work is recorded, and what each recorded piece stands for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from torchtitan.job import JobConfig
from torchtitan.parallel.schedules import Action, Orders


def block_kinds(job: JobConfig, blocks: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return a number for each block of a whole model, equal for blocks that do the same work.

    Blocks differ in the parameters and the settings of their modules, such as the window of
    attention, in what a recipe chooses by name, and in whether they are recomputed.
    """
    filters = [f"*{part}*" for each in job.convert for part in getattr(each, "filter_fqns", ())]
    patterns = [*filters, *(name for group in job.optimizer.groups for name in group.names)]
    every = max(1, job.activation_checkpoint.every)
    seen: list[Any] = []
    found = {}
    for index, (name, block) in enumerate(blocks.items()):
        inside = [*block.named_modules(prefix=name), *block.named_parameters(prefix=name)]
        chosen = [[fnmatchcase(inner, pattern) for pattern in patterns] for inner, _ in inside]
        kind = index % every, [_settings(module) for module in block.modules()], chosen
        if kind not in seen:
            seen.append(kind)
        found[name] = seen.index(kind)
    return found


_OF_ALL_MODULES = frozenset(vars(nn.Module()))


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Return the class, parameters, buffers and other attributes of a module without its parts."""
    own = {key: each for key, each in vars(module).items() if key not in _OF_ALL_MODULES}
    tensors = {**module._parameters, **module._buffers}
    tensors |= {key: own.pop(key) for key, each in [*own.items()] if isinstance(each, Tensor)}
    sizes = {
        key: each if each is None else (each.shape, each.dtype) for key, each in tensors.items()
    }
    return type(module), [*module._modules], sizes, own


@dataclass(frozen=True)
class Shortened:
    """Blocks of a kind in a stage that are recorded, and one that stands for those that are not.

    Blocks repeat with a period. The periods of the first two blocks and of the last two are kept,
    and one period between, which is repeated `times`.
    """

    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    sample: tuple[str, ...] = ()
    times: int = 1

    @classmethod
    def of_stage(cls, blocks: Sequence[str], kinds: Mapping[str, int]) -> "list[Shortened]":
        """Choose among the consecutive `blocks` of a stage, which may be of several `kinds`."""
        found, start = [], 0
        while start < len(blocks):
            best = cls((blocks[start],), ())
            for period in range(1, len(blocks) - start):
                end = start + period
                while end < len(blocks) and kinds[blocks[end]] == kinds[blocks[end - period]]:
                    end += 1
                of_period = cls.of(blocks[start:end], period)
                best = max(best, of_period, key=lambda each: len(each.dropped))
            found.append(best)
            start += len(best.kept) + len(best.dropped)
        return found

    @classmethod
    def of(cls, blocks: Sequence[str], period: int) -> "Shortened":
        """Choose among `blocks` that repeat with a period."""
        ends = 2 if period == 1 else 1
        rest = len(blocks) - (2 * ends + 1) * period
        if rest < period:
            return cls(tuple(blocks), ())
        first, dropped = (ends + 1) * period, rest // period * period
        kept = (*blocks[:first], *blocks[first + dropped :])
        sample = tuple(blocks[first - period : first])
        return cls(kept, tuple(blocks[first : first + dropped]), sample, 1 + dropped // period)


@dataclass(frozen=True)
class Abridged:
    """Actions of a pipeline that are recorded, of a few microbatches.

    A stage's first and last microbatch are recorded, since they allocate and reduce gradients, and
    one between for each way of doing its backward and each state of the weights before its actions.
    Schedules stay valid if all actions of other microbatches are left out.
    """

    orders: Orders
    """Recorded actions of all ranks."""
    actions: Sequence[Action]
    """Actions of this rank in a whole pass."""
    recorded: Mapping[Action, Action]
    """Recorded action for each of them."""
    microbatches: int
    gathered: Mapping[Action, bool]
    """Whether the weights are gathered before a recorded action, if others may be before it."""

    @classmethod
    def of(cls, orders: Orders, rank: int, shorten: bool, reshards: bool = False) -> "Abridged":
        """Choose among the microbatches of a pipeline of which this process has `rank`.

        Args:
            reshards: whether a forward frees the weights that it has gathered.
        """
        actions = orders[rank]
        gathered = _gathered(actions) if reshards else {}
        numbers = {action.microbatch for action in actions}
        sample = {(a.stage, a.microbatch): a.microbatch for a in actions}
        if shorten:
            sample = dict(_samples(actions, gathered))
        label = {number: index for index, number in enumerate(sorted({*sample.values()}))}
        if len(label) > len(numbers) // 2 + 1:
            label = {number: number for number in numbers}
            sample = {key: key[1] for key in sample}
        kept = {
            each: [a._replace(microbatch=label[a.microbatch]) for a in row if a.microbatch in label]
            for each, row in orders.items()
        }
        recorded = {a: a._replace(microbatch=label[sample[a.stage, a.microbatch]]) for a in actions}
        states = {recorded[action]: state for action, state in gathered.items()}
        return cls(kept, actions, recorded, len(label), states)

    def times(self, number: int, stage: int) -> int:
        """Return the number of microbatches that a recorded one stands for in a stage."""
        found = self.recorded.items()
        own = [each for action, each in found if action.kind == "F" and action.stage == stage]
        return sum(each.microbatch == number for each in own)


def _gathered(actions: Sequence[Action]) -> dict[Action, bool]:
    """Return whether weights are gathered before each action, but the first of a stage.

    Forwards free them, and backwards do not; a second half of a backward does not use them.
    """
    found, now = {}, dict[int, bool]()
    for action in actions:
        if action.stage in now:
            found[action] = now[action.stage]
        if action.kind != "W":
            now[action.stage] = action.kind != "F"
    return found


def _samples(
    actions: Sequence[Action], gathered: Mapping[Action, bool]
) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the recorded microbatch of each (stage, microbatch)."""
    for stage in {action.stage for action in actions}:
        own = [action for action in actions if action.stage == stage]
        forwards = [a.microbatch for a in own if a.kind == "F"]
        done = [a.microbatch for a in own if a.kind in "BW"]
        halves = {a.microbatch for a in own if a.kind == "W"}
        ends = (forwards[0], forwards[-1], done[0], done[-1])
        alike: dict[tuple[object, ...], list[int]] = {}
        for number in forwards:
            states = tuple(gathered.get(each) for each in own if each.microbatch == number)
            key = (number in halves, *(number == end for end in ends), states)
            alike.setdefault(key, []).append(number)
        for each in alike.values():
            yield from (((stage, number), each[len(each) // 2]) for number in each)
