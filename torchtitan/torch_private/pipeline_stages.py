"""Private parts of torch's pipeline schedules and stages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.utils import checkpoint


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


def recompute_once(stage: Any) -> None:
    """Recompute each checkpointed block once for the gradients of all its weights.

    A split backward asks autograd for the gradients of each linear layer's weights separately, and
    without this, each request recomputes the block.
    """
    group = getattr(checkpoint, "GraphExecGroup", nullcontext)  # not in every version of torch
    backward = stage.backward_weight_one_chunk

    def together(*args: Any, **settings: Any) -> Any:
        with group():
            return backward(*args, **settings)

    stage.backward_weight_one_chunk = together


def mark_actions(stage: Any, mark: Callable[[int, Any, int], None]) -> None:
    """Call `mark` with the stage, the kind and the microbatch at the start of each action."""

    def marked(method: str, kind: Callable[[bool], str]) -> None:
        function = getattr(stage, method)

        def run(number: int, *args: Any, **settings: Any) -> Any:
            mark(stage.stage_index, kind(settings.get("full_backward", True)), number)
            return function(number, *args, **settings)

        setattr(stage, method, run)

    marked("forward_one_chunk", lambda _: "F")
    marked("backward_one_chunk", lambda is_full: "B" if is_full else "I")
    marked("backward_weight_one_chunk", lambda _: "W")


@contextmanager
def kept_messages(before_wait: Callable[[], None]) -> Iterator[None]:
    """Keep the tensors that a schedule sends until it waits for them, as real process groups do.

    Schedules with several stages per rank wait for all of them at the end of a pass.
    """
    from torch.distributed.pipelining import schedules

    batch: Any = schedules._batch_p2p

    def keeping(operations: Any, *args: Any, **settings: Any) -> list[Any]:
        kept = [each.tensor for each in operations]
        works = batch(operations, *args, **settings)
        return [*works, SimpleNamespace(wait=before_wait, tensors=kept)] if works else works

    with mock.patch.object(schedules, "_batch_p2p", keeping):
        yield


def mark_reductions(stage: Any, mark: Callable[[Any], None], mark_end: Callable[[], None]) -> None:
    """Call `mark` with each unit of FSDP2 before its gradients are reduced at the end.

    `mark_end` is called when the default stream has waited for all of them.
    """
    from torch.distributed.fsdp import FSDPModule

    reduce_all = stage.perform_reduce_grad

    def run(*args: Any) -> None:
        with ExitStack() as patched:
            for group, module in _units(stage).items():
                reduced = partial(_after, partial(mark, module), group.post_backward)
                patched.enter_context(mock.patch.object(group, "post_backward", reduced))
            reduce_all(*args)
        if isinstance(stage.submod, FSDPModule):
            mark_end()

    stage.perform_reduce_grad = run


def set_gathered(stage: Any, gathered: bool) -> None:
    """Bring the weights of a stage to the state after a backward (gathered), or after a forward."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = TrainingState.PRE_BACKWARD if gathered else TrainingState.FORWARD
    for group in _units(stage):
        with group.use_training_state(state):
            if gathered:
                group.unshard()
                group.wait_for_unshard()
            else:
                group.reshard()


def _units(stage: Any) -> dict[Any, Any]:
    """Return the units of FSDP2 in a stage with a module of each, the first of several."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[Any, Any] = {}
    for module in stage.submod.modules():
        state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        if state and (group := state._fsdp_param_group) is not None:
            found.setdefault(group, module)
    return found


def _after(first: Callable[[], None], then: Callable[..., Any], *args: Any) -> Any:
    first()
    return then(*args)


def buffers(stage: Any) -> dict[int, list[Any]]:
    """Return the buffers in which a stage receives, by microbatch; none before its first step."""
    found: dict[int, list[Any]] = {}
    for number, messages in (*stage.args_recv_info.items(), *stage.grad_recv_info.items()):
        found.setdefault(number, []).extend(
            each.buffer for each in messages if getattr(each, "buffer", None) is not None
        )
    return found


def abridge(schedule: Any, orders: Mapping[int, Sequence[str]], microbatches: int) -> None:
    """Let a schedule run the actions of all ranks in `orders`, of few microbatches."""
    schedule._n_microbatches = microbatches
    if hasattr(schedule, "_prepare_schedule_with_comms"):
        from torch.distributed.pipelining.schedules import _Action

        schedule._prepare_schedule_with_comms(
            {rank: [_Action.from_str(each) for each in row] for rank, row in orders.items()}
        )
    else:  # one stage per rank: 1F1B has a forward for each later stage before its first backward
        schedule._num_stages = min(schedule._num_stages, schedule._stage.stage_index + 2)


def schedule_from_csv(stages: Sequence[Any], path: Path, **settings: Any) -> Any:
    """Build a pipeline schedule over `stages` that follows the order in a file."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    schedule: Any = _PipelineScheduleRuntime(stages, **settings)  # type: ignore[no-untyped-call]
    schedule._load_csv(str(path))
    return schedule


def skip_shape_inference(schedule: Any) -> None:
    """Skip torch 2.13's agreement of the stages on who knows its shapes, by values: ours all do."""
    if hasattr(schedule, "_warmup_p2p"):
        from torch.distributed.pipelining.stage import InferenceMode

        def decide(stages: list[Any], *_: Any) -> None:
            for stage in stages:
                stage._inference_mode = InferenceMode.STATIC

        schedule._warmup_p2p = decide
