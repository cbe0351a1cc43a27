"""The layouts that must all train the same run: one list for parity, for resume and for CUDA."""

import dataclasses
from pathlib import Path
from typing import Any

from tests import tiny
from torchtitan.convert import MXFP8, ConverterConfig, Float8, LinearConverterConfig
from torchtitan.losses import AuxiliaryLossConfig, LoadBalance, MultiToken, RouterZLoss, ZLoss
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


def case(
    pp=1,
    replicate=1,
    shard=1,
    cp=1,
    tp=1,
    *,
    batch=0,
    training=None,
    recompute=None,
    documents=False,
    chunk=0,
    convert=(),
    auxiliary=(),
    sharding=None,
    communication=None,
    **parallelism,
):
    """A layout in short: degrees, sequences in a microbatch, and keys of [parallelism].

    Unless it is given, one replica has two microbatches to add up, several have up to two each.
    """
    batch = batch or (4 if replicate * shard == 1 else 2)
    sections = {
        "training": {"local_batch_size": batch, **(training or {})},
        "activation_checkpoint": recompute or {},
        "model": {"attn_mask_type": "block_causal"} if documents else {},
        "loss": {"vocabulary_chunk": chunk} if chunk else {},
        "parallelism": parallelism,
        "sharding": sharding or {},
        "communication": communication or {},
    }
    sections = {name: section for name, section in sections.items() if section}
    return Case(pp, replicate, shard, cp, tp, sections, convert, auxiliary)


def schedule(name, pp=2, **rest):
    return case(pp, batch=8, pipeline_parallel_schedule=name, **rest)


RESHARD = "fsdp_reshard_after_forward"
FULL = {"mode": "full"}
OPERATORS = {"mode": "selective", "selective_ac_option": "op"}
SECOND = {"mode": "selective", "selective_ac_option": 2}
ULYSSES = {"context_parallel_rotate_method": "ulysses"}
RING = {"context_parallel_rotate_method": "ring"}
UNBALANCED = {"context_parallel_load_balancer": "none"}
BY_DOCUMENTS = {"documents": True, "context_parallel_load_balancer": "documents"}
NO_SEQUENCE = {"disable_sequence_parallel": True}
NO_LOSS = {"disable_loss_parallel": True}
AFTERWARDS = {"replicas": {"overlap": False}}
REGATHER = {"name": "fsdp2", "regather_size": 2}
WHOLE = {"name": "fsdp2", "accumulate_whole": True}
INTERLEAVED = {"pipeline_parallel_schedule": "Interleaved1F1B"}
ZBV = {"pipeline_parallel_schedule": "ZBVZeroBubble"}
CSV, THREE_STAGES = (
    str(Path(__file__).parent / "parallel" / name) for name in ("schedule.csv", "three_stages.csv")
)
BY_HAND = (
    ("tok_embeddings", *(f"layers.{number}" for number in range(4))),
    ("layers.4", "layers.5", "norm", "output"),
)
ENDS_ALONE = (
    ("tok_embeddings",),
    *(tuple(f"layers.{number}" for number in each) for each in ((0, 1, 2), (3, 4, 5))),
    ("norm", "output"),
)
ROWWISE = (Float8(recipe="rowwise", emulate=True),)
ROWWISE_HIGH = (Float8(recipe="rowwise_with_gw_hp", emulate=True),)
TENSORWISE = (Float8(emulate=True),)
GATHERED = (Float8(emulate=True, enable_fsdp_float8_all_gather=True),)
SCALED_BEFORE = (GATHERED[0].model_copy(update={"precompute_float8_dynamic_scale_for_fsdp": True}),)
MICROSCALED = (MXFP8(emulate=True),)
BESIDE = (ZLoss(weight=0.01),)
ALL_LOSSES = (*BESIDE, MultiToken(depth=2, final_weight=0.1, final_step=4))

ALL_BESIDE = {"chunk": 100, "auxiliary": ALL_LOSSES}

