"""`torch.compile` block by block: blocks are alike, so one compilation serves them all."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from torch import nn

from torchtitan.config import Config


class CompileConfig(Config):
    """What is compiled."""

    enable: bool = Field(False, description="Compile the model's blocks and the loss.")
    components: tuple[Literal["model", "loss"], ...] = Field(
        ("model", "loss"), description="Which parts are compiled."
    )
    backend: str = Field("inductor", description="Backend of torch.compile.")


def apply(blocks: Sequence[nn.Module], config: CompileConfig) -> None:
    """Compile the blocks in place; parameter names stay as they are."""
    if config.enable and "model" in config.components:
        for block in blocks:
            block.compile(backend=config.backend, fullgraph=True)
