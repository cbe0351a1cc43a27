"""The layouts that must all train the same run: one list for parity, for resume and for CUDA."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from tests import tiny
from tests.tables import data
from torchtitan.convert import CONVERTERS, ConverterConfig, LinearConverterConfig
from torchtitan.losses import AUXILIARY_LOSSES, AuxiliaryLossConfig
from torchtitan.torch_private.compiler import keeps_nodes_of_functions
from torchtitan.torch_private.torchao import quiet_torchao

with quiet_torchao():
    import torchao.float8  # noqa: F401  (4 s, which each of the forked ranks would take)

OPTIMIZERS = {"AdamW": {"lr": 1e-3}, "SGD": {"lr": 0.5, "momentum": 0.9}}


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout: its degrees, and how else its recipe differs from the one-rank one."""

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    sections: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    convert: tuple[ConverterConfig, ...] = ()
    auxiliary: tuple[AuxiliaryLossConfig, ...] = ()

    @property
    def ranks(self):
        return self.pp * self.replicate * self.shard * self.cp * self.tp

    @property
    def model(self):
        """Its changes of the model, which the run that it is compared with has too."""
        return self.sections.get("model", {})

    def of(self, **model):
        """This layout of another model."""
        return dataclasses.replace(self, sections=self.sections | {"model": self.model | model})

    @property
    def converts_linears(self):
        return any(isinstance(config, LinearConverterConfig) for config in self.convert)

    def recipe(self, **sections):
        """The sections of a recipe for this layout; `sections` win."""
        degrees = {
            "pipeline_parallel_degree": self.pp,
            "data_parallel_replicate_degree": self.replicate,
            "data_parallel_shard_degree": self.shard,
            "context_parallel_degree": self.cp,
            "tensor_parallel_degree": self.tp,
        }
        # Stages need layers; other layouts take less time with few.
        flavor = "even" if self.converts_linears else "deep" if self.pp > 1 else "flat"
        model = {"flavor": flavor}
        merged = {"model": model, "parallelism": degrees}
        for changes in (self.sections, sections):
            for name, keys in changes.items():
                merged[name] = merged.get(name, {}) | keys
        return merged


def case(pp=1, replicate=1, shard=1, cp=1, tp=1, *, batch=0, documents=False, chunk=0, **rest):
    """A layout in short: degrees, sequences in a microbatch, and keys of [parallelism].

    Of `rest`, training, recompute, sharding and communication are sections. Unless it is given, one
    replica has two microbatches to add up, several have up to two each.
    """
    batch = batch or (4 if replicate * shard == 1 else 2)
    convert, auxiliary = rest.pop("convert", ()), rest.pop("auxiliary", ())
    sections = {
        "training": {"local_batch_size": batch, **rest.pop("training", {})},
        "activation_checkpoint": rest.pop("recompute", {}),
        "model": {"attn_mask_type": "block_causal"} if documents else {},
        "loss": {"vocabulary_chunk": chunk} if chunk else {},
        **{name: rest.pop(name, {}) for name in ("sharding", "communication")},
        "parallelism": rest,
    }
    sections = {name: section for name, section in sections.items() if section}
    return Case(pp, replicate, shard, cp, tp, sections, convert, auxiliary)


def schedule(name, pp=2, **rest):
    return case(pp, batch=8, pipeline_parallel_schedule=name, **rest)


TABLE = data(__file__)
CHANGES, DAILY, GATE = TABLE["changes"], TABLE["tiers"]["daily"], TABLE["tiers"]["gate"]
AXES = {"PP": "pp", "DDP": "replicate", "FSDP": "shard", "CP": "cp", "TP": "tp"}
DEGREES = re.compile(rf"\b({'|'.join(AXES)}) (\d+)")


def changed(name, changes=CHANGES):
    """The degrees of a name, and its changes: sections of a recipe, by the words of the name."""
    plain = re.sub(r"HSDP (\d+) x", r"DDP \1 x FSDP", name)
    plain = re.sub(r"(accumulating) \d", r"\1", plain)
    degrees = {AXES[axis]: int(degree) for axis, degree in DEGREES.findall(plain)}
    sections = {}
    if experts := re.match(r"EP (\d+)(?: of (\d+))?", plain):
        degrees = degrees or {"shard": int(experts[2] or experts[1])}
        sections["parallelism"] = {"expert_parallel_degree": int(experts[1])}
    for words in plain.split(", "):
        if not (words.startswith("EP ") or DEGREES.match(words)):
            for section, keys in changes[words].items():
                merged = keys if isinstance(keys, list) else sections.get(section, {}) | keys
                sections[section] = merged
    if name_of_file := sections.get("parallelism", {}).get(CSV):
        sections["parallelism"][CSV] = str(Path(__file__).parent / "parallel" / name_of_file)
    convert = tuple(CONVERTERS[each["name"]](**each) for each in sections.pop("convert", ()))
    losses = sections.pop("auxiliary_losses", ())
    auxiliary = tuple(AUXILIARY_LOSSES[each["name"]](**each) for each in losses)
    return Case(**degrees, sections=sections, convert=convert, auxiliary=auxiliary)


