"""LoCo: low-bit gradients, with a moving average of the rounding errors
(Xie et al., 2024, arXiv:2407.04480).

For each row that a rank sends, with e = 0 at first,

    h = g + e
    send Q(h)
    e = beta e + (1 - beta) (h - Q(h))

So e' - e = (1 - beta) (g - Q(h)): over T calls the sums of the gradients and of the sent values
differ by (e_T - e_0) / (1 - beta), which does not grow. With beta = 0 this is the error feedback of
Seide et al. (2014). The names are those of DeepSpeed; the paper's beta is 1 - beta here.

Ranks of a shard group reduce this way (`[communication.gradients]`), and so do replicas
(`[communication.replicas]`): both together are the two-hop form, each hop with its own errors.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.comm import AgreementConfig, GradientsConfig, ReplicaReducer, Unit
from torchtitan.research.common.codec import Codec, WireFormat, compiled, copy
from torchtitan.research.common.quantized import Bucket, Quantized, QuantizedReduce
from torchtitan.torch_private.distributed import all_gather


class Compensated(Quantized):
    """Settings of low-bit messages with error feedback."""

    bits: int = Field(4, ge=2, le=8)
    """Bits per communicated value."""
    bucket: Bucket = 256
    """Number of values that share a scale; a multiple of 8."""
    compensate: bool = True
    """Add rounding errors to later messages (error feedback); false: they are lost."""
    beta: float = Field(0.8, ge=0, lt=1)
    """Decay of the moving average of errors; 0: only the last error."""
    reset_steps: int = Field(1024, ge=0)
    """Steps between resets of the errors; 0: never."""
    error_bits: Literal[8, 32] = 8
    """Bits of each stored error."""


class Compensation:
    """Encoder of rows that keeps the rounding error of each."""

    def __init__(
        self, config: Compensated, codec: Codec, rows: int, length: int, device: torch.device
    ) -> None:
        self.config, self.codec = config, codec
        self.stored = Codec(8, config.bucket) if config.error_bits == 8 else None
        columns = self.stored.bytes_of(length) if self.stored else length
        kind = torch.uint8 if self.stored else torch.float32
        kept = rows if config.compensate else 0
        self.error = torch.zeros(kept, columns, dtype=kind, device=device)

    def encode(self, rows: Tensor) -> Tensor:
        """Encode rows (R, n) as codes (R, bytes)."""
        if not self.config.compensate:
            return self.codec.encode(rows)
        sent, length = self.codec.empty(rows), rows.shape[1]
        for where in self.codec.slices(*rows.shape):
            if self.stored:
                kept = self.stored.parts(self.error, length, where)
                error = self.stored.read(self.error, length, where)
            else:
                kept = error = [self.codec.buckets(self.error[:, where])]
            wanted = self.codec.buckets(rows[:, where])
            parts, error = compensated(self.codec, wanted, self.stored, error, self.config.beta)
            copy(parts, self.codec.parts(sent, length, where))
            copy(error, kept)
        return sent

    def end_step(self, step: int) -> None:
        """Run after `step` steps."""
        if self.config.reset_steps and step % self.config.reset_steps == 0:
            self.error.zero_()


@compiled
def compensated(
    codec: Codec, rows: Tensor, stored: Codec | None, kept: list[Tensor], beta: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Encode rows (R, buckets, n) and their new errors; `kept` are the errors, or their parts."""
    error = stored.decode_buckets(kept)[..., : rows.shape[2]] if stored else kept[0]
    wanted = rows.float() + error
    parts = codec.encode_buckets(wanted)
    missed = wanted - codec.decode_buckets(parts)[..., : rows.shape[2]]
    # A step that is not finite is skipped, and must not enter the errors.
    error = (beta * error + (1 - beta) * missed).nan_to_num(0.0, 0.0, 0.0)
    return parts, stored.encode_buckets(error) if stored else [error]


