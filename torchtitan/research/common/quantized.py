"""Base classes of low-bit communication: settings, a step counter, and a reduction."""

from typing import Annotated, Literal

import torch
import torch.distributed as dist
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.comm import Communicator, Reduce, Unit
from torchtitan.config import Config
from torchtitan.research.common.codec import GROUP, Codec, Form, WireFormat, seed_of


def _in_groups(value: int) -> int:
    if value % GROUP:
        raise ValueError(f"wanted a multiple of {GROUP}")
    return value


Bucket = Annotated[int, Field(ge=GROUP), AfterValidator(_in_groups)]


class Quantized(Config):
    """Settings of low-bit messages."""

    bits: int = Field(8, ge=2, le=8)
    """Bits per communicated value."""
    bucket: Bucket = 1024
    """Number of values that share a scale; a multiple of 8."""
    scales: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the scales that are sent with the values."""

    def wire_format(self, unit: Unit, form: Form) -> WireFormat:
        """Return the format in which `unit` is sent."""
        return WireFormat(unit, Codec(self.bits, self.bucket, form, getattr(torch, self.scales)))


class Clock(Communicator):
    """Step counter, which makes random draws equal on all ranks, and reproducible when a run
    resumes.
    """

    def __init__(self, unit: Unit, group: ProcessGroup) -> None:
        self.unit, self.group = unit, group
        self.step = torch.zeros((), dtype=torch.int64)
        self.calls = 0
        """Number of calls since the last step."""

    def state(self) -> dict[str, Tensor]:
        return {"step": self.step}

    def end_step(self) -> None:
        self.step += 1
        self.calls = 0

    def seed(self, what: str) -> int:
        """Return the seed of `what` in this step, different for each unit."""
        return seed_of(f"{self.unit.name}/{int(self.step)}/{what}")


class QuantizedReduce(Clock, Reduce):
    """Reduction that sends rows in low bits to their owners, which sum them in float32."""

    def __init__(self, wire_format: WireFormat, group: ProcessGroup) -> None:
        super().__init__(wire_format.unit, group)
        self.wire_format, self.codec = wire_format, wire_format.codec
        self.levels: Tensor | None = None
        """Levels that all ranks use, if not at equal distances."""

    def encode(self, rows: Tensor) -> Tensor:
        """Encode the elements sent in low bits (R, c) as codes (R, bytes)."""
        raise NotImplementedError

    def __call__(self, part: Tensor, whole: Tensor) -> None:
        coarse, exact = self.wire_format.split(whole.view(self.group.size(), -1))
        sent = self.wire_format.pack(self.encode(coarse), exact)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        codes, rest = self.wire_format.unpack(received, whole.dtype)
        length = self.wire_format.coarse
        sums = self.codec.decode(codes, length, levels=self.levels, is_sum=True)
        part.copy_(self.wire_format.join(sums, rest.float().sum(0, keepdim=True))[0])
        self.calls += 1
