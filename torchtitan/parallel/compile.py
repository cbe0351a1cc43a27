"""`torch.compile` block by block: blocks are alike, so one compilation serves them all.

A block's forward is compiled, with recomputation and tensor parallelism; the hooks that gather and
reduce its parameters stay outside. With a sharding that has no hooks (`ShardingConfig.in_graph`),
the whole model can be one graph.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from torchtitan.config import Config, Context, Problem, allowed_names, local_path
from torchtitan.device import compiles_for_cpu
from torchtitan.logging import logger
from torchtitan.torch_private.compiler import (
    compilations,
    compiled_beside_the_model,
    compiler_counts,
    count_once_where_recomputed,
    keep_compiled_graphs,
)

Component = Literal["model", "loss"]
Granularity = Literal["block", "model"]


class CompileConfig(Config):
    """Compilation of the model and the loss."""

    enable: bool = False
    """Compile the model's blocks and the loss."""
    components: tuple[Component, ...] = ("model", "loss")
    """Parts to compile."""
    backend: str = "inductor"
    """Backend of torch.compile."""
    fullgraph: bool = True
    """Fail if a block or the loss cannot be compiled as one graph; false: compile several graphs,
    and log the reason for each break."""
    granularity: Granularity = "block"
    """Unit that is compiled as one graph: each block (identical blocks share a graph), or the whole
    model (in a pipeline, the stage), which takes longer to compile."""

    cache_folder: str | None = None
    """Folder that keeps compiled graphs for the next run of the same recipe (default: torch's,
    which is TORCHINDUCTOR_CACHE_DIR, or torchinductor_USER in the system's temporary folder, which
    may be emptied)."""

    def problems(self, context: Context) -> Iterator[Problem]:
        world = context.world
        if self.enable and not self.components:
            message = "with self.enable = true, wanted at least one of model, loss"
            yield Problem("components", message, ("enable",))
        usual, known = {"inductor", "aot_eager", "eager"}, torch.compiler.list_backends
        if self.enable and self.backend not in usual and self.backend not in known(exclude_tags=()):
            yield Problem("backend", allowed_names(self.backend, sorted(usual.union(known()))))
        if self.cache_folder is not None:
            if os.path.isfile(local_path(self.cache_folder)):
                yield Problem("cache_folder", "it is a file; wanted a folder")
            if self.backend != "inductor":
                message = f'self.backend = "{self.backend}" does not cache graphs; use "inductor"'
                yield Problem("cache_folder", message, ("backend",))
        on_cpu = self.backend == "inductor" and world.is_here and world.device_type == "cpu"
        if self.enable and on_cpu and not compiles_for_cpu():
            message = (
                "torch.compile on a CPU needs g++ or clang++, but neither is installed; install "
                'one, or use self.backend = "aot_eager"'
            )
            yield Problem("enable", message)

    def compiles(self, component: Component) -> bool:
        return self.enable and component in self.components


def prepare(config: CompileConfig) -> None:
    """Set up counters and the cache of compiled graphs; call it before anything is compiled."""
    if config.compiles("model"):
        count_once_where_recomputed()
    if config.enable and config.backend == "inductor":
        folder = local_path(config.cache_folder).resolve() if config.cache_folder else None
        keep_compiled_graphs(folder)


def apply(
    modules: Iterable[nn.Module], config: CompileConfig, options: dict[str, Any] | None = None
) -> None:
    """Compile the forward of each of `modules`, without renaming parameters.

    Args:
        options: backend options for `torch.compile`.
    """
    if config.compiles("model"):
        for module in modules:
            module.forward = compiled(module.forward, config, options)


def compiled(
    function: Callable[..., Any], config: CompileConfig, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Return `function` compiled on its first call, and again for each new shape."""
    return torch.compile(
        function, backend=config.backend, fullgraph=config.fullgraph, dynamic=False, options=options
    )


class CompileMonitor:
    """Reports graphs, graph breaks and recompilations of this rank's part of the model."""

    def __init__(self, config: CompileConfig, blocks: int, has_loss: bool) -> None:
        self.config, self.blocks, self.has_loss = config, blocks, has_loss
        self.steps = 0
        self.seen: set[str] = set()

    def after_step(self, step: int, is_last: bool) -> None:
        """Report after two steps or the last; warn of recompilations after that."""
        self.steps += 1
        if self.steps > 2:
            for name, compilation in compilations().items():
                if name not in self.seen and compilation.reason:
                    logger.warning("compile: step %d: %s", step, _again(compilation.reason))
        elif self.steps == 2 or is_last:
            report(self.config, self.blocks, self.has_loss)
        self.seen |= compilations().keys()


def report(config: CompileConfig, blocks: int, has_loss: bool) -> None:
    """Log the graphs of this rank's blocks and loss, with cache hits, breaks and recompilations."""
    what = "the model" if config.granularity == "model" else _number(blocks, "block")
    parts = [what] * config.compiles("model")
    parts += ["the loss"] * (config.compiles("loss") and has_loss)
    if not parts:
        return
    parts += compiled_beside_the_model()
    counts, made = compiler_counts(), compilations().values()
    breaks, again = counts["graph_break"], [each.reason for each in made if each.reason]
    kept = sum(each.hits > 0 and not each.misses for each in made)
    logger.info(
        "compile: %s of %s,%s %s, %s",
        _number(counts["stats"]["unique_graphs"], "graph"),
        " and ".join(parts),
        f" {kept} from the cache," if config.backend == "inductor" else "",
        _number(sum(breaks.values()), "graph break"),
        _number(len(again), "recompilation"),
    )
    for reason, times in breaks.items():
        logger.warning("compile: graph break, %s: %s", _number(times, "time"), reason.strip())
    for reason in again:
        logger.warning("compile: %s", _again(reason))


def _again(reason: str) -> str:
    return f"recompiled because a guard failed: {reason.strip()}"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
