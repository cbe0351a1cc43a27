"""A model, a text and recipes small enough to train in a test."""

import dataclasses
from pathlib import Path

from torch import nn

from torchtitan import checks
from torchtitan.config import PlannedWorld, all_sections, sections
from torchtitan.data import SOURCES
from torchtitan.data.documents import JsonlDocuments
from torchtitan.data.sources import ShuffledDocuments
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.deepseek_v3 import DEEPSEEK_V3
from torchtitan.models.gemma3 import GEMMA3
from torchtitan.models.gpt_oss import GPT_OSS, GptOssArgs
from torchtitan.models.latent_attention import LatentArgs
from torchtitan.models.layers import Linear, Yarn
from torchtitan.models.llama3 import LLAMA3
from torchtitan.models.mixtral import MIXTRAL
from torchtitan.models.olmo2 import OLMO2
from torchtitan.models.qwen2 import QWEN2
from torchtitan.models.qwen3 import QWEN3
from torchtitan.models.qwen3_moe import QWEN3_MOE
from torchtitan.models.sparse_decoder import SparseArgs
from torchtitan.optim import name_parameters

ARGS = DecoderArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=300)

SECTIONS = {
    "model": {"name": "tiny", "flavor": "tiny"},
    "training": {
        "local_batch_size": 2,
        "global_batch_size": 8,
        "seq_len": 32,
        "steps": 3,
        "mixed_precision_param": "float32",
    },
    "lr_scheduler": {"warmup_steps": 2},
    "activation_checkpoint": {"mode": "none"},
    "metrics": {"log_freq": 1},
    # Most tests look at what is trained, not at what is saved.
    "checkpoint": {"enable": False},
}

VIT_MAE = {"name": "vit_mae", "flavor": "debugmodel", "dim": 32, "n_layers": 3, "ffn_dim": 64}
VIT_MAE |= {"image_size": 16, "decoder_dim": 16, "decoder_ffn_dim": 32}
"""The section of a model of images."""

FLAVORS = {
    "tiny": ARGS,
    "tied": dataclasses.replace(ARGS, tied=True),
    "wide": dataclasses.replace(ARGS, dim=64),
    # Matrices large enough for optimizer states in few bits, also in four parts.
    "square": dataclasses.replace(
        ARGS, dim=128, n_heads=8, n_kv_heads=4, ffn_dim=128, vocab_size=320
    ),
    "short": dataclasses.replace(ARGS, n_layers=1),
    # Enough of everything for four ranks of any axis, and a vocabulary that nothing divides.
    "deep": dataclasses.replace(ARGS, n_layers=6, n_heads=8, n_kv_heads=4, vocab_size=301),
    # Matrices whose halves are in multiples of 32, as converters need them.
    "even": dataclasses.replace(
        ARGS, n_layers=2, dim=64, n_kv_heads=4, ffn_dim=128, vocab_size=301
    ),
    "flat": dataclasses.replace(ARGS, n_layers=2, n_heads=8, n_kv_heads=4, vocab_size=301),
}
TEXT = Path(__file__).parent / "text"


def open_text(dataset, config, tokenizer, seed):
    """The text of the tests: the running Python's library would give other numbers on another."""
    documents = JsonlDocuments([TEXT / f"{dataset.split}.jsonl"], "text", TEXT)
    return ShuffledDocuments("text of the tests", documents, seed=seed, shuffle=config.shuffle)


