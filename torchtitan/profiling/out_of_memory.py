"""The report that is written when memory runs out: the memory of this rank by module and kind, and
the settings that reduce it.

Activations are not listed, since there is no list of them: they are the difference between the peak
and the rest, which is why the step and the phase are reported.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from torchtitan.device import GIB, Device
from torchtitan.logging import logger
from torchtitan.optim import Optimizers
from torchtitan.optim.parameters import local
from torchtitan.timeline import REST, Timeline

OUT_OF_MEMORY_FOLDER: Final = "out_of_memory"
MOST_MODULES = 20

KNOBS: Mapping[str, str] = {
    "training.local_batch_size": ("lower it; with the same global_batch_size the step is the same"),
    "training.seq_len": "shorter sequences have smaller activations, but change the run",
    "activation_checkpoint.mode": '"full" keeps only the inputs of blocks',
    "loss.vocabulary_chunk": "a value above 0 computes the logits in chunks",
    "training.mixed_precision_param": '"bfloat16" halves activations and gathered parameters',
    "parallelism.data_parallel_shard_degree": "more shards make each rank's smaller",
    "parallelism.fsdp_reshard_after_forward": '"always" frees gathered parameters soonest',
    "parallelism.tensor_parallel_degree": "more ranks share matrices and activations",
    "parallelism.context_parallel_degree": "more ranks share a sequence's activations",
    "parallelism.pipeline_parallel_degree": "more stages have fewer layers each",
    "optimizer.state_dtype": "moments in fewer bits take a half of float32, or less",
    "optimizer.early_step_in_backward": "true frees each gradient as soon as it is used",
    "training.enable_cpu_offload": "true keeps parameters, gradients and states in host memory",
}
"""Settings that reduce the memory of a run, the cheapest first."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch raises a RuntimeError on a CPU."""
    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return on_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError)


class LiveTensor(NamedTuple):
    """A tensor that this rank holds."""

    module: str
    kind: str
    """parameters, gradients or optimizer"""
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Evidence:
    """Facts about the memory of a run; each part may be unknown."""

    device: Device
    timeline: Timeline | None = None
    optimizers: Optimizers | None = None
    recipe: Mapping[str, Any] | None = None
    """Settings by dotted key."""

    def write(self, dump_folder: Path, rank: int, step: int, error: BaseException) -> None:
        """Write it to the dump folder; an error of the disk is logged, not raised."""
        path = dump_folder / OUT_OF_MEMORY_FOLDER / f"rank{rank}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                json.dumps(self.tell(rank, step, error), indent=1) + "\n", encoding="utf-8"
            )
        except OSError as failure:
            logger.error("%s: %s", path, failure.strerror)
        else:
            logger.error("out of memory at step %d; report: %s", step, path)

    def tell(self, rank: int, step: int, error: BaseException) -> dict[str, Any]:
        """All of it."""
        held = list(tensors(self.optimizers)) if self.optimizers else []
        recipe = self.recipe or {}
        return {
            "error": f"{type(error).__name__}: {error}",
            "rank": rank,
            "step": step,
            "phase": (self.timeline and self.timeline.left_in) or REST,
            "device": self.device.name,
            "peak_gib": self.device.memory_peak(),
            "capacity_gib": self.device.memory_capacity(),
            "held_gib": sum(each.bytes for each in held) / GIB,
            "held_bytes": by_dtype(held),
            "largest_modules": largest(held),
            "to_shrink_it": {
                key: {"now": recipe[key], "help": text}
                for key, text in KNOBS.items()
                if key in recipe
            },
        }


def tensors(optimizers: Optimizers) -> Iterator[LiveTensor]:
    """This rank's parts of parameters, gradients and optimizer state."""
    for parameter, name in optimizers.names.items():
        yield _held(name, "parameters", parameter)
        if parameter.grad is not None:
            yield _held(name, "gradients", parameter.grad)
    for name, state in optimizers.states():
        yield _held(name.rpartition(".")[0], "optimizer", state)


def _held(name: str, kind: str, tensor: Tensor) -> LiveTensor:
    part = local(tensor.detach())
    dtype = str(part.dtype).removeprefix("torch.")
    return LiveTensor(name.rpartition(".")[0], kind, dtype, part.nbytes)


def by_dtype(held: list[LiveTensor]) -> dict[str, dict[str, int]]:
    """Bytes of each kind, by dtype."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in held:
        found[each.kind][each.dtype] += each.bytes
    return {kind: dict(counts) for kind, counts in found.items()}


def largest(held: list[LiveTensor]) -> list[dict[str, Any]]:
    """The modules that hold most, with their bytes by kind."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in held:
        found[each.module][each.kind] += each.bytes
    modules = sorted(found, key=lambda name: -found[name].total())[:MOST_MODULES]
    return [{"module": name, "bytes": found[name].total(), **found[name]} for name in modules]
