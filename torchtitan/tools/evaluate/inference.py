"""A model with its weights in memory, on one rank or split over several, ready for inference.

It is laid out by `parallelize`, as in training, with two differences. Tokens come one at a time, so
their sequence is not split (no sequence parallelism). And sampling and scoring need the whole
vocabulary, so every rank has all logits.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.checkpoint.placement import differences, load_into
from torchtitan.checks.divisibility import divisors
from torchtitan.config import ConfigError
from torchtitan.convert import ConverterConfig
from torchtitan.device import pick
from torchtitan.job import JobConfig
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
from torchtitan.parts import allocate
from torchtitan.timeline import Timeline
from torchtitan.tools.evaluate.subject import Subject


class InferenceModel:
    """The network of a subject on this rank; all ranks call its methods together."""

    def __init__(self, subject: Subject, length: int, dtype: torch.dtype, world: World) -> None:
        """`length` is the maximum sequence length."""
        self.subject, self.length, self.world = subject, length, world
        self.device = world.device.torch_device
        spec, args = subject.network.spec, subject.network.args
        network = build_empty(spec.build, args, length, dtype)
        layout = layout_of(world.degrees.tp, length, dtype, subject.convert)
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
        """Compute the logits after every token: (B, S) int64 to (B, S, V), all on every rank."""
        found: Tensor = self.network(tokens, positions)
        return found

    def agreed(self, values: Tensor) -> Tensor:
        """Broadcast the values of rank 0, since no two ranks may choose differently."""
        dist.broadcast(values, src=0)
        return values


@contextmanager
def open_model(subject: Subject, length: int, dtype: torch.dtype) -> Iterator[InferenceModel]:
    """Load a model with tensor parallelism over all ranks."""
    launch = Launch.read()
    with open_world(Degrees(tp=launch.size), CommConfig(), pick(launch.local_rank)) as world:
        yield InferenceModel(subject, length, dtype, world)


def layout_of(
    tensor_ranks: int,
    length: int,
    dtype: torch.dtype,
    convert: tuple[ConverterConfig, ...] = (),
) -> Layout:
    """Make a layout in one dtype, without the features for training."""
    return Layout(
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=1,
            tensor_parallel_degree=tensor_ranks,
            disable_sequence_parallel=True,
            disable_loss_parallel=True,
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


def check_ranks(subject: Subject, ranks: int) -> None:
    """Refuse a number of ranks that the matrices cannot be split over.

    Raises:
        ConfigError: with the possible numbers.
    """
    spec, args = subject.network.spec, subject.network.args
    heads = spec.tensor_splits(args).heads if spec.tensor_plan else {"whole network": 1}
    shared = math.gcd(*heads.values())
    if shared % ranks:
        raise ConfigError(
            f"--tensor-parallel: got {ranks}; {subject.network} has "
            f"{' and '.join(f'{count} {what}' for what, count in heads.items())}; "
            f"use {divisors(shared)}"
        )


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Pad rows of tokens at their ends to the longest: (B, S) int64."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