LAYOUTS = {
    # Data parallelism.
    "DDP 2": case(replicate=2),
    "DDP 4": case(replicate=4),
    "DDP 2, accumulating 4": case(replicate=2, batch=1),
    "FSDP 2": case(shard=2),
    "FSDP 4": case(shard=4),
    "FSDP 2, accumulating 4": case(shard=2, batch=1),
    "FSDP 2, always reshard": case(shard=2, **{RESHARD: "always"}),
    "FSDP 2, never reshard": case(shard=2, **{RESHARD: "never"}),
    "FSDP 2, CPU offload": case(shard=2, training={"enable_cpu_offload": True}),
    "FSDP 2, full recomputation": case(shard=2, recompute=FULL),
    "FSDP 2, every second block recomputed": case(shard=2, recompute=SECOND),
    "FSDP 2, operators recomputed": case(shard=2, recompute=OPERATORS),
    "HSDP 2 x 2": case(replicate=2, shard=2),
    "HSDP 2 x 2, accumulating 2": case(replicate=2, shard=2, batch=1),
    "HSDP 2 x 2, accumulating 2, copies added up afterwards": case(
        replicate=2, shard=2, batch=1, communication=AFTERWARDS
    ),
    "one rank, accumulating 8": case(batch=1),
    "one rank, CPU offload": case(batch=8, training={"enable_cpu_offload": True}),
    # Tensor parallelism.
    "TP 2": case(tp=2),
    "TP 4": case(tp=4),
    "TP 2, no sequence parallelism": case(tp=2, **NO_SEQUENCE),
    "TP 2, no loss parallelism": case(tp=2, **NO_LOSS),
    "TP 2, neither": case(tp=2, **NO_SEQUENCE, **NO_LOSS),
    "TP 2, operators recomputed": case(tp=2, recompute=OPERATORS),
    "TP 2, CPU offload": case(tp=2, training={"enable_cpu_offload": True}),
    "DDP 2 x TP 2": case(replicate=2, tp=2),
    "FSDP 2 x TP 2": case(shard=2, tp=2),
    "FSDP 2 x TP 2, no sequence parallelism": case(shard=2, tp=2, **NO_SEQUENCE),
    "FSDP 2 x TP 2, accumulating, full recomputation": case(shard=2, tp=2, batch=1, recompute=FULL),
    "HSDP 2 x 2 x TP 2": case(replicate=2, shard=2, tp=2),
    # Context parallelism.
    "CP 2": case(cp=2),
    "CP 4": case(cp=4),
    "CP 2, ring": case(cp=2, **RING),
    "CP 4, ring, unbalanced": case(cp=4, **RING, **UNBALANCED),
    "CP 2, documents": case(cp=2, documents=True),
    "CP 4, ring, documents": case(cp=4, documents=True, **RING),
    "CP 4, ring, unbalanced, documents": case(cp=4, documents=True, **RING, **UNBALANCED),
    "CP 2, balanced by documents": case(cp=2, **BY_DOCUMENTS),
    "CP 4, ring, balanced by documents": case(cp=4, **RING, **BY_DOCUMENTS),
    "CP 2, ring, window": case(cp=2, **RING).of(sliding_window=9),
    "CP 2, balanced by documents, window": case(cp=2, **BY_DOCUMENTS).of(sliding_window=9),
    "CP 2, Ulysses, window": case(cp=2, **ULYSSES).of(sliding_window=9),
    "CP 2, operators recomputed": case(cp=2, recompute=OPERATORS),
    "CP 2, Ulysses, documents": case(cp=2, documents=True, **ULYSSES),
    "CP 4, Ulysses, repeated keys": case(cp=4, **ULYSSES).of(n_kv_heads=2),
    "DDP 2 x CP 2": case(replicate=2, cp=2),
    "FSDP 2 x CP 2": case(shard=2, cp=2, batch=1),
    "CP 2 x TP 2": case(cp=2, tp=2, **RING),
    "CP 2 x TP 2, Ulysses, documents": case(cp=2, tp=2, documents=True, **ULYSSES),
    "FSDP 2 x CP 2 x TP 2": case(shard=2, cp=2, tp=2),
    "CP 2 x TP 2, balanced by documents, operators recomputed": case(
        cp=2, tp=2, recompute=OPERATORS, **BY_DOCUMENTS
    ),
    # Pipeline parallelism.
    "PP 2, GPipe": schedule("GPipe"),
    "PP 2, 1F1B": schedule("1F1B"),
    "PP 2, 1F1B, accumulating 4": case(2),
    "PP 2, Interleaved1F1B": schedule("Interleaved1F1B"),
    "PP 2, LoopedBFS": schedule("LoopedBFS"),
    "PP 2, InterleavedZeroBubble": schedule("InterleavedZeroBubble"),
    "PP 2, ZBVZeroBubble": schedule("ZBVZeroBubble"),
    "PP 2, DualPipeV": schedule("DualPipeV"),
    "PP 2, a schedule of one's own": case(2, batch=8, pipeline_parallel_schedule_csv=CSV),
    "PP 2, cut by hand": case(2, module_fqns_per_model_part=BY_HAND),
    "PP 2, full recomputation": case(2, recompute=FULL),
    "PP 2, documents": case(2, documents=True),
    "PP 4, 1F1B": schedule("1F1B", 4),
    "PP 4, Interleaved1F1B": schedule("Interleaved1F1B", 4),
    "PP 4, DualPipeV": schedule("DualPipeV", 4),
    "PP 2, Interleaved1F1B, embedding and output alone": schedule(
        "Interleaved1F1B", module_fqns_per_model_part=ENDS_ALONE
    ),
    "PP 2, InterleavedZeroBubble, a block a stage": schedule(
        "InterleavedZeroBubble", pipeline_parallel_layers_per_stage=1
    ).of(n_layers=4),
    "PP 2, DualPipeV, microbatches of 2": schedule(
        "DualPipeV", pipeline_parallel_microbatch_size=2
    ),
    "PP 2, three stages": case(2, batch=8, pipeline_parallel_schedule_csv=THREE_STAGES),
    "DDP 2 x PP 2": case(2, replicate=2),
    "FSDP 2 x PP 2": case(2, shard=2),
    "FSDP 2 x PP 2, Interleaved1F1B": case(2, shard=2, **INTERLEAVED),
    "FSDP 2 x PP 2, ZBVZeroBubble": case(2, shard=2, **ZBV),
    "TP 2 x PP 2": case(2, tp=2),
    "TP 2 x PP 2, ZBVZeroBubble": case(2, tp=2, **ZBV),
    "CP 2 x PP 2": case(2, cp=2, **RING),
    "CP 2 x PP 2, balanced by documents, window": case(2, cp=2, **RING, **BY_DOCUMENTS).of(
        sliding_window=9
    ),
    "CP 2 x PP 2, Ulysses, documents": case(2, cp=2, documents=True, **ULYSSES),
    # The loss a chunk of the vocabulary at a time.
    "one rank, loss in chunks": case(batch=8, chunk=100),
    "TP 2, loss in chunks": case(tp=2, chunk=64),
    "TP 2, neither, loss in chunks": case(tp=2, chunk=64, **NO_SEQUENCE, **NO_LOSS),
    "FSDP 2 x CP 2, loss in chunks": case(shard=2, cp=2, batch=1, chunk=100),
    "PP 2, loss in chunks": case(2, chunk=100),
    # Converted linears: the reference is converted alike, and has microbatches of the same size.
    "FSDP 2, Float8 rowwise": case(shard=2, convert=ROWWISE),
    "FSDP 2 x TP 2, Float8 rowwise": case(shard=2, tp=2, convert=ROWWISE),
    "CP 2, Float8 rowwise": case(cp=2, convert=ROWWISE),
    "TP 2 x PP 2, Float8 rowwise": case(2, tp=2, convert=ROWWISE),
    "FSDP 2, Float8 rowwise_with_gw_hp": case(shard=2, convert=ROWWISE_HIGH),
    "DDP 2, Float8 tensorwise": case(replicate=2, convert=TENSORWISE),
    "FSDP 2, Float8 tensorwise, gathered so": case(shard=2, convert=GATHERED),
    "HSDP 2 x 2, Float8 tensorwise, gathered so, scaled before": case(
        replicate=2, shard=2, convert=SCALED_BEFORE
    ),
    "FSDP 2, Float8 tensorwise, gathered so, CPU offload": case(
        shard=2, convert=GATHERED, training={"enable_cpu_offload": True}
    ),
    "FSDP 2, MXFP8": case(shard=2, convert=MICROSCALED),
    "FSDP 2 x TP 2, MXFP8": case(shard=2, tp=2, convert=MICROSCALED),
    "PP 2, MXFP8": case(2, convert=MICROSCALED),
    # Auxiliary losses: the reference has the same.
    "TP 2 x PP 2, auxiliary losses": case(2, tp=2, auxiliary=BESIDE),
    "FSDP 2, accumulating 4, all auxiliary losses": case(
        shard=2, batch=1, chunk=100, auxiliary=ALL_LOSSES
    ),
    "CP 2 x TP 2, documents, all auxiliary losses": case(
        cp=2, tp=2, chunk=64, documents=True, auxiliary=ALL_LOSSES
    ),
    "PP 2, 1F1B, all auxiliary losses": schedule("1F1B", **ALL_BESIDE),
    # Strategies of FSDP.
    "FSDP 4, regathered by 2": case(shard=4, sharding=REGATHER),
    "HSDP 2 x 2, always reshard, accumulating 2 whole": case(
        replicate=2, shard=2, batch=1, sharding=WHOLE, **{RESHARD: "always"}
    ),
    "FSDP 2 x TP 2, accumulating 4 whole": case(shard=2, tp=2, batch=1, sharding=WHOLE),
    # All together.
    "FSDP 2 x TP 2 x PP 2": case(2, shard=2, tp=2),
    "FSDP 2 x TP 2 x PP 2, Interleaved1F1B, full recomputation": case(
        2, shard=2, tp=2, recompute=FULL, **INTERLEAVED
    ),
    "HSDP 2 x 2 x PP 2": case(2, replicate=2, shard=2),
    "CP 2 x TP 2 x PP 2, documents": case(2, cp=2, tp=2, documents=True),
}


