"""Decoders in Hugging Face transformers' format, for all families.

The weights are the same under other names, except for the rows of the query and key projections.
There the rotary embedding pairs element i of a head with element i + E/2; Meta's, and ours, pairs
neighbours. So within each head the even rows come first there, then the odd ones.

`config.json` is written in the older form (`rope_theta` and `rope_scaling`), which every version of
transformers reads; the newer one (`rope_parameters`) is read too.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchtitan.config import RecipeError, show
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.decoder_settings import DecoderConfig
from torchtitan.models.layers import Linear, RopeScaling, Scaling, Yarn
from torchtitan.models.settings import MAX_LAYERS
from torchtitan.models.spec import WeightFormat

MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention.wq": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.wk": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.wv": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    "layers.*.attention.wo": "model.layers.*.self_attn.o_proj",
    "layers.*.attention.wq_a": "model.layers.*.self_attn.q_a_proj",
    "layers.*.attention.wq_a_norm": "model.layers.*.self_attn.q_a_layernorm",
    "layers.*.attention.wq_b": "model.layers.*.self_attn.q_b_proj",
    "layers.*.attention.wkv_a": "model.layers.*.self_attn.kv_a_proj_with_mqa",
    "layers.*.attention.wkv_a_norm": "model.layers.*.self_attn.kv_a_layernorm",
    "layers.*.attention.wkv_b": "model.layers.*.self_attn.kv_b_proj",
    "layers.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.feed_forward.w1": "model.layers.*.mlp.gate_proj",
    "layers.*.feed_forward.w2": "model.layers.*.mlp.down_proj",
    "layers.*.feed_forward.w3": "model.layers.*.mlp.up_proj",
    "layers.*.mixture.router": "model.layers.*.mlp.gate",
    "layers.*.mixture.shared.w1": "model.layers.*.mlp.shared_experts.gate_proj",
    "layers.*.mixture.shared.w2": "model.layers.*.mlp.shared_experts.down_proj",
    "layers.*.mixture.shared.w3": "model.layers.*.mlp.shared_experts.up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}
"""Their module names by ours; `*` is the number of a block."""
ROUTER = {"weight": "weight", "bias": "e_score_correction_bias"}
"""Their names of the weights of a router."""
EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Their names of the matrices of an expert by ours, which are one parameter for all experts."""
FUSED = {
    ".experts.gate_up_proj": (".experts.*.gate_proj.weight", ".experts.*.up_proj.weight"),
    ".experts.down_proj": (".experts.*.down_proj.weight",),
}
"""Names of the matrices of all experts in one tensor, as transformers 5 has them in memory."""

