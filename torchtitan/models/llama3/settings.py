"""The section `[model]` for Llama 3."""

from typing import Literal

from torchtitan.models.decoder_settings import DecoderConfig


class Llama3Config(DecoderConfig):
    """Llama 3, 3.1 and 3.2: a decoder with rotary positions, grouped queries and SwiGLU."""

    norm: Literal["rms", "none"] | None = None
    """Norms of the residual stream, before attention, feed-forward and output. none: no norms
    (default: the flavor's)."""

    @property
    def repository(self) -> str | None:
        return "meta-llama/Llama-3.1-8B" if self.name == "llama3" else None