def named(*names):
    return {name: LAYOUTS[name] for name in names}


if keeps_nodes_of_functions():  # else the recipe is refused
    LAYOUTS["PP 2, ZBVZeroBubble, loss in chunks"] = schedule("ZBVZeroBubble", chunk=100)
    LAYOUTS["PP 2, ZBVZeroBubble, z-loss in chunks"] = schedule(
        "ZBVZeroBubble", chunk=100, auxiliary=BESIDE
    )
    LAYOUTS["PP 2, ZBVZeroBubble, all auxiliary losses"] = schedule("ZBVZeroBubble", **ALL_BESIDE)
    LAYOUTS["PP 2, ZBVZeroBubble, Float8 rowwise"] = schedule("ZBVZeroBubble", convert=ROWWISE)
    LAYOUTS["PP 2, ZBVZeroBubble, MXFP8"] = schedule("ZBVZeroBubble", convert=MICROSCALED)
DAILY = (
    *("DDP 2", "FSDP 2, accumulating 4", "FSDP 2, CPU offload", "FSDP 2, operators recomputed"),
    *("HSDP 2 x 2, accumulating 2", "FSDP 2 x TP 2", "FSDP 2 x PP 2"),
    *("TP 2", "TP 2, no sequence parallelism", "TP 2, loss in chunks"),
    *("CP 2, documents", "CP 2, ring", "CP 2 x TP 2", "CP 2, Ulysses, documents"),
    "CP 2, balanced by documents, window",
    *("PP 2, 1F1B", "PP 2, ZBVZeroBubble", "one rank, loss in chunks"),
    *("PP 2, 1F1B, all auxiliary losses", "FSDP 2, Float8 rowwise", "FSDP 2, MXFP8"),
)
"""What `./scripts/test` compares with one rank: each technique, and pairs that interact."""
GATE = (
    *("FSDP 4, regathered by 2", "HSDP 2 x 2, accumulating 2, copies added up afterwards"),
    *("HSDP 2 x 2, always reshard, accumulating 2 whole", "FSDP 2, Float8 tensorwise, gathered so"),
    *("TP 4", "CP 4, ring, documents", "CP 4, Ulysses, repeated keys", "FSDP 2 x CP 2 x TP 2"),
    *("PP 2, GPipe", "PP 2, LoopedBFS", "PP 2, InterleavedZeroBubble", "PP 2, DualPipeV"),
    *("PP 2, a schedule of one's own", "PP 4, Interleaved1F1B", "PP 4, DualPipeV"),
    *("PP 2, Interleaved1F1B, embedding and output alone", "PP 2, three stages"),
    *("PP 2, InterleavedZeroBubble, a block a stage", "PP 2, DualPipeV, microbatches of 2"),
    *("HSDP 2 x 2 x PP 2", "FSDP 2 x TP 2 x PP 2"),
)
"""What the gate compares besides test_cover.py: three axes, larger ones, and other schedules."""
QWEN3 = {"name": "tiny_qwen3"}
"""Queries and keys are normalized in each head, and heads are wider than dim / heads."""
SPARSE = {"name": "tiny_sparse"}
"""Mixtures of experts in all blocks but the first."""
OF_ROUTERS = (LoadBalance(weight=0.1), RouterZLoss(weight=0.01))


