"""The section `[model]` for Llama 3."""

from torchtitan.models.decoder_settings import DecoderConfig


class Llama3Config(DecoderConfig):
    """Llama 3, 3.1 and 3.2: a decoder with rotary positions, grouped queries and SwiGLU."""

    @property
    def repository(self) -> str | None:
        return "meta-llama/Llama-3.1-8B" if self.name == "llama3" else None