LOCAL_BASE = "rope_local_base_freq"
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "partial_rotary_factor": 1.0,
    "mlp_bias": False,
}
"""Options with the only values that decoders here have."""
UNSUPPORTED = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope_interleaved",
    LOCAL_BASE,
    "qkv_bias",
)
"""Options that no decoder here has."""
SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}
YARN = {
    "factor": "factor",
    "original_context": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
KINDS: dict[type[Scaling], tuple[str, dict[str, str]]] = {
    RopeScaling: ("llama3", SCALING),
    Yarn: ("yarn", YARN),
    Linear: ("linear", {"factor": "factor"}),
}
"""Their name of each scaling, and of its fields."""
YARN_REQUIRED = ("factor", "original_max_position_embeddings")
"""Fields without which YaRN is not known; the others have defaults."""
NOT_OF_SCALING = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
"""Keys next to the fields of a scaling."""
ROPES = ("rope_scaling", "rope_parameters")
"""Descriptions of RoPE: in the older form, and since transformers 5."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of blocks, for each of which transformers 5 may describe RoPE."""
SAME = (
    ("torch_dtype", "dtype"),
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("num_experts_per_tok", "experts_per_token"),
    ("hidden_act", "hidden_activation"),
    ("head_dim", "qk_rope_head_dim"),
)
"""Names of one fact."""
IN_ROPE = (
    ("rope_theta", "rope_theta"),
    ("partial_rotary_factor", "partial_rotary_factor"),
    ("original_max_position_embeddings", "original_max_position_embeddings"),
    ("original_max_position_embeddings", "initial_context_length"),
)
"""Facts inside the description of RoPE, with their names outside of it."""
THEIRS = {
    **SIZES,
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
"""Their keys by those of `[model]`, where they differ."""


def name(ours: str, modules: Mapping[str, str] = MODULES) -> str:
    module, _, kind = ours.rpartition(".")
    block = re.search(r"\.(\d+)\.", module)
    if module.endswith(".experts"):
        return f"model.layers.{block[1]}.mlp.experts.*.{EXPERTS[kind]}.weight" if block else ""
    theirs = modules[re.sub(r"\.\d+\.", ".*.", module)]
    if theirs.endswith(".gate"):
        kind = ROUTER[kind]
    return f"{theirs.replace('*', block[1]) if block else theirs}.{kind}"


def rows(args: DecoderArgs, ours: str) -> Tensor | None:
    """Return the row permutation of queries and keys, and of their norms.

    Row 2i of a head is there row i, and 2i + 1 is i + E/2.
    """
    counts = {"wq": args.n_heads, "wk": args.n_kv_heads}
    norms = (args.n_heads, args.n_kv_heads) if args.joint_norms else (1, 1)
    counts |= dict(zip(("q_norm", "k_norm"), norms, strict=True))
    heads = counts.get(ours.split(".")[-2])
    if heads is None:
        return None
    theirs = torch.arange(heads * args.head_size).view(heads, 2, args.head_size // 2)
    return theirs.transpose(1, 2).flatten()


def layer_types(n_layers: int, full_every: int) -> list[str]:
    """Return the kind of attention of each block; see `DecoderArgs.full_every`."""
    return [
        FULL if full_every and number % full_every == 0 else SLIDING
        for number in range(1, n_layers + 1)
    ]


def window_of(config: Mapping[str, Any], kinds: Sequence[str]) -> Any:
    """Return the window of the blocks that have one by their kinds; None: none has."""
    if SLIDING not in kinds:
        return None
    if config["sliding_window"] is None:
        raise RecipeError(["sliding_window: got nothing; blocks of sliding_attention need one"])
    return config["sliding_window"]


def windows(config: Mapping[str, Any], usual: Any) -> tuple[int, Any]:
    """Return which blocks have no window, as in `DecoderArgs.full_every`, and that of the others.

    Args:
        usual: the former, unless `layer_types` says otherwise.
    """
    if not isinstance(usual, int) or usual < 0:
        raise RecipeError([f"sliding_window_pattern: got {show(usual)}; wanted an integer from 0"])
    n_layers = config.get("num_hidden_layers") or 0
    kinds = (n_layers and config.get("layer_types")) or layer_types(n_layers, usual)
    if not isinstance(kinds, list) or len(kinds) != n_layers:
        got = f"{len(kinds)} blocks" if isinstance(kinds, list) else show(kinds)
        message = f"num_hidden_layers {n_layers} and layer_types of {got}; make them equal"
        raise RecipeError([message])
    if kinds in (layer_types(n_layers, usual), layer_types(n_layers, 1)):
        return usual, window_of(config, kinds)
    full_every = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
    if kinds != layer_types(n_layers, full_every):
        wanted = "sliding_attention, with full_attention in every n-th block"
        raise RecipeError([f"layer_types: got {show(kinds)}; wanted {wanted}"])
    return full_every, window_of(config, kinds)


def config_of(args: DecoderArgs, seq_len: int | None) -> dict[str, Any]:
    """Return the part of config.json that all decoders have."""
    scaling = args.rope_scaling
    published = 8192 if scaling is None else 131_072
    kind, fields = KINDS[type(scaling) if scaling else RopeScaling]
    return {
        **{theirs: getattr(args, ours) for ours, theirs in SIZES.items()},
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": seq_len or published,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": kind,
            **{theirs: getattr(scaling, ours) for ours, theirs in fields.items()},
        },
        "tie_word_embeddings": args.tied,
    }


def args_in(
    config: Mapping[str, Any],
    family: type[DecoderConfig],
    fixed: Mapping[str, Any],
    *,
    window: Any = None,
    layers_key: str = "layer_types",
    **own: Any,
) -> DecoderArgs:
    """Read arguments from config.json; absent keys have transformers' defaults.

    Args:
        fixed: options of the architecture, with the only values that the family supports.
        window: sliding window of every block, if they have one.
        layers_key: key that decides which blocks have the window.
        own: arguments that the architecture writes in its own way.

    Raises:
        RecipeError: with everything that is not supported.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    problems: list[str] = []
    if not isinstance(rope, Mapping):
        problems.append(f"rope_scaling: got {show(rope)}; wanted an object")
        rope = {}
    # transformers 5 writes partial_rotary_factor with the other parameters of RoPE.
    problems += unsupported({**rope, **config}, {**FIXED, **fixed}, family)
    kind = "full_attention" if window is None else "sliding_attention"
    kinds = config.get("layer_types") or [kind]
    if not isinstance(kinds, list) or any(each != kind for each in kinds):
        got = " and ".join(dict.fromkeys(map(show, kinds))) if isinstance(kinds, list) else kinds
        problems.append(f"{layers_key}: got {got} blocks; wanted {kind} in all")
    elif config.get(layers_key) == kinds and len(kinds) != config.get("num_hidden_layers"):
        got = f"num_hidden_layers {config.get('num_hidden_layers')}"
        problems.append(f"{got} and layer_types of {len(kinds)} blocks; make them equal")
    if window == 0:  # of no token at all, where 0 here is no window
        problems.append("sliding_window: got 0; wanted at least 1, or null for no window")
    theta = rope.get("rope_theta") or config.get("rope_theta", 10_000.0)
    scaling: Scaling | None = None
    try:
        scaling = rope_scaling(rope, type(family.unscaled))
    except RecipeError as error:
        problems += error.lines
    sizes: dict[str, Any] = {ours: config.get(theirs) for ours, theirs in SIZES.items()}
    sizes |= {
        "n_kv_heads": config.get("num_key_value_heads") or sizes["n_heads"],
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tied": config.get("tie_word_embeddings", False),
        "sliding_window": 0 if window is None else window,
    }
    fields = KINDS[type(family.unscaled)][1]
    of_rope = {key: f"rope_scaling.{fields[ours]}" for key, ours in family.rope.items()}
    theirs = {**THEIRS, **of_rope, **family.theirs}
    return family.checked(family.args_type(**sizes | own), theirs, problems)


def with_usual_heads(args: DecoderArgs) -> DecoderArgs:
    """Return the same arguments, without a size of heads that is dim / n_heads anyway."""
    usual = replace(args, head_dim=None)
    return usual if usual.head_size == args.head_size else args


def agreed(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a config.json with the facts that are in two places in one, and its problems.

    Each is a fact with two values, and both of them, or with no possible one.

    Raises:
        RecipeError: if the number of blocks is no possible one.
    """
    problems = list(_malformed(config))
    parts = {key: config[key] for key in ROPES if isinstance(config.get(key), Mapping)}
    named = [{key: config.get(key) for key in keys} for keys in SAME]
    if parts.get("rope_parameters", {}).keys() & {FULL, SLIDING}:
        ropes = parts.pop("rope_parameters")
        problems += _unlike_kinds(ropes)
        full, local = (
            rope if isinstance(rope := ropes.get(kind), Mapping) else {} for kind in (FULL, SLIDING)
        )
        place, theta = f"rope_parameters.{SLIDING}.rope_theta", local.get("rope_theta")
        named.append({LOCAL_BASE: config.get(LOCAL_BASE), place: theta})
        config = {**config, **({} if theta is None else {LOCAL_BASE: theta})}
        config["rope_parameters"] = parts[f"rope_parameters.{FULL}"] = full
    parts = {key: rope for key, rope in parts.items() if rope}
    for key, rope in parts.items():
        named.append({f"{key}.{kind}": rope.get(kind) for kind in ("rope_type", "type")})
        for inner, outer in IN_ROPE:
            named.append({outer: config.get(outer), f"{key}.{inner}": rope.get(inner)})
    listed = config.get("architectures")
    said = str(listed[0] if isinstance(listed, list) and listed else listed).lower()
    kind = str(config.get("model_type") or "").replace("_", "").lower().removesuffix("text")
    if kind and said.endswith("forcausallm") and said != f"{kind}forcausallm":
        named.append({"model_type": config["model_type"], "architectures": listed})
    if len(parts) == 2:
        ropes = {
            key: {"rope_type": rope.get("type", "default"), **rope} for key, rope in parts.items()
        }
        for inner in sorted({name for rope in ropes.values() for name in rope} - {"type"}):
            named.append({f"{key}.{inner}": rope.get(inner) for key, rope in ropes.items()})
    for values in named:
        known = {key: value for key, value in values.items() if value is not None}
        if any(_plain(value) != _plain(next(iter(known.values()))) for value in known.values()):
            got = " and ".join(f"{key} {show(value)}" for key, value in known.items())
            problems.append(f"{got} are one fact with two values; make them equal, or remove one")
    if len(parts) < 2:
        return dict(config), problems
    # Of two kinds, the one that needs the other keys: without it, they would be a mistake too.
    scaled_last = sorted(parts.values(), key=lambda rope: rope.get("rope_type") != "default")
    whole = {key: value for rope in scaled_last for key, value in rope.items()}
    return {**config, "rope_parameters": whole}, problems


def _unlike_kinds(ropes: Mapping[str, Any]) -> Iterator[str]:
    """Find what descriptions of RoPE for each kind of blocks cannot have."""
    for kind, rope in ropes.items():
        if kind not in (FULL, SLIDING) or not isinstance(rope, Mapping | None):
            wanted = f"an object for {FULL}, and one for {SLIDING}"
            yield f"rope_parameters.{kind}: got {show(rope)}; wanted {wanted}"
        elif kind == SLIDING and rope and rope.get("rope_type", "default") != "default":
            got = show(rope["rope_type"])
            yield f'rope_parameters.{kind}.rope_type: got {got}; supported: "default"'


def _malformed(config: Mapping[str, Any]) -> Iterator[str]:
    """Find facts that are not of their type."""
    layers = config.get("num_hidden_layers")
    if layers is not None and not is_number(layers):
        raise RecipeError([f"num_hidden_layers: got {show(layers)}; wanted a number"])
    if layers is not None and layers > MAX_LAYERS:
        raise RecipeError([f"num_hidden_layers: got {layers}; wanted at most {MAX_LAYERS:,}"])
    if not isinstance(uses := config.get("use_sliding_window"), bool | None):
        yield f"use_sliding_window: got {show(uses)}; wanted true or false"
    context = config.get("max_position_embeddings")
    if context is not None and (not is_number(context) or context < 1):
        yield f"max_position_embeddings: got {show(context)}; wanted an integer above 0"
    for key in ("bos_token_id", "eos_token_id"):
        found = config.get(key)
        ids = found if isinstance(found, list) else [found]
        if not all(token is None or is_number(token) for token in ids):
            yield f"{key}: got {show(found)}; wanted the id of a token, or a list of ids"


def is_number(value: Any) -> bool:
    """Whether a value of JSON is an integer, which true is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """Return a value as it is compared; dtypes may be written as torch names them."""
    return value.removeprefix("torch.") if isinstance(value, str) else value


def inexpressible(args: Any, has: Mapping[str, Any], architecture: str) -> Iterator[str]:
    """Find sizes of ours of which an architecture has another value only."""
    for key, value in has.items():
        if (got := getattr(args, key)) != value:
            yield f"{key}: got {show(got)}; {architecture} has {show(value)}"


def unsupported(
    found: Mapping[str, Any], fixed: Mapping[str, Any], family: type[DecoderConfig]
) -> Iterator[str]:
    """Find options of an architecture that a family does not have."""
    name = family.__name__.removesuffix("Config").lower()
    for key, value in fixed.items():
        if found.get(key, value) != value:
            wanted = "the architecture has none" if value is None else f"{name} has {show(value)}"
            yield f"{key}: got {show(found[key])}; {wanted}"
    for key in UNSUPPORTED:
        if found.get(key):
            yield f"{key}: got {show(found[key])}; not supported by {name}"
    if found.get("quantization_config"):
        yield "quantization_config: quantized weights cannot be read"


def rope_scaling(rope: Mapping[str, Any], supported: type[Scaling] = RopeScaling) -> Scaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        if more := rope.keys() - {*NOT_OF_SCALING}:
            raise RecipeError([f"rope_scaling: got {', '.join(sorted(more))} without a rope_type"])
        return None
    name, fields = KINDS[supported]
    if kind != name:
        raise RecipeError([f'rope_scaling: got {show(kind)}; supported: "{name}", or none'])
    required = YARN_REQUIRED if supported is Yarn else fields.values()
    if absent := [theirs for theirs in required if rope.get(theirs) is None]:
        raise RecipeError([f"rope_scaling: it has no {', '.join(absent)}"])
    if supported is Yarn and (rest := rope.keys() - {*fields.values(), *NOT_OF_SCALING}):
        raise RecipeError([f"rope_scaling: got {', '.join(sorted(rest))}; not supported"])
    if supported is Yarn and rope.get("mscale_all_dim") and not rope.get("mscale"):
        raise RecipeError(
            [
                f"rope_scaling: got mscale_all_dim {show(rope['mscale_all_dim'])} without mscale, "
                "which transformers and the published code of DeepSeek read in two ways; set both"
            ]
        )
    found = {ours: rope.get(theirs) for ours, theirs in fields.items()}
    scaling = supported(**{ours: value for ours, value in found.items() if value is not None})
    return None if scaling.factor == 1 else scaling


def _read(
    content: Mapping[str, Any], args: Callable[[Mapping[str, Any]], DecoderArgs]
) -> DecoderArgs:
    """Read arguments from a config.json, in which all mistakes are found together."""
    config, problems = agreed(content)
    try:
        found = args(config)
    except RecipeError as error:
        problems += (line for line in error.lines if line not in problems)
    if problems:
        raise RecipeError(problems)
    return found


def decoder_format(
    *,
    architectures: Sequence[str],
    config: Callable[[DecoderArgs, int | None], dict[str, Any]],
    args: Callable[[Mapping[str, Any]], DecoderArgs],
    rows: Callable[[DecoderArgs, str], Tensor | None] = rows,
    **own: Any,
) -> WeightFormat[DecoderArgs]:
    """Return the format of a family; `WeightFormat` describes the arguments."""
    usual: dict[str, Any] = {"name": name, "fused": FUSED}
    return WeightFormat(
        **usual | own,
        architectures=architectures,
        config=config,
        args=lambda content: _read(content, args),
        rows=rows,
        repeated=lambda args: {"lm_head.weight": "tok_embeddings.weight"} if args.tied else {},
        computed=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    )
