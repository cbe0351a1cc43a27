"""Facts about decoders, from their arguments: initial weights, cost of a token, roles in tensor
parallelism. `decoder_spec` makes the spec of a family of them.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType

from torch import nn

from torchtitan.config import ConfigError
from torchtitan.models.decoder import (
    AheadModule,
    BlockBuilder,
    Decoder,
    DecoderArgs,
    TransformerBlock,
)
from torchtitan.models.decoder_settings import DecoderConfig
from torchtitan.models.spec import (
    AttentionShape,
    InitialWeight,
    MinShape,
    ModelSpec,
    SampleShapes,
    TensorRole,
    TensorSplits,
    WeightFormat,
    shapes_of_tokens,
)
from torchtitan.models.width import growth, without_base


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    layers = model.get_submodule("layers")
    return {f"layers.{name}": block for name, block in layers.named_children()}


def auxiliary_blocks(model: nn.Module) -> dict[str, nn.Module]:
    modules = getattr(model, "auxiliary", None) or nn.ModuleDict()
    found = {name: m for name, m in modules.named_children() if isinstance(m, AheadModule)}
    return {f"auxiliary.{name}.block": module.block for name, module in found.items()}


def init_std(args: DecoderArgs, name: str) -> InitialWeight:
    """Return 0.02, or less for weights that add to the residual stream.

    The scaling by 1/sqrt(2 * layers), as in GPT-2, keeps depth from inflating the stream, to which
    each layer adds twice.
    """
    if name.endswith("norm.weight"):
        return "zeros" if args.norm == "offset" else "ones"
    if name.rpartition(".")[2] in ("bias", "logit_bias", "b1", "b2", "b3"):
        return "zeros"
    if name.endswith((".wo.weight", ".w2.weight", ".experts.w2")):
        return 0.02 / math.sqrt(2 * args.n_layers)
    return 0.02


def shapes(args: DecoderArgs, seq_len: int) -> SampleShapes:
    """Return the shapes of a sample; embeddings of later tokens accompany its hidden states."""
    return shapes_of_tokens(args, seq_len)._replace(extra_hidden=args.multi_token)


def of_block(args: DecoderArgs, name: str) -> DecoderArgs:
    """Return the arguments of a block by its name; blocks after the last are all alike."""
    number = name.removeprefix("layers.")
    return args.of_layer(int(number) if number.isdigit() else args.n_layers)


def flops_of(args: DecoderArgs, seq_len: int, name: str) -> int:
    """Return the floating-point operations of one token's forward and backward in a module.

    A weight costs 2 in the forward and 4 in the backward (https://arxiv.org/abs/2001.08361,
    appendix B of https://arxiv.org/abs/2204.02311); the input embedding is a look-up and costs
    nothing. The output is a matrix product, tied or not, once more for each depth of multi-token
    prediction. Attention multiplies S keys and S values per token and head dimension, with no
    discount for the masked half, or as many as a window has.
    """
    dim, own = args.dim, of_block(args, name)
    parameters = args.attention_parameters + own.ffn_parameters
    parameters += args.block_norms * args.norm_parameters
    attended = min(own.sliding_window or seq_len, seq_len)  # keys per token
    block = 6 * (parameters + args.attended_size * attended)
    output = 6 * args.vocab_size * dim
    if name.startswith("layers."):
        return block
    if name == "auxiliary":
        of_depth = block + 6 * (2 * dim * dim + 3 * args.norm_parameters) + output
        of_heads = sum(head.flops(dim) for head in args.auxiliary_heads)
        return args.multi_token * of_depth + of_heads
    return {"norm": 6 * args.norm_parameters, "output": output}.get(name, 0)


def flops_per_unit(args: DecoderArgs, seq_len: int) -> int:
    """Return the floating-point operations of a token in the whole model."""
    names = ("norm", "output", "auxiliary", *(f"layers.{i}" for i in range(args.n_layers)))
    return sum(flops_of(args, seq_len, name) for name in names)


def attention(args: DecoderArgs) -> AttentionShape:
    """Return the sizes of attention, equal in all blocks but for the window of some."""
    return AttentionShape(
        heads=args.n_heads,
        kv_heads=args.n_kv_heads,
        head_dim=args.head_size,
        window=args.sliding_window,
        has_norms=args.head_norms or args.joint_norms,
        is_mixed=args.sliding_window > 0 and 0 < args.full_every <= args.n_layers,
    )


def tensor_splits(args: DecoderArgs) -> TensorSplits:
    """Return the sizes that tensor-parallel ranks and FSDP must divide."""
    heads = {"heads": args.n_heads, "key/value heads": args.n_kv_heads}
    return TensorSplits(heads, {"dim": args.dim})


def heads(args: DecoderArgs, name: str) -> tuple[int, int] | None:
    """Return the dim of a parameter's heads, and their number."""
    found = {
        "wq": (0, args.n_heads),
        "wq_b": (0, args.n_heads),
        "wkv_b": (0, args.n_heads),
        "wk": (0, args.n_kv_heads),
        "wv": (0, args.n_kv_heads),
        "wo": (1, args.n_heads),
    }
    return found.get(name.removesuffix(".weight").rpartition(".")[2])


def shrink(args: DecoderArgs, needed: MinShape) -> DecoderArgs:
    """Return the same structure in heads of 8: grouped queries, ratios of widths, tied or not."""
    tp, head_dim = needed.tensor_ranks, 8
    n_kv_heads = min(args.n_kv_heads, max(tp, 2))
    n_heads = n_kv_heads * min(args.n_heads // args.n_kv_heads, 4)
    narrower = args.dim / (args.n_heads * args.head_size)  # residual stream to all heads together
    dim = math.ceil(n_heads * head_dim * narrower / (tp * 8)) * tp * 8
    return dataclasses.replace(
        args,
        dim=dim,
        n_layers=needed.n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        ffn_dim=math.ceil(dim * args.ffn_dim / args.dim / (tp * 8)) * tp * 8,
        vocab_size=needed.vocab_size,
        head_dim=args.head_dim and head_dim,
        full_every=min(args.full_every, 2),
        base_width=args.base_width
        and n_heads * max(args.base_width * dim // (args.dim * n_heads), 1),
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
"""Tensor-parallel roles of the modules in a block of Llama's kind."""
SANDWICH_PLAN: dict[str, TensorRole] = {
    **BLOCK_PLAN,
    "attention_out_norm": "norm",
    "ffn_out_norm": "norm",
}


def tensor_plan(
    block_plan: Mapping[str, TensorRole], head_norms: TensorRole | None
) -> dict[str, TensorRole]:
    """Return the role of each module in tensor parallelism.

    Args:
        head_norms: that of the norms of queries and keys, if there are any.
    """
    norms = ("attention.q_norm", "attention.k_norm")
    of_block = {**block_plan, **(dict.fromkeys(norms, head_norms) if head_norms else {})}
    return {
        "tok_embeddings": "embedding",
        **{f"layers.*.{name}": role for name, role in of_block.items()},
        "norm": "norm",
        "output": "logits",
        **{f"auxiliary.*.block.{name}": role for name, role in of_block.items()},
        "auxiliary.*.hidden_norm": "norm",
        "auxiliary.*.token_norm": "norm",
        "auxiliary.*.project": "norm",
        "auxiliary.*.norm": "norm",
        "auxiliary.*.predict": "norm",
    }


def decoder_spec(
    *,
    name: str,
    flavors: Mapping[str, DecoderArgs],
    settings: type[DecoderConfig],
    formats: Mapping[str, WeightFormat[DecoderArgs]] = MappingProxyType({}),
    open_vocabulary: Collection[str] = (),
    block: BlockBuilder = TransformerBlock,
    block_plan: Mapping[str, TensorRole] = BLOCK_PLAN,
    optional: Collection[str] = (),
) -> ModelSpec[DecoderArgs]:
    """Return the spec of a family of decoders.

    Args:
        block: class of its blocks.
        block_plan: tensor-parallel roles of the modules in a block, without those of head norms.
        optional: names in `block_plan` of modules that only some blocks have.

    `ModelSpec` describes the other arguments.
    """
    kinds = {(args.head_norms, args.joint_norms, args.qkv_bias) for args in flavors.values()}
    if len(kinds) != 1:
        raise ConfigError(
            f"{name}: flavors differ in head_norms, joint_norms or qkv_bias; use two families"
        )
    ((each, jointly, biased),) = kinds
    return ModelSpec(
        name=name,
        flavors=flavors,
        build=partial(Decoder, block=block),
        blocks=blocks,
        init_std=init_std,
        growth=growth,
        without_base=without_base,
        before_blocks=("tok_embeddings",),
        after_blocks=("norm", "output"),
        auxiliary="auxiliary",
        auxiliary_blocks=auxiliary_blocks,
        tensor_plan=tensor_plan(
            block_plan, "head_norm" if each else "joint_norm" if jointly else None
        ),
        optional=tuple(f"layers.*.{name}" for name in optional),
        tensor_splits=tensor_splits,
        flops_per_unit=flops_per_unit,
        flops_of=flops_of,
        heads=heads,
        attention=attention,
        tied=lambda args: args.tied,
        queries_and_keys=None if each or jointly or biased else ("wq", "wk"),
        shrink=shrink,
        shapes=shapes,
        formats=formats,
        open_vocabulary=open_vocabulary,
        settings=settings,
    )
