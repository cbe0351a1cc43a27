"""A model with its weights in memory, on one rank, ready for inference."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torchtitan.build import allocate
from torchtitan.checkpoint.placement import differences, load_into
from torchtitan.config import ConfigError
from torchtitan.convert import ConverterConfig
from torchtitan.device import pick
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.losses import LossConfig
from torchtitan.models.spec import build_empty
from torchtitan.parallel import (
    ActivationCheckpointConfig,
    CommConfig,
    CompileConfig,
    Degrees,
    Launch,
    Layout,
    ParallelismConfig,
    Precision,
    World,
    open_world,
    parallelize,
)
from torchtitan.timeline import Timeline
from torchtitan.tools.evaluate.subject import Subject, check_weights


class InferenceModel:
    """The network of a subject."""

    def __init__(self, subject: Subject, length: int, dtype: torch.dtype, world: World) -> None:
        """`length` is the maximum sequence length."""
        self.subject, self.length, self.world = subject, length, world
        self.device = world.device.torch_device
        spec, args = subject.network.spec, subject.network.args
        network = build_empty(spec.build, args, length, dtype)
        layout = layout_of(length, dtype, subject.convert)
        laid_out = parallelize(network, spec, args, layout, world, Timeline(world.device))
        allocate(laid_out, JobConfig(), world)
        self.network = laid_out.parts[0].requires_grad_(False)
        self.vocabulary = subject.tokenizer.vocab_size
        weights = {f"model.{name}": w for name, w in self.network.state_dict().items()}
        if mistakes := differences(weights, subject.source):
            raise ConfigError(f"the weights do not fit: {'; '.join(mistakes[:3])}")
        load_into(weights, subject.source)

    @torch.no_grad()
    def logits(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Compute the logits after every token: (B, S) int64 to (B, S, V)."""
        found: Tensor = self.network(tokens, positions)
        return found


@contextmanager
def open_model(subject: Subject, length: int, dtype: torch.dtype) -> Iterator[InferenceModel]:
    """Load a model, for sequences of at most `length` tokens.

    Raises:
        ConfigError: if the command was started by a launcher, on several ranks.
    """
    if Launch.read().by_launcher:
        raise ConfigError("this command runs on one rank; run it without a launcher")
    check_weights(subject)
    if subject.seq_len is not None and length > subject.seq_len:
        logger.warning(
            "the model was trained on sequences of %d tokens, but these have up to %d: it has "
            "not seen the positions beyond",
            *(subject.seq_len, length),
        )
    with open_world(Degrees(), CommConfig(), pick(0)) as world:
        yield InferenceModel(subject, length, dtype, world)


def layout_of(
    length: int,
    dtype: torch.dtype,
    convert: tuple[ConverterConfig, ...] = (),
) -> Layout:
    """Make a layout in one dtype, without the features for training."""
    return Layout(
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=1, disable_sequence_parallel=True, disable_loss_parallel=True
        ),
        precision=Precision(dtype, dtype, dtype),
        cpu_offload=False,
        activation_checkpoint=ActivationCheckpointConfig(mode="none"),
        compile=CompileConfig(),
        loss=LossConfig(),
        seq_len=length,
        local_batch_size=1,
        convert=convert,
    )


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Pad rows of tokens at their ends to the longest: (B, S) int64."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