class LoCo(Compensated, GradientsConfig):
    """Low-bit gradients with error feedback."""

    remembers: ClassVar[bool] = True

    name: Literal["loco"] = "loco"
    """Method of reducing gradients."""

    def open(self, unit: Unit, group: ProcessGroup) -> "LoCoReduce":
        return LoCoReduce(self, self.wire_format(unit, "symmetric"), group)


class LoCoReduce(QuantizedReduce):
    """Reduction that keeps the rounding errors for each receiving rank.

    There are as many errors as elements in the whole unit: a byte each, for any number of ranks.
    """

    def __init__(self, config: LoCo, wire_format: WireFormat, group: ProcessGroup) -> None:
        super().__init__(wire_format, group)
        rows, device = group.size(), wire_format.unit.device
        self.sending = Compensation(config, self.codec, rows, wire_format.coarse, device)

    def encode(self, rows: Tensor) -> Tensor:
        return self.sending.encode(rows)

    def state(self) -> dict[str, Tensor]:
        kept = {"error": self.sending.error} if self.sending.config.compensate else {}
        return super().state() | kept

    def end_step(self) -> None:
        super().end_step()
        self.sending.end_step(int(self.step))


class LoCoReplicas(Compensated, AgreementConfig):
    """Low-bit sum of the replicas' gradients, with error feedback."""

    name: Literal["loco"] = "loco"
    """Method of synchronizing replicas."""

    def open(self, unit: Unit, group: ProcessGroup) -> "LoCoReducer":
        return LoCoReducer(self, self.wire_format(unit, "symmetric"), group)


class LoCoReducer(ReplicaReducer):
    """Low-bit all-reduce: each replica sums a part, and sends the sum to all.

    Both hops are compensated, each by its own errors; all replicas decode the same sums.
    """

    def __init__(self, config: LoCoReplicas, wire_format: WireFormat, group: ProcessGroup) -> None:
        self.group, self.codec = group, wire_format.codec
        names = zip(wire_format.unit.shapes, wire_format.parts, strict=True)
        self.coarse = {name for name, (is_coarse, _) in names if is_coarse}
        ranks, device = group.size(), wire_format.unit.device
        self.length = -(-wire_format.coarse // ranks)
        self.parts = Compensation(config, self.codec, ranks, self.length, device)
        self.sums = Compensation(config, self.codec, 1, self.length, device)
        self.step = torch.zeros((), dtype=torch.int64)

    def state(self) -> dict[str, Tensor]:
        errors = {"error.parts": self.parts.error, "error.sums": self.sums.error}
        return {"step": self.step} | (errors if self.parts.config.compensate else {})

    @torch.no_grad()
    def __call__(self, gradients: Mapping[str, Tensor]) -> None:
        coarse = [each for name, each in gradients.items() if name in self.coarse]
        exact = [each for name, each in gradients.items() if name not in self.coarse]
        if coarse:
            _copy(self._sum(torch.cat([each.flatten().float() for each in coarse])), coarse)
        if exact:
            message = torch.cat([each.flatten() for each in exact])
            dist.all_reduce(message, group=self.group)
            _copy(message, exact)
        self.step += 1
        for compensation in (self.parts, self.sums):
            compensation.end_step(int(self.step))

    def _sum(self, numbers: Tensor) -> Tensor:
        """Sum numbers (n) over all replicas."""
        missing = self.length * self.group.size() - len(numbers)
        rows = torch.cat([numbers, numbers.new_zeros(missing)]).view(-1, self.length)
        sent = self.parts.encode(rows)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        own = self.codec.decode(received, self.length, is_sum=True)
        everyones = all_gather(self.sums.encode(own)[0], self.group)
        return self.codec.decode(everyones, self.length).flatten()[: len(numbers)]


def _copy(numbers: Tensor, tensors: list[Tensor]) -> None:
    """Copy numbers (n) into tensors, in order."""
    for tensor, part in zip(
        tensors, torch.split(numbers, [each.numel() for each in tensors]), strict=True
    ):
        tensor.copy_(part.view_as(tensor))