def layout(name, unsaid=TABLE["unsaid"], changes=CHANGES):
    """The layout of a name, such as `HSDP 2 x 2 x TP 2, loss in chunks`.

    One replica has two microbatches to add up, several have up to two each, unless it says more.
    """
    name = ", ".join([name, *([unsaid[name]] if name in unsaid else [])])
    found = changed(name, changes)
    replicas, parallelism = found.replicate * found.shard, found.sections.get("parallelism", {})
    is_scheduled = not parallelism.keys().isdisjoint({"pipeline_parallel_schedule", CSV})
    if "accumulating" in name:
        batch = 4 if found.pp > 1 else 1
    elif found.ranks == (found.pp if is_scheduled else 1):
        batch = 8
    else:
        batch = 4 if replicas == 1 else min(2, 8 // replicas)
    training = {"local_batch_size": batch} | found.sections.get("training", {})
    return dataclasses.replace(found, sections=found.sections | {"training": training})


RESHARD, CSV = "fsdp_reshard_after_forward", "pipeline_parallel_schedule_csv"
FULL, SECOND, OPERATORS = (
    CHANGES[each]["activation_checkpoint"]
    for each in ("full recomputation", "every second block recomputed", "operators recomputed")
)
RING, NO_SEQUENCE, NO_LOSS, INTERLEAVED, ZBV = (
    CHANGES[each]["parallelism"]
    for each in (
        *("ring", "no sequence parallelism", "no loss parallelism"),
        *("Interleaved1F1B", "ZBVZeroBubble"),
    )
)
BY_DOCUMENTS = {"documents": True, "context_parallel_load_balancer": "documents"}
AFTERWARDS = CHANGES["copies added up afterwards"]["communication"]
REGATHER, WHOLE = (CHANGES[each]["sharding"] for each in ("regathered by 2", "gradients whole"))
ROWWISE, TENSORWISE, GATHERED, MICROSCALED = (
    changed(each).convert
    for each in ("Float8 rowwise", "Float8 tensorwise", "gathered so", "MXFP8")
)
BESIDE, ALL_LOSSES, OF_ROUTERS = (
    changed(each).auxiliary for each in ("auxiliary losses", "all auxiliary losses", "balanced")
)
LAYOUTS = {
    name: layout(name)
    for tier in (DAILY, GATE, TABLE["tiers"]["release"])
    for name in tier
    # Otherwise the recipe is refused.
    if keeps_nodes_of_functions() or not name.startswith("PP 2, ZBVZeroBubble, ")
}


def named(*names):
    return {name: LAYOUTS[name] for name in names}


QWEN3 = {"name": "tiny_qwen3"}
"""Queries and keys are normalized in each head, and heads are wider than dim / heads."""
SPARSE = {"name": "tiny_sparse"}
"""Mixtures of experts in all blocks but the first."""


def balanced(layout):
    """Mixtures of experts with the losses of routers, and a bias that moves."""
    return dataclasses.replace(layout.of(**SPARSE, router_bias=True), auxiliary=OF_ROUTERS)


LATENT = {"name": "tiny_latent"}
"""Latent attention, and experts in groups with a bias that moves."""
EIGHT = {"n_experts": 8}
EXPERT_PARALLEL = {name: balanced(layout(name)) for name in TABLE["tiers"]["experts"]}
LATENT_APART = "EP 2, FSDP 2 x TP 2, full recomputation"
EXPERT_PARALLEL[f"{LATENT_APART}, latent attention"] = layout(LATENT_APART).of(**LATENT)
WINDOW = {"sliding_window": 9}
OSS = {"name": "tiny_oss"}
"""Sinks, every second block with a window, and biases everywhere."""
QWEN2 = {"name": "tiny_qwen2"}
"""Biases of queries, keys and values."""
OLMO = {"name": "tiny_olmo2"}
"""Queries of all heads are normalized together, as are keys; norms are after what they are of."""
GEMMA = {"name": "tiny_gemma3"}
"""Norms before and after, and every second block with a window and another rotary base."""
MIXTRAL = {"name": "tiny_mixtral"}
"""Mixtures of experts in all blocks."""


def each(names, **model):
    """Layouts of another model."""
    return {name: (LAYOUTS | EXPERT_PARALLEL)[name].of(**model) for name in names}


OF = TABLE["families"]
PLAIN = [n for n, of in LAYOUTS.items() if not (of.convert or of.auxiliary or "window" in n)]
UNTIED = [name for name, of in LAYOUTS.items() if of.pp > 1 or of.converts_linears]
FAMILIES = {
    "Llama": LAYOUTS,
    "Qwen3": each(LAYOUTS, **QWEN3),
    "Qwen3, tied output": each((n for n in LAYOUTS if n not in UNTIED), **QWEN3, tied=True),
    "Qwen3-MoE": each(LAYOUTS, **SPARSE),
    "Qwen3-MoE, balanced": {name: balanced(layout(name)) for name in OF["balanced"]},
    "Qwen3-MoE, expert parallelism": EXPERT_PARALLEL,
    "DeepSeek-V3": each(OF["latent"], **LATENT),
    "GPT-OSS": {
        **each(OF["oss"], **OSS),
        # Of the sinks of a tensor rank, which are two, two of four shards have none.
        "FSDP 4 x TP 2, few heads": layout("FSDP 4 x TP 2").of(**OSS, n_heads=4, n_kv_heads=2),
    },
    "Qwen2": each(OF["dense"], **QWEN2),
    "OLMo 2": each(OF["dense"], **OLMO),
    "Gemma 3": each(OF["dense"], **GEMMA)
    | {"FSDP 2 x TP 2, tied": layout("FSDP 2 x TP 2, tied").of(**GEMMA)},
    "Mixtral": {name: layout(name).of(**MIXTRAL) for name in OF["mixtral"]},
    "Llama, sliding window": each(PLAIN, **WINDOW),
}
"""Layouts that must train the run of one rank, by kind of decoder."""
ONE = case(batch=8)
"""The reference: one rank, the whole batch at once, nothing wrapped."""


def job(layout, optimizer, **sections):
    """The tiny recipe in `layout`; clipping acts in every step, so its scale is compared too."""
    training = {"max_norm": 0.3} | sections.pop("training", {})
    optimizers = {"name": optimizer, **OPTIMIZERS[optimizer]}
    folder = sections.pop("job", {}).get("dump_folder", "unused")
    recipe = tiny.job(folder, **layout.recipe(optimizer=optimizers, training=training, **sections))
    added = {"convert": layout.convert, "auxiliary_losses": layout.auxiliary}
    return recipe.model_copy(update=added)


def saving(layout, optimizer, folder, steps, interval=2, **sections):
    """The same with so many steps, saved in `folder` after every `interval` of them."""
    checkpoint = {"enable": True, "interval": interval} | sections.pop("checkpoint", {})
    own = {"training": {"steps": steps}, "job": {"dump_folder": str(folder)}}
    return job(layout, optimizer, checkpoint=checkpoint, **own, **sections)


def resumed(steps, total=4, interval=2):
    """Sections of a run of so many steps, saved at intervals, on its way to `total` steps."""
    return {
        "training": {"steps": steps},
        "lr_scheduler": {"total_steps": total},
        "checkpoint": {"enable": True, "interval": interval},
    }


def compared_by(layout):
    """The optimizers by which a layout is compared with one rank.

    SGD shows errors of scale, to which AdamW is blind. AdamW is there where its states are kept
    elsewhere, or its update is followed by work on the weights. Of rounded products it would
    enlarge the last bits, so otherwise they are compared by SGD alone.
    """
    offloads = layout.sections.get("training", {}).get("enable_cpu_offload", False)
    gathers = any(getattr(each, "enable_fsdp_float8_all_gather", False) for each in layout.convert)
    by_both = gathers or (offloads and not layout.converts_linears)
    return list(OPTIMIZERS) if by_both else ["SGD"]


def alone(layout):
    """What a layout is compared with: one rank, the whole batch at once, nothing wrapped.

    The scale of a converted linear follows from all it holds of a microbatch, so there both have
    microbatches of one size.
    """
    training = layout.sections.get("training", {})
    whole = {"global_batch_size": training.get("global_batch_size", 8)}
    batch = training["local_batch_size"] if layout.converts_linears else whole["global_batch_size"]
    chunk = 301 if layout.sections.get("loss") and layout.auxiliary else 0
    added = {"convert": layout.convert, "auxiliary": layout.auxiliary}
    one = case(batch=batch, chunk=chunk, training=whole, **added)
    return one.of(**layout.model)