SOURCES._entries["python_stdlib"] = open_text
# Known by name in every process that imports this, as a model outside the tree would be.
MODELS["tiny"] = dataclasses.replace(LLAMA3, name="tiny", flavors=FLAVORS)
# Norms in heads that are wider than dim / heads.
FACTS = {"head_norms": True, "head_dim": 16}
NORMED = {name: dataclasses.replace(args, **FACTS) for name, args in FLAVORS.items()}
MODELS["tiny_qwen3"] = dataclasses.replace(QWEN3, name="tiny_qwen3", flavors=NORMED)
# Experts that four shards do not divide, and a first block without.
ROUTED = {"n_experts": 6, "top_k": 2, "expert_dim": 48, "dense_layers": 1}
SPARSE = {
    name: SparseArgs(**vars(args), **ROUTED) for name, args in NORMED.items() if args.n_layers > 1
}
MODELS["tiny_sparse"] = dataclasses.replace(QWEN3_MOE, name="tiny_sparse", flavors=SPARSE)
# Each width another, and groups of experts, one of them shared.
WIDTHS = {"query_rank": 24, "latent_rank": 16, "plain_dim": 8, "rotated_dim": 4, "value_dim": 10}
GROUPED = {"shared_dim": 32, "router_scale": 2.5, "expert_groups": 3, "top_groups": 2}
LATENT = {
    **ROUTED,
    **WIDTHS,
    **GROUPED,
    "router_scores": "sigmoid",
    "router_bias": True,
    "rope_scaling": Yarn(factor=4.0, original_context=16, mscale_all_dim=1.0),
}
LATENTS = {
    name: LatentArgs(**vars(args) | LATENT | {"n_kv_heads": args.n_heads})
    for name, args in FLAVORS.items()
    if args.n_layers > 1
}
MODELS["tiny_latent"] = dataclasses.replace(DEEPSEEK_V3, name="tiny_latent", flavors=LATENTS)
# Every second block with a window, and a limit of experts that many rows reach.
OSS = {
    **{key: value for key, value in ROUTED.items() if key != "dense_layers"},
    "ffn_dim": 48,
    "head_dim": 16,
    "sliding_window": 9,
    "full_every": 2,
    "qkv_bias": True,
    "swiglu_limit": 0.1,
    "rope_scaling": Yarn(factor=4.0, original_context=16, truncate=False),
}
OSSES = {
    name: GptOssArgs(**vars(args) | OSS) for name, args in FLAVORS.items() if args.n_layers > 1
}
MODELS["tiny_oss"] = dataclasses.replace(GPT_OSS, name="tiny_oss", flavors=OSSES)

MIXED = {
    name: SparseArgs(**vars(args) | {"ffn_dim": 48}, n_experts=6, top_k=2, expert_dim=48)
    for name, args in FLAVORS.items()
}
MODELS["tiny_mixtral"] = dataclasses.replace(MIXTRAL, name="tiny_mixtral", flavors=MIXED)
BIASED = {name: dataclasses.replace(args, qkv_bias=True) for name, args in FLAVORS.items()}
MODELS["tiny_qwen2"] = dataclasses.replace(QWEN2, name="tiny_qwen2", flavors=BIASED)
JOINED = {name: dataclasses.replace(args, joint_norms=True) for name, args in FLAVORS.items()}
MODELS["tiny_olmo2"] = dataclasses.replace(OLMO2, name="tiny_olmo2", flavors=JOINED)
# Blocks of both kinds, whose rotary frequencies differ, and logits of another scale.
GEMMA = {
    "head_norms": True,
    "norm": "offset",
    "block_norms": 4,
    "activation": "gelu_tanh",
    "scaled_embeddings": True,
    "head_dim": 16,
    "query_scalar": 24,
    "local_rope_theta": 100.0,
    "sliding_window": 9,
    "full_every": 2,
    "rope_scaling": Linear(factor=2.0),
}
GEMMAS = {name: dataclasses.replace(args, **GEMMA) for name, args in FLAVORS.items()}
MODELS["tiny_gemma3"] = dataclasses.replace(GEMMA3, name="tiny_gemma3", flavors=GEMMAS)


def problems(job, device_type="cpu", severity="error", ranks=None):
    """What is wrong with a recipe on this machine, if it had a device of that kind; or notes."""
    found = checks.problems(job, PlannedWorld(ranks, device_type, is_here=True))
    return [problem for problem in found if problem.severity == severity]


def job(dump_folder="unused", **sections):
    """The tiny recipe with the given keys changed, section by section."""
    names = SECTIONS.keys() | sections.keys()
    merged = {name: SECTIONS.get(name, {}) | sections.get(name, {}) for name in names}
    # Most tests have nowhere to write to.
    merged["metrics"] = {"save_events": str(dump_folder) != "unused"} | merged["metrics"]
    merged["job"] = merged.get("job", {}) | {"dump_folder": str(dump_folder)}
    return JobConfig.model_validate(merged)


def help_text(schema):
    """A schema as the text of `--help`: a line of each section and of each setting."""
    lines = []
    for section in sections(all_sections(schema)):
        lines.append(f"{section.title}: {section.about}")
        lines += [f"  --{e.path}  ({e.allowed}; default: {e.default})" for e in section.entries]
    return "\n".join(lines)


def named(network):
    """Parameters of a network without a spec, as an optimizer sees them.

    Tables are embeddings, other matrices are matrices, and the rest are norms.
    """
    tables = {name for name, module in network.named_modules() if isinstance(module, nn.Embedding)}

    def role(name, ndim):
        if name.rpartition(".")[0] in tables:
            return "embedding"
        return "matrix" if ndim > 1 else "norm"

    return name_parameters([network], role)
