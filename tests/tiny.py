"""A model, a text and recipes small enough to train in a test."""

import dataclasses
from pathlib import Path

from torch import nn

from tests.tables import data
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

YARN = {"factor": 4.0, "original_context": 16}
ARGS = DecoderArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=300)

TABLE = data(__file__)
SECTIONS, VIT_MAE = TABLE["recipe"], TABLE["vit_mae"]
FLAVORS = {name: dataclasses.replace(ARGS, **sizes) for name, sizes in TABLE["flavors"].items()}
TEXT = Path(__file__).parent / "text"


def open_text(dataset, config, tokenizer, seed):
    """The text of the tests: the running Python's library would give other numbers on another."""
    documents = JsonlDocuments([TEXT / f"{dataset.split}.jsonl"], "text", TEXT)
    return ShuffledDocuments("text of the tests", documents, seed=seed, shuffle=config.shuffle)


SOURCES._entries["python_stdlib"] = open_text
# Known by name in every process that imports this, as a model outside the tree would be.
MODELS["tiny"] = dataclasses.replace(LLAMA3, name="tiny", flavors=FLAVORS)
# Norms in heads that are wider than dim / heads.
NORMED = {name: dataclasses.replace(args, **TABLE["normed"]) for name, args in FLAVORS.items()}
MODELS["tiny_qwen3"] = dataclasses.replace(QWEN3, name="tiny_qwen3", flavors=NORMED)
# Experts that four shards do not divide, and a first block without.
SPARSE = {
    name: SparseArgs(**vars(args) | TABLE["routed"] | {"dense_layers": 1})
    for name, args in NORMED.items()
    if args.n_layers > 1
}
MODELS["tiny_sparse"] = dataclasses.replace(QWEN3_MOE, name="tiny_sparse", flavors=SPARSE)
# Each width another, and groups of experts, one of them shared.
LATENT = TABLE["routed"] | TABLE["latent"] | {"rope_scaling": Yarn(**YARN, mscale_all_dim=1.0)}
LATENTS = {
    name: LatentArgs(**vars(args) | LATENT | {"n_kv_heads": args.n_heads})
    for name, args in FLAVORS.items()
    if args.n_layers > 1
}
MODELS["tiny_latent"] = dataclasses.replace(DEEPSEEK_V3, name="tiny_latent", flavors=LATENTS)
# Every second block with a window, and a limit of experts that many rows reach.
OSS = TABLE["routed"] | TABLE["oss"] | {"rope_scaling": Yarn(**YARN, truncate=False)}
OSSES = {name: GptOssArgs(**vars(a) | OSS) for name, a in FLAVORS.items() if a.n_layers > 1}
MODELS["tiny_oss"] = dataclasses.replace(GPT_OSS, name="tiny_oss", flavors=OSSES)

MIXED = {
    name: SparseArgs(**vars(args) | TABLE["routed"] | {"ffn_dim": 48})
    for name, args in FLAVORS.items()
}
MODELS["tiny_mixtral"] = dataclasses.replace(MIXTRAL, name="tiny_mixtral", flavors=MIXED)
BIASED = {name: dataclasses.replace(args, qkv_bias=True) for name, args in FLAVORS.items()}
MODELS["tiny_qwen2"] = dataclasses.replace(QWEN2, name="tiny_qwen2", flavors=BIASED)
JOINED = {name: dataclasses.replace(args, joint_norms=True) for name, args in FLAVORS.items()}
MODELS["tiny_olmo2"] = dataclasses.replace(OLMO2, name="tiny_olmo2", flavors=JOINED)
# Blocks of both kinds, whose rotary frequencies differ, and logits of another scale.
GEMMA = TABLE["gemma"] | {"rope_scaling": Linear(factor=2.0)}
GEMMAS = {name: dataclasses.replace(args, **GEMMA) for name, args in FLAVORS.items()}
MODELS["tiny_gemma3"] = dataclasses.replace(GEMMA3, name="tiny_gemma3", flavors=GEMMAS)


def problems(job, device_type="cpu", severity="error", ranks=None):
    """What is wrong with a recipe on this machine, if it had a device of that kind; or notes."""
    found = checks.problems(job, PlannedWorld(ranks, device_type, is_here=True))
    return [problem for problem in found if problem.severity == severity]


def merged(defaults, sections):
    """Sections of a recipe, key by key; the later win."""
    return {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}


def job(dump_folder="unused", **sections):
    """The tiny recipe with the given keys changed, section by section."""
    found = merged(SECTIONS, sections)
    # Most tests have nowhere to write to.
    found["metrics"] = {"save_events": str(dump_folder) != "unused"} | found["metrics"]
    found["job"] = found.get("job", {}) | {"dump_folder": str(dump_folder)}
    return JobConfig.model_validate(found)


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
