"""QSDP: weights are gathered, and gradients reduced, in few bits
(Markov et al., 2023, arXiv:2302.02390).

Weights are rounded to a lattice after a random shift that all ranks share and that changes with
each step, so that the mean over shifts is the weight itself; gradients are rounded at random. Both
in buckets between the smallest and the largest of each. The owner of a weight keeps it in full, but
computes with the rounded one, as all ranks do.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.comm.codec import Envelope, Form
from torchtitan.comm.quantized import Clock, Quantized, QuantizedGradients, QuantizedReduce
from torchtitan.comm.unit import Unit
from torchtitan.comm.weights import Gather, WeightsConfig
from torchtitan.torch_private.collectives import all_gather_into


class QSDPWeights(Quantized, WeightsConfig):
    """Weights are rounded to a lattice that is shifted at random, by all ranks alike."""

    reads_numbers: ClassVar[bool] = True

    name: Literal["qsdp"] = Field("qsdp", description="Which way to gather.")

    def open(self, unit: Unit, group: ProcessGroup) -> "QSDPGather":
        return QSDPGather(self.envelope(unit, "minmax"), group)

    def sent_bytes(self, unit: Unit, ranks: int, dtype: torch.dtype) -> int:
        return ranks * self.envelope(unit, "minmax").bytes(dtype)


class QSDPGather(Clock, Gather):
    """The same shift for all gathers of a step: the backward has the weights of the forward."""

    def __init__(self, envelope: Envelope, group: ProcessGroup) -> None:
        super().__init__(envelope.unit, group)
        self.envelope, self.codec = envelope, envelope.codec

    @property
    def shift(self) -> float:
        """Uniform between -1/2 and 1/2."""
        generator = torch.Generator().manual_seed(self.seed("shift"))
        return float(torch.rand((), generator=generator)) - 0.5

    def __call__(self, whole: Tensor, part: Tensor) -> None:
        coarse, exact = self.envelope.split(part[None])
        shift = self.shift
        sent = self.envelope.seal(self.codec.encode(coarse, shift), exact)
        received = sent.new_empty(self.group.size(), sent.shape[1])
        all_gather_into(received.flatten(), sent.flatten(), self.group)
        codes, rest = self.envelope.open(received, part.dtype)
        found = self.codec.decode(codes, self.envelope.coarse, shift)
        whole.copy_(self.envelope.join(found.to(whole.dtype), rest).flatten())


class QSDPGradients(QuantizedGradients):
    """Gradients are rounded at random, so that the mean is the gradient itself."""

    name: Literal["qsdp"] = Field("qsdp", description="Which way to reduce.")

    @property
    def form(self) -> Form:
        return "minmax"

    def open(self, unit: Unit, group: ProcessGroup) -> "QSDPReduce":
        return QSDPReduce(self.envelope(unit, self.form), group)


class QSDPReduce(QuantizedReduce):
    """What is drawn differs by rank, by call and by step."""

    def encode(self, rows: Tensor) -> Tensor:
        seed = self.seed(f"gradients/{self.calls}/{self.group.rank()}")
        noise = torch.Generator(rows.device).manual_seed(seed)
        return self.codec.encode(rows, noise=noise)
