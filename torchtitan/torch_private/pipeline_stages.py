"""Private parts of torch's pipeline schedules and stages."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def pipeline_order(name: str, stages: int, pp: int, microbatches: int) -> dict[int, list[str]]:
    """Return each rank's actions in a pipeline schedule with several stages per rank, as CSV cells.

    The constructors compute the orders of all ranks, and need little more of a stage than its
    number, so a stand-in without a process group suffices.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    stage = SimpleNamespace(group_rank=0, group_size=pp, num_stages=stages, submod=None)
    schedule = get_schedule_class(name)([stage] * (stages // pp), microbatches)
    return {
        rank: [str(action) for action in actions if action is not None]
        for rank, actions in schedule.pipeline_order.items()
    }


def skip_p2p_warmup(stage: Any) -> None:
    """Skip torch 2.11's point-to-point warm-up with a stage's neighbours, absent in later versions.

    It creates communicators. If a neighbour is on the same rank, gloo cannot send to itself.
    """
    stage._get_init_p2p_neighbors_ops = list


def time_stage(stage: Any, phase: Callable[[str], AbstractContextManager[None]]) -> None:
    """Enter `phase` around each forward and backward of a microbatch in a stage."""
    names = {
        "forward_one_chunk": "forward",
        "backward_one_chunk": "backward",
        "backward_weight_one_chunk": "backward",
    }
    for method, name in names.items():
        setattr(stage, method, _inside(getattr(stage, method), phase, name))


def _inside(
    function: Callable[..., Any], phase: Callable[[str], AbstractContextManager[None]], name: str
) -> Callable[..., Any]:
    def timed(*args: Any, **settings: Any) -> Any:
        with phase(name):
            return function(*args, **settings)

    return timed


def schedule_from_csv(stages: Sequence[Any], path: Path, **settings: Any) -> Any:
    """Build a pipeline schedule over `stages` that follows the order in a file."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    schedule: Any = _PipelineScheduleRuntime(stages, **settings)  # type: ignore[no-untyped-call]
    schedule._load_csv(str(path))
    return schedule
