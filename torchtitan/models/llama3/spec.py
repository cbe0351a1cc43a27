"""Facts about Llama 3: its flavors, its initial weights, and the cost of a token.

8B, 70B and 405B are Llama 3.1 (https://arxiv.org/abs/2407.21783, table 3), 1B and 3B are
Llama 3.2; `debugmodel` is small enough for a laptop and still has every part.
"""

import dataclasses
import math

from torch import nn

from torchtitan.models.llama3.hugging_face import HUGGING_FACE
from torchtitan.models.llama3.meta import META
from torchtitan.models.llama3.model import Llama3, Llama3Args, RopeScaling
from torchtitan.models.llama3.prediction import AheadModule
from torchtitan.models.llama3.settings import Llama3Config
from torchtitan.models.spec import (
    InitialWeight,
    MinShape,
    ModelSpec,
    SampleShapes,
    TensorRole,
    shapes_of_tokens,
)

VOCAB_SIZE = 128_256
LLAMA_3_1 = RopeScaling(factor=8.0)
LLAMA_3_2 = RopeScaling(factor=32.0)

FLAVORS = {
    "debugmodel": Llama3Args(
        dim=256, n_layers=6, n_heads=16, n_kv_heads=8, ffn_dim=768, vocab_size=2048
    ),
    "1B": Llama3Args(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=8192,
        vocab_size=VOCAB_SIZE,
        rope_scaling=LLAMA_3_2,
        tied=True,
    ),
    "3B": Llama3Args(
        dim=3072,
        n_layers=28,
        n_heads=24,
        n_kv_heads=8,
        ffn_dim=8192,
        vocab_size=VOCAB_SIZE,
        rope_scaling=LLAMA_3_2,
        tied=True,
    ),
    "8B": Llama3Args(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=14336,
        vocab_size=VOCAB_SIZE,
        rope_scaling=LLAMA_3_1,
    ),
    "70B": Llama3Args(
        dim=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        ffn_dim=28672,
        vocab_size=VOCAB_SIZE,
        rope_scaling=LLAMA_3_1,
    ),
    "405B": Llama3Args(
        dim=16384,
        n_layers=126,
        n_heads=128,
        n_kv_heads=8,
        ffn_dim=53248,
        vocab_size=VOCAB_SIZE,
        rope_scaling=LLAMA_3_1,
    ),
}


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    layers = model.get_submodule("layers")
    return {f"layers.{name}": block for name, block in layers.named_children()}


def auxiliary_blocks(model: nn.Module) -> dict[str, nn.Module]:
    modules = getattr(model, "auxiliary", None) or nn.ModuleDict()
    found = {name: m for name, m in modules.named_children() if isinstance(m, AheadModule)}
    return {f"auxiliary.{name}.block": module.block for name, module in found.items()}


def init_std(args: Llama3Args, name: str) -> InitialWeight:
    """Return 0.02, or less for weights that add to the residual stream.

    The scaling by 1/sqrt(2 * layers), as in GPT-2, keeps depth from inflating the stream, to which
    each layer adds twice.
    """
    if name.endswith("norm.weight"):
        return "ones"
    if name.endswith((".wo.weight", ".w2.weight")):
        return 0.02 / math.sqrt(2 * args.n_layers)
    return 0.02


def shapes(args: Llama3Args, seq_len: int) -> SampleShapes:
    """Return the shapes of a sample; embeddings of later tokens accompany its hidden states."""
    return shapes_of_tokens(args, seq_len)._replace(extra_hidden=args.multi_token)


def flops_of(args: Llama3Args, seq_len: int, name: str) -> int:
    """Return the floating-point operations of one token's forward and backward in a module.

    A weight costs 2 in the forward and 4 in the backward (https://arxiv.org/abs/2001.08361,
    appendix B of https://arxiv.org/abs/2204.02311); the input embedding is a look-up and costs
    nothing. The output is a matrix product, tied or not, once more for each depth of multi-token
    prediction. Attention multiplies S keys and S values per token and head dimension, with no
    discount for the masked half.
    """
    dim, heads, keys = args.dim, args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    block = 6 * dim * (2 * heads + 2 * keys + 3 * args.ffn_dim + 2) + 12 * heads * seq_len
    output = 6 * args.vocab_size * dim
    if name.startswith("layers."):
        return block
    if name == "auxiliary":
        of_depth = block + 6 * (2 * dim + 3) * dim + output
        of_heads = sum(head.flops(dim) for head in args.auxiliary_heads)
        return args.multi_token * of_depth + of_heads
    return {"norm": 6 * dim, "output": output}.get(name, 0)


