"""Facts about Llama 3: its flavors and its formats.

8B, 70B and 405B are Llama 3.1 (https://arxiv.org/abs/2407.21783, table 3), 1B and 3B are
Llama 3.2; `debugmodel` is small enough for a laptop and still has every part.
"""

from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.decoder_spec import decoder_spec
from torchtitan.models.layers import RopeScaling
from torchtitan.models.llama3.hugging_face import HUGGING_FACE
from torchtitan.models.llama3.meta import META
from torchtitan.models.llama3.settings import Llama3Config

VOCAB_SIZE = 128_256
LLAMA_3_1 = RopeScaling(factor=8.0)
LLAMA_3_2 = RopeScaling(factor=32.0)

FLAVORS = {
    "debugmodel": DecoderArgs(
        dim=256, n_layers=6, n_heads=16, n_kv_heads=8, ffn_dim=768, vocab_size=2048
    ),
    "1B": DecoderArgs(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=8192,
        vocab_size=VOCAB_SIZE,
        rope_scaling=LLAMA_3_2,
        tied=True,
    ),
    "3B": DecoderArgs(
        dim=3072,
        n_layers=28,
        n_heads=24,
        n_kv_heads=8,
        ffn_dim=8192,
        vocab_size=VOCAB_SIZE,
        rope_scaling=LLAMA_3_2,
        tied=True,
    ),
    "8B": DecoderArgs(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=14336,
        vocab_size=VOCAB_SIZE,
        rope_scaling=LLAMA_3_1,
    ),
    "70B": DecoderArgs(
        dim=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        ffn_dim=28672,
        vocab_size=VOCAB_SIZE,
        rope_scaling=LLAMA_3_1,
    ),
    "405B": DecoderArgs(
        dim=16384,
        n_layers=126,
        n_heads=128,
        n_kv_heads=8,
        ffn_dim=53248,
        vocab_size=VOCAB_SIZE,
        rope_scaling=LLAMA_3_1,
    ),
}

LLAMA3 = decoder_spec(
    name="llama3",
    flavors=FLAVORS,
    settings=Llama3Config,
    formats={"hf": HUGGING_FACE, "meta": META},
    open_vocabulary=("debugmodel",),
)
