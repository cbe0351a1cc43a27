"""`torch.compile` block by block: blocks are alike, so one compilation serves them all.

What is compiled is a block's forward, recomputation and tensor parallelism included; the hooks that
gather and reduce its parameters stay outside.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from torchtitan import torch_private
from torchtitan.config import Config
from torchtitan.logging import logger

Component = Literal["model", "loss"]


class CompileConfig(Config):
    """What is compiled."""

    enable: bool = Field(False, description="Compile the model's blocks and the loss.")
    components: tuple[Component, ...] = Field(
        ("model", "loss"), description="Which parts are compiled."
    )
    backend: str = Field("inductor", description="Backend of torch.compile.")
    fullgraph: bool = Field(
        True,
        description="Fail where a block or the loss cannot be compiled whole; false: compile it in "
        "several graphs, and say where and why it breaks.",
    )

    def compiles(self, component: Component) -> bool:
        return self.enable and component in self.components


def apply(blocks: Iterable[nn.Module], config: CompileConfig) -> None:
    """Compile the forward of the blocks; parameter names stay as they are."""
    if config.compiles("model"):
        for block in blocks:
            block.forward = compiled(block.forward, config)


def compiled(function: Callable[..., Any], config: CompileConfig) -> Callable[..., Any]:
    """`function`, which is compiled when first called."""
    return torch.compile(function, backend=config.backend, fullgraph=config.fullgraph)


def report(config: CompileConfig, blocks: int, has_loss: bool) -> None:
    """Log what the compiler made of this rank's blocks and loss; after a step, not before."""
    parts = [_number(blocks, "block")] * config.compiles("model")
    parts += ["the loss"] * (config.compiles("loss") and has_loss)
    if not parts:
        return
    counts, again = torch_private.compiler_counts(), torch_private.recompilations()
    breaks = counts["graph_break"]
    logger.info(
        "compile: %s of %s, %s, %s",
        _number(counts["stats"]["unique_graphs"], "graph"),
        " and ".join(parts),
        _number(sum(breaks.values()), "graph break"),
        _number(len(again), "recompilation"),
    )
    for reason, times in breaks.items():
        logger.warning("compile: graph break, %s: %s", _number(times, "time"), reason.strip())
    for reason in again:
        logger.warning("compile: recompiled, since a guard failed: %s", reason.strip())


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
