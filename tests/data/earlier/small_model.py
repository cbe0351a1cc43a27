"""A Llama of 2,400 parameters, for checkpoints that are small enough to keep."""

import dataclasses

from torchtitan.models import MODELS
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.llama3 import LLAMA3

ARGS = DecoderArgs(dim=4, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=8, vocab_size=260)
MODELS["small"] = dataclasses.replace(LLAMA3, name="small", flavors={"small": ARGS})