def balanced(layout):
    """Mixtures of experts with the losses of routers, and a bias that moves."""
    return dataclasses.replace(layout.of(**SPARSE, router_bias=True), auxiliary=OF_ROUTERS)


TO_BALANCE = (
    *("FSDP 2, accumulating 4", "FSDP 2, full recomputation", "HSDP 2 x 2", "CP 2, ring", "TP 2"),
    *("TP 2, no sequence parallelism", "TP 2, operators recomputed", "CP 2 x TP 2", "PP 2, 1F1B"),
    *("PP 2, Interleaved1F1B", "PP 2, ZBVZeroBubble", "FSDP 2 x TP 2 x PP 2"),
)


def apart(ep, pp=1, **layout):
    """Experts on different ranks, with the losses of routers, and a bias that moves."""
    return balanced(case(pp, expert_parallel_degree=ep, **layout))


LATENT = {"name": "tiny_latent"}
"""Latent attention, and experts in groups with a bias that moves."""
EIGHT = {"n_experts": 8}
EXPERT_PARALLEL = {
    "EP 2": apart(2, shard=2),
    "EP 2, one rank of two with all tokens": apart(2, shard=2).of(n_experts=2, top_k=1),
    "EP 2, always reshard, accumulating 4": apart(2, shard=2, batch=1, **{RESHARD: "always"}),
    "EP 2, never reshard": apart(2, shard=2, **{RESHARD: "never"}),
    "EP 2, accumulating 4 whole": apart(2, shard=2, batch=1, sharding={"accumulate_whole": True}),
    "EP 2, full recomputation": apart(2, shard=2, recompute=FULL),
    "EP 2, operators recomputed": apart(2, shard=2, recompute=OPERATORS),
    "EP 2, every second block recomputed": apart(2, shard=2, recompute=SECOND),
    "EP 2, documents": apart(2, shard=2, documents=True),
    "EP 2, loss in chunks": apart(2, shard=2, chunk=64),
    "EP 2, CPU offload": apart(2, shard=2, training={"enable_cpu_offload": True}),
    "EP 2, shared expert": apart(2, shard=2).of(shared_dim=32),
    "EP 2, sigmoid in groups": apart(2, shard=2).of(
        router_scores="sigmoid", expert_groups=3, top_groups=2
    ),
    # Two ranks with three experts each, which they split along the model's dim.
    "EP 2 of 4": apart(2, shard=4),
    "EP 2 of 4, experts whole": apart(2, shard=4).of(**EIGHT),
    "EP 4": apart(4, shard=4).of(**EIGHT),
    "EP 2, HSDP 2 x 2": apart(2, replicate=2, shard=2),
    "EP 2, HSDP 2 x 2, copies added up afterwards": apart(
        2, replicate=2, shard=2, communication=AFTERWARDS
    ),
    "EP 2, HSDP 2 x 4": apart(2, replicate=2, shard=4, batch=1),
    "EP 2, CP 2, ring": apart(2, cp=2, **RING),
    "EP 2, CP 2, Ulysses": apart(2, cp=2, **ULYSSES),
    "EP 4, FSDP 2 x CP 2": apart(4, shard=2, cp=2).of(**EIGHT),
    "EP 2, FSDP 2 x CP 2, full recomputation": apart(2, shard=2, cp=2, recompute=FULL),
    "EP 2, FSDP 2 x TP 2": apart(2, shard=2, tp=2),
    "EP 2, FSDP 2 x TP 2, no sequence parallelism": apart(2, shard=2, tp=2, **NO_SEQUENCE),
    "EP 2, FSDP 2 x TP 2, operators recomputed": apart(2, shard=2, tp=2, recompute=OPERATORS),
    "EP 2, FSDP 2 x TP 2, shared expert": apart(2, shard=2, tp=2).of(shared_dim=32),
    "EP 2, CP 2 x TP 2": apart(2, cp=2, tp=2),
    "EP 2 of 4, FSDP 4 x TP 2": apart(2, shard=4, tp=2),
    "EP 2, HSDP 2 x 2 x TP 2": apart(2, replicate=2, shard=2, tp=2),
    "EP 2, FSDP 2 x PP 2, 1F1B": apart(2, 2, shard=2),
    "EP 2, FSDP 2 x PP 2, first stage without experts": apart(2, 2, shard=2).of(dense_layers=3),
    "EP 2, FSDP 2 x PP 2, Interleaved1F1B": apart(
        2, 2, shard=2, pipeline_parallel_schedule="Interleaved1F1B"
    ),
    "EP 2, FSDP 2 x PP 2, ZBVZeroBubble": apart(2, 2, shard=2, **ZBV),
    "EP 2, FSDP 2 x PP 2, ZBVZeroBubble, full recomputation": apart(
        2, 2, shard=2, recompute=FULL, **ZBV
    ),
    "EP 2, FSDP 2 x TP 2 x PP 2": apart(2, 2, shard=2, tp=2),
    "EP 2, FSDP 2 x TP 2, latent attention, full recomputation": case(
        shard=2, tp=2, recompute=FULL, expert_parallel_degree=2
    ).of(**LATENT),
}
"""Ranks have different experts: of EP n, each n neighbors that share parameters have all."""
WINDOW = {"sliding_window": 9}
OF_LATENT = (
    *("FSDP 2, accumulating 4", "FSDP 2, operators recomputed", "HSDP 2 x 2", "CP 2, ring"),
    *("CP 2, Ulysses, documents", "TP 2", "TP 2, no sequence parallelism", "TP 4"),
    *("TP 2, operators recomputed", "CP 2 x TP 2", "PP 2, Interleaved1F1B", "PP 2, ZBVZeroBubble"),
    *("FSDP 2 x TP 2 x PP 2", "CP 2 x TP 2, documents, all auxiliary losses"),
    *("PP 2, 1F1B, all auxiliary losses", "FSDP 2 x TP 2, no sequence parallelism"),
)
OSS = {"name": "tiny_oss"}
"""Sinks, every second block with a window, and biases everywhere."""
OF_OSS = (
    *("FSDP 2, accumulating 4", "FSDP 2, operators recomputed", "FSDP 2, full recomputation"),
    *("DDP 2", "HSDP 2 x 2", "TP 2", "TP 2, no sequence parallelism", "TP 4"),
    *("TP 2, operators recomputed", "FSDP 2 x TP 2", "CP 2, ring", "CP 4, ring, documents"),
    *("CP 2, Ulysses, documents", "CP 2 x TP 2", "PP 2, Interleaved1F1B", "PP 2, ZBVZeroBubble"),
    *("FSDP 2 x TP 2 x PP 2", "CP 2 x TP 2, documents, all auxiliary losses"),
)
OSS_APART = (
    *("EP 2", "EP 2 of 4", "EP 2, full recomputation", "EP 2, FSDP 2 x TP 2"),
    *("EP 2, FSDP 2 x TP 2, operators recomputed", "EP 2 of 4, FSDP 4 x TP 2"),
)
QWEN2 = {"name": "tiny_qwen2"}
"""Biases of queries, keys and values."""
OLMO = {"name": "tiny_olmo2"}
"""Queries of all heads are normalized together, as are keys; norms are after what they are of."""
GEMMA = {"name": "tiny_gemma3"}
"""Norms before and after, and every second block with a window and another rotary base."""
MIXTRAL = {"name": "tiny_mixtral"}
"""Mixtures of experts in all blocks."""
OF_DENSE = (
    *("FSDP 2, accumulating 4", "FSDP 2, operators recomputed", "TP 2", "TP 2, neither"),
    *("FSDP 2 x TP 2, no sequence parallelism", "CP 2, ring", "CP 2, Ulysses, documents"),
    *("CP 2 x TP 2", "PP 2, Interleaved1F1B", "FSDP 2 x TP 2 x PP 2", "FSDP 2, Float8 rowwise"),
    *("TP 2 x PP 2, Float8 rowwise", "TP 2, loss in chunks"),
)
FAMILIES = {
    "Llama": LAYOUTS,
    "Qwen3": {name: layout.of(**QWEN3) for name, layout in LAYOUTS.items()},
    "Qwen3, tied output": {
        name: layout.of(**QWEN3, tied=True)
        for name, layout in LAYOUTS.items()
        if layout.pp == 1 and not layout.converts_linears
    },
    "Qwen3-MoE": {name: layout.of(**SPARSE) for name, layout in LAYOUTS.items()},
    "Qwen3-MoE, balanced": {
        **{name: balanced(LAYOUTS[name]) for name in TO_BALANCE},
        "PP 2, 1F1B, first stage without experts": balanced(LAYOUTS["PP 2, 1F1B"]).of(
            dense_layers=3
        ),
    },
    "Qwen3-MoE, expert parallelism": EXPERT_PARALLEL,
    "DeepSeek-V3": {name: LAYOUTS[name].of(**LATENT) for name in OF_LATENT},
    "GPT-OSS": {
        **{name: LAYOUTS[name].of(**OSS) for name in OF_OSS},
        **{name: EXPERT_PARALLEL[name].of(**OSS) for name in OSS_APART},
        # Of the sinks of a tensor rank, which are two, two of four shards have none.
        "FSDP 4 x TP 2, few heads": case(shard=4, tp=2).of(**OSS, n_heads=4, n_kv_heads=2),
    },
    "Qwen2": {name: LAYOUTS[name].of(**QWEN2) for name in OF_DENSE},
    "OLMo 2": {name: LAYOUTS[name].of(**OLMO) for name in OF_DENSE},
    "Gemma 3": {
        **{name: LAYOUTS[name].of(**GEMMA) for name in OF_DENSE},
        "FSDP 2 x TP 2, tied": case(shard=2, tp=2).of(**GEMMA, tied=True),
    },
    "Mixtral": {
        **{name: LAYOUTS[name].of(**MIXTRAL) for name in ("TP 2", "PP 2, Interleaved1F1B")},
        "EP 2": case(shard=2, expert_parallel_degree=2).of(**MIXTRAL),
        "EP 2, FSDP 2 x TP 2": case(shard=2, tp=2, expert_parallel_degree=2).of(**MIXTRAL),
    },
    "Llama, sliding window": {
        name: layout.of(**WINDOW)
        for name, layout in LAYOUTS.items()
        if not (layout.convert or layout.auxiliary or "sliding_window" in layout.model)
    },
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
