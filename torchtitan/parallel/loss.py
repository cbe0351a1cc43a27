"""The loss of a model, from its logits, or inside the model, a chunk of logits at a time.

FSDP gathers the output weight for the forward of the model, so a loss that computes its own logits
must run inside that forward: `apply` sets the core of the model's `LinearLoss`.
"""

from functools import partial

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.losses import LossConfig, linear_losses, squared_normalizer, summed_squares
from torchtitan.models.output import LinearLoss
from torchtitan.parallel import compile
from torchtitan.parallel.compile import CompileConfig
from torchtitan.parallel.loss_terms import AuxiliaryLosses
from torchtitan.tasks import Task
from torchtitan.tasks.task import LossFunction

Z_LOSS = "z_loss"


def of_outputs(
    task: type[Task],
    group: ProcessGroup | None,
    size: int,
    config: CompileConfig,
    auxiliary: AuxiliaryLosses,
) -> LossFunction:
    """Return the task's loss, of outputs that are whole, or split over `group` (tp) on a dim of
    `size`; the z-loss is added if `auxiliary` has one.
    """
    loss: LossFunction = task.loss if group is None else task.split_loss(group, size)
    z_loss: LossFunction = partial(squared_normalizer, group=group)
    if config.compiles("loss"):
        loss, z_loss = compile.compiled(loss, config), compile.compiled(z_loss, config)
    if Z_LOSS not in auxiliary.weights:
        return loss
    return lambda outputs, targets: auxiliary.add(
        Z_LOSS, loss(outputs, targets), lambda: z_loss(outputs, targets)
    )


def apply(
    model: nn.Module,
    config: LossConfig,
    vocabulary: int,
    mesh: DeviceMesh | None,
    *,
    sequence_parallel: bool,
    compile_config: CompileConfig,
    auxiliary: AuxiliaryLosses,
) -> None:
    """Make `model` compute its own loss when it is given targets.

    Args:
        mesh: mesh over which the output weight is split (tp), if it is.
        sequence_parallel: whether each of its ranks has a part of the sequence.
    """
    group = None if mesh is None else mesh.get_group()
    backend = compile_config.backend if compile_config.compiles("loss") else ""

    def core(x: Tensor, weight: Tensor, targets: Tensor, is_main: bool) -> Tensor:
        if mesh is not None:
            x, weight = _local(x, weight, mesh, sequence_parallel)
        chunk = config.vocabulary_chunk
        loss, lse = linear_losses(x, weight, targets, chunk, group, vocabulary, backend)
        if not is_main or Z_LOSS not in auxiliary.weights:
            return loss
        return auxiliary.add(Z_LOSS, loss, lambda: summed_squares(lse, targets))

    for module in model.modules():
        if isinstance(module, LinearLoss):
            module.core = partial(core, is_main=module.is_main)


def _local(
    x: Tensor, weight: Tensor, mesh: DeviceMesh, sequence_parallel: bool
) -> tuple[Tensor, Tensor]:
    """Return the hidden states of the whole sequence, and this rank's rows of the weight.

    Each rank computes its own rows' contribution to the gradient of the hidden states.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    assert isinstance(weight, DTensor)
    given = Shard(1) if sequence_parallel else Replicate()
    stream = DTensor.from_local(x, mesh, [given], run_check=False)
    whole = stream.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()]), weight.to_local()
