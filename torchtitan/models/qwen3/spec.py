"""Facts about Qwen3: its flavors, as published (https://arxiv.org/abs/2505.09388, table 1).

Queries and keys are normalized in each head, heads have 128 elements whatever the width, and the
small models tie the output to the embedding. `debugmodel` is small enough for a laptop and still
has every part.
"""

from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.decoder_spec import decoder_spec
from torchtitan.models.qwen3.hugging_face import HUGGING_FACE
from torchtitan.models.qwen3.settings import Qwen3Config


def flavor(
    dim: int,
    n_layers: int,
    n_heads: int,
    ffn_dim: int,
    *,
    tied: bool = False,
    n_kv_heads: int = 8,
    head_dim: int = 128,
    vocab_size: int = 151_936,
) -> DecoderArgs:
    return DecoderArgs(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        head_norms=True,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        norm_eps=1e-6,
        rope_theta=1e6,
        tied=tied,
    )


FLAVORS = {
    "debugmodel": flavor(*(256, 6, 8, 768), tied=True, n_kv_heads=4, head_dim=64, vocab_size=2048),
    "0.6B": flavor(1024, 28, 16, 3072, tied=True),
    "1.7B": flavor(2048, 28, 16, 6144, tied=True),
    "4B": flavor(2560, 36, 32, 9728, tied=True),
    "8B": flavor(4096, 36, 32, 12_288),
    "14B": flavor(5120, 40, 40, 17_408),
    "32B": flavor(5120, 64, 64, 25_600),
}

QWEN3 = decoder_spec(
    name="qwen3",
    flavors=FLAVORS,
    settings=Qwen3Config,
    formats={"hf": HUGGING_FACE},
    open_vocabulary=("debugmodel",),
)
