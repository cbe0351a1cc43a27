"""The section `[model]` for Qwen3."""

from torchtitan.models.decoder_settings import DecoderConfig


class Qwen3Config(DecoderConfig):
    """Qwen3 (dense): a decoder of Llama's kind with a norm on each head's queries and keys."""

    @property
    def repository(self) -> str | None:
        return "Qwen/Qwen3-8B-Base" if self.name == "qwen3" else None
