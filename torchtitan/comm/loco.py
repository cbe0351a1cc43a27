"""LoCo: gradients in few bits, with a moving average of what rounding took away
(Xie et al., 2024, arXiv:2407.04480).

For each row that a rank sends, with e = 0 at first,

    h = g + e
    send Q(h)
    e = beta e + (1 - beta) (h - Q(h))

So e' - e = (1 - beta) (g - Q(h)): over T calls the gradients and what was sent for them differ by
(e_T - e_0) / (1 - beta) in sum, which does not grow. With beta = 0 this is error feedback as of
Seide et al. (2014). The names are those of DeepSpeed; the paper's beta is 1 - beta here.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.comm.codec import Codec, Envelope
from torchtitan.comm.quantized import Bucket, QuantizedGradients, QuantizedReduce
from torchtitan.comm.unit import Unit


class LoCo(QuantizedGradients):
    """Gradients are sent in few bits; what rounding takes away is sent later."""

    remembers: ClassVar[bool] = True

    name: Literal["loco"] = Field("loco", description="Which way to reduce.")
    bits: int = Field(4, ge=2, le=8, description="Of each number that is sent.")
    bucket: Bucket = Field(256, description="Numbers that share a scale; a multiple of 8.")
    compensate: bool = Field(
        True, description="Send later what rounding takes away; false: it is lost."
    )
    beta: float = Field(
        0.8,
        ge=0,
        lt=1,
        description="How much of the errors before stays in their average; 0: the last alone.",
    )
    reset_steps: int = Field(
        1024, ge=0, description="Steps after which the errors are forgotten; 0: never."
    )
    error_bits: Literal[8, 32] = Field(8, description="Of each error that is kept.")

    def open(self, unit: Unit, group: ProcessGroup) -> "LoCoReduce":
        return LoCoReduce(self, self.envelope(unit, self.form), group)


class LoCoReduce(QuantizedReduce):
    """A reduction that keeps, for each rank it sends to, what rounding took away.

    That is as many numbers as the whole unit has: a byte for each, whatever the number of ranks.
    """

    def __init__(self, config: LoCo, envelope: Envelope, group: ProcessGroup) -> None:
        super().__init__(envelope, group)
        self.config = config
        rows = group.size() if config.compensate else 0  # else nothing is kept
        self.stored = Codec(8, config.bucket) if config.error_bits == 8 else None
        shape = (rows, self.stored.bytes_of(envelope.coarse) if self.stored else envelope.coarse)
        kind = torch.uint8 if self.stored else torch.float32
        self.error = torch.zeros(shape, dtype=kind, device=envelope.unit.device)

    def encode(self, rows: Tensor) -> Tensor:
        if not self.config.compensate:
            return self.codec.encode(rows)
        length = rows.shape[1]
        error = self.stored.decode(self.error, length) if self.stored else self.error
        wanted = rows.float() + error
        sent = self.codec.encode(wanted)
        missed = wanted - self.codec.decode(sent, length)
        # A step that is not finite is skipped, and should not be remembered.
        error = torch.lerp(missed, error, self.config.beta).nan_to_num(0.0, 0.0, 0.0)
        self.error.copy_(self.stored.encode(error) if self.stored else error)
        return sent

    def state(self) -> dict[str, Tensor]:
        return super().state() | ({"error": self.error} if self.config.compensate else {})

    def end_step(self) -> None:
        super().end_step()
        if self.config.reset_steps and int(self.step) % self.config.reset_steps == 0:
            self.error.zero_()