def flops_per_unit(args: Llama3Args, seq_len: int) -> int:
    """Return the floating-point operations of a token in the whole model."""
    once = (flops_of(args, seq_len, name) for name in ("norm", "output", "auxiliary"))
    return args.n_layers * flops_of(args, seq_len, "layers.0") + sum(once)


def kept_by_block(args: Llama3Args, itemsize: int, name: str) -> float:
    """Return the bytes per token kept by a block for its backward; exact for torch's operators.

    A norm keeps its input and the normalized values in float32, and so do sines and cosines. Kept
    in the computed dtype are the outputs of the norms, queries, keys and values, the mixed values
    and their log-sum-exp, the two halves of the feed-forward, the activated one, and their product.
    A depth of multi-token prediction adds three norms around its block, and the concatenated
    outputs of two of them.
    """
    keys, hidden = args.n_kv_heads * args.head_dim, args.ffn_dim
    in_float32 = 4 * args.dim + 2 * args.head_dim + args.n_heads + 2
    if name == "auxiliary":
        return 4 * (6 * args.dim + 3) + itemsize * 2 * args.dim
    return 4 * in_float32 + itemsize * (4 * args.dim + 2 * keys + 4 * hidden)


def heads(args: Llama3Args, name: str) -> tuple[int, int] | None:
    """Return the dim of a parameter's heads, and their number."""
    found = {
        "wq": (0, args.n_heads),
        "wk": (0, args.n_kv_heads),
        "wv": (0, args.n_kv_heads),
        "wo": (1, args.n_heads),
    }
    return found.get(name.removesuffix(".weight").rpartition(".")[2])


def shrink(args: Llama3Args, needed: MinShape) -> Llama3Args:
    """Return the same structure in heads of 8: grouped queries, feed-forward ratio, tied or not."""
    tp, head_dim = needed.tensor_ranks, 8
    n_kv_heads = min(args.n_kv_heads, max(tp, 2))
    n_heads = n_kv_heads * min(args.n_heads // args.n_kv_heads, 4)
    dim = n_heads * head_dim
    return dataclasses.replace(
        args,
        dim=dim,
        n_layers=needed.n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        ffn_dim=math.ceil(dim * args.ffn_dim / args.dim / (tp * 8)) * tp * 8,
        vocab_size=needed.vocab_size,
    )


BLOCK_PLAN: dict[str, TensorRole] = {
    "attention_norm": "norm",
    "attention": "input_gather",
    "attention.wq": "colwise",
    "attention.wk": "colwise",
    "attention.wv": "colwise",
    "attention.wo": "rowwise",
    "ffn_norm": "norm",
    "feed_forward": "input_gather",
    "feed_forward.w1": "colwise",
    "feed_forward.w3": "colwise",
    "feed_forward.w2": "rowwise",
}
TENSOR_PLAN: dict[str, TensorRole] = {
    "tok_embeddings": "embedding",
    **{f"layers.*.{name}": role for name, role in BLOCK_PLAN.items()},
    "norm": "norm",
    "output": "logits",
    **{f"auxiliary.*.block.{name}": role for name, role in BLOCK_PLAN.items()},
    "auxiliary.*.hidden_norm": "norm",
    "auxiliary.*.token_norm": "norm",
    "auxiliary.*.project": "norm",
    "auxiliary.*.norm": "norm",
    "auxiliary.*.predict": "norm",
}

LLAMA3 = ModelSpec(
    name="llama3",
    flavors=FLAVORS,
    build=Llama3,
    blocks=blocks,
    init_std=init_std,
    before_blocks=("tok_embeddings",),
    after_blocks=("norm", "output"),
    auxiliary="auxiliary",
    auxiliary_blocks=auxiliary_blocks,
    tensor_plan=TENSOR_PLAN,
    flops_per_unit=flops_per_unit,
    flops_of=flops_of,
    kept_by_block=kept_by_block,
    heads=heads,
    head_dim=lambda args: args.head_dim,
    tied=lambda args: args.tied,
    queries_and_keys=("wq", "wk"),
    shrink=shrink,
    shapes=shapes,
    formats={"hf": HUGGING_FACE, "meta": META},
    open_vocabulary=("debugmodel",),
    settings=Llama3Config,
)
