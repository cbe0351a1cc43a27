"""Which settings of an optimizer cannot work together, or with the rest of a recipe."""

import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.optim.settings import OptimizerConfig

EARLY = "with optimizer.early_step_in_backward"
IN_THE_WAY: Mapping[str, tuple[Any, str]] = {
    "training.max_norm": (0, "a gradient is gone before the norm of all is known to clip it by"),
    "training.enable_cpu_offload": (False, "gradients would be waited for one by one"),
    "compile.cuda_graphs": (False, "nobody has recorded graphs between which weights change"),
    "parallelism.pipeline_parallel_degree": (
        1,
        "the backward of a microbatch would change weights that the next one uses",
    ),
    "fault_tolerance.enable": (False, "gradients are gone before groups can add them up"),
    "spikes.sigma": (0, "an update is made before its spike is seen, and cannot be skipped"),
    "spikes.max_rollbacks": (0, "no step is skipped, so no row of them is rolled back"),
    "metrics.precision_freq": (0, "a microbatch that is only looked at would change weights"),
    "metrics.statistics_freq": (0, "a gradient is gone before it is looked at"),
    "optimizer.offload_states": (False, "the backward would wait for the host's updates"),
}
"""Of keys that updates in the backward rule out: the one value that can be, and why no other."""


def problems(
    config: OptimizerConfig, recipe: Mapping[str, Any], accumulation: int
) -> Iterator[tuple[str, str]]:
    """What cannot work: (key, message).

    Args:
        recipe: all settings by dotted key.
        accumulation: microbatches of a step.
    """
    if config.early_step_in_backward:
        for key, (allowed, why) in IN_THE_WAY.items():
            if recipe[key] != allowed:
                yield key, f"{EARLY}, {why}; use {str(allowed).lower()}"
        if accumulation > 1:
            message = (
                f"{EARLY}, there is one microbatch in a step, and this makes {accumulation}; use "
                f"{recipe['training.global_batch_size'] // accumulation}, or a larger "
                "training.local_batch_size"
            )
            yield "training.global_batch_size", message
    few_bits = getattr(config, "state_dtype", "parameter") != "parameter"
    if few_bits and getattr(config, "implementation", "fused") != "fused":
        message = 'with optimizer.state_dtype the update is compiled instead; use "fused"'
        yield "optimizer.implementation", message
    if few_bits and (recipe["training.enable_cpu_offload"] or config.offload_states):
        message = 'in host memory, states take none of the device\'s; use "parameter"'
        yield "optimizer.state_dtype", message
    if config.offload_states and recipe["training.enable_cpu_offload"]:
        message = "training.enable_cpu_offload keeps states in host memory already; use one"
        yield "optimizer.offload_states", message
    if config.offload_states and recipe["training.dtype"] != "float32":
        message = (
            "the weights that the host updates are those of the device, and float32; use "
            'training.dtype = "float32"'
        )
        yield "optimizer.offload_states", message


def problems_of_machine(config: OptimizerConfig, device_type: str) -> Iterator[tuple[str, str]]:
    """What this machine cannot do: (key, message)."""
    if device_type != "cpu":
        return
    if config.offload_states:
        yield "optimizer.offload_states", "on a CPU, states are in host memory already; use false"
    few_bits = getattr(config, "state_dtype", "parameter") != "parameter"
    if few_bits and not (shutil.which("g++") or shutil.which("clang++")):
        message = (
            "its update is compiled, which on a CPU needs g++ or clang++, and there is neither; "
            'install one, or use "parameter"'
        )
        yield "optimizer.state_dtype", message
