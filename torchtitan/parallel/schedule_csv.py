"""Custom pipeline schedules, from CSV files.

Row r lists the actions of rank r in order; a cell is stage, kind and microbatch, such as `2F0`, or
empty. The number of stages and the rank of each follow from the file. The format is that of torch's
schedules, without communication, which follows from the rest.
"""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchtitan.config import ConfigError, local_path
from torchtitan.parallel.schedules import Orders, parse, simulate


def read(path: str | Path) -> Orders:
    """Read a schedule from a file with one row per rank.

    Raises:
        ConfigError: if it cannot be read, or a cell is not an action.
    """
    try:
        with open(local_path(str(path)), encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"it cannot be read: {error}") from None
    orders: Orders = {}
    for rank, row in enumerate(rows):
        orders[rank] = []
        for column, cell in enumerate(row):
            try:
                orders[rank] += parse(cell)
            except ConfigError as error:
                raise ConfigError(f"row {rank + 1}, column {column + 1}: {error}") from None
    return orders


def ranks(orders: Orders) -> tuple[int, ...]:
    """Return the rank of each stage of a valid schedule."""
    owner = {action.stage: rank for rank, actions in orders.items() for action in actions}
    return tuple(owner[stage] for stage in range(len(owner)))


def order_problems(orders: Orders, pp: int, microbatches: int) -> Iterator[str]:
    """Yield the reasons why `pp` ranks cannot run a schedule; only its first kind of fault."""
    if len(orders) != pp:
        yield f"it has {len(orders)} rows; wanted {pp}, one for each rank of the pipeline"
        return
    if idle := [rank for rank, actions in orders.items() if not actions]:
        yield f"rank {idle[0]} has no stage; wanted at least one for each rank"
        return
    found = list(_faults_of_stages(orders, microbatches))
    yield from found
    if not found and (stuck := simulate(orders)[1]):
        rank, action = next(iter(stuck.items()))
        yield (
            f"rank {rank} would wait forever for {action}; wanted an order in which its inputs "
            "arrive first"
        )


def _faults_of_stages(orders: Orders, microbatches: int) -> Iterator[str]:
    actions = [action for actions in orders.values() for action in actions]
    stages, numbers = {action.stage for action in actions}, {a.microbatch for a in actions}
    if stages != set(range(len(stages))):
        yield f"it has the stages {_list(stages)}; wanted all of 0 to {max(stages)}"
        return
    if numbers != set(range(microbatches)):
        yield (
            f"it has {len(numbers)} microbatches, {min(numbers)} to {max(numbers)}, but a batch "
            f"has {microbatches}; wanted 0 to {microbatches - 1}"
        )
        return
    ranks: dict[int, set[int]] = {stage: set() for stage in stages}
    kinds = {(stage, number): "" for stage in stages for number in numbers}
    for rank, (stage, kind, number) in ((r, a) for r, row in orders.items() for a in row):
        ranks[stage].add(rank)
        kinds[stage, number] += kind
    for stage, where in ranks.items():
        if len(where) > 1:
            yield f"stage {stage} is on ranks {_list(where)}; wanted it on one rank"
    for (stage, number), done in kinds.items():
        if "".join(sorted(done)) not in ("BF", "FIW"):
            yield (
                f"stage {stage} does {' '.join(done) or 'nothing'} for microbatch {number}; "
                "wanted F and either B or I and W"
            )
            return


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
