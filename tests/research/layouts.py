"""Layouts of the systems in `torchtitan.research` that must train the run of one rank."""

from tests import layouts
from tests.layouts import FULL, OPERATORS, RING, case, schedule
from torchtitan.comm import GRADIENTS, REPLICAS, WEIGHTS
from torchtitan.convert import CONVERTERS
from torchtitan.losses import AUXILIARY_LOSSES
from torchtitan.parallel import SHARDING
from torchtitan.torch_private.compiler import keeps_nodes_of_functions

SIMPLE = {"name": "simple_fsdp"}
ROTATED = {"name": "rotated"}
IN_PLACE = {**ROTATED, "in_place": True}


def chosen(registry, name, **settings):
    """Settings of a system; None if it is not there."""
    return (registry[name](name=name, **settings) if name in registry else None,)


def installed(cases):
    """The cases whose systems are there."""
    return {name: each for name, each in cases.items() if _is_installed(each)}


def _is_installed(each):
    if None in (*each.convert, *each.auxiliary):
        return False
    ways, sharding = each.sections.get("communication", {}), each.sections.get("sharding", {})
    registries = {"weights": WEIGHTS, "gradients": GRADIENTS, "replicas": REPLICAS}
    return sharding.get("name", "fsdp2") in SHARDING and all(
        way.get("name") in (None, *registries[kind]) for kind, way in ways.items()
    )


BY_TOKEN = chosen(CONVERTERS, "low_precision_attention", rotation="qkv")
BY_HEAD = chosen(CONVERTERS, "low_precision_attention", scale="head", rotation="qk")
BY_TENSOR = chosen(
    CONVERTERS, "low_precision_attention", scale="tensor", dtype="int8", rotation="v"
)
LATENT = chosen(AUXILIARY_LOSSES, "next_latent", warmup_steps=4)
BESIDE_LATENT = (layouts.ALL_LOSSES[0], *LATENT)
LATENT_LOSSES = (layouts.ALL_LOSSES[0], *LATENT, *layouts.ALL_LOSSES[1:])
LATENT_BESIDE = {"chunk": 100, "auxiliary": LATENT_LOSSES}

ALL = {
    "SimpleFSDP 2, loss in chunks": case(shard=2, chunk=100, sharding=SIMPLE),
    "FSDP 2 x CP 2, attention in Float8": case(shard=2, cp=2, batch=1, convert=BY_TOKEN),
    "CP 2, attention in Float8, documents": case(cp=2, documents=True, convert=BY_HEAD),
    "CP 2 x TP 2, attention in int8": case(cp=2, tp=2, convert=BY_TENSOR, **RING),
    "CP 2, attention in Float8, Ulysses": case(cp=2, convert=BY_HEAD, **layouts.ULYSSES),
    "CP 2, Ulysses, losses of latents": case(cp=2, auxiliary=BESIDE_LATENT, **layouts.ULYSSES),
    "TP 2, attention in Float8, full recomputation": case(tp=2, convert=BY_HEAD, recompute=FULL),
    "PP 2, attention in int8, accumulating 4": case(2, convert=BY_TENSOR),
    "TP 2 x PP 2, losses of latents": case(2, tp=2, auxiliary=BESIDE_LATENT),
    "FSDP 2, accumulating 4, all losses, of latents too": case(
        shard=2, batch=1, chunk=100, auxiliary=LATENT_LOSSES
    ),
    "CP 2 x TP 2, documents, all losses, of latents too": case(
        cp=2, tp=2, chunk=64, documents=True, auxiliary=LATENT_LOSSES
    ),
    "rotated 2, losses of latents": case(
        shard=2, chunk=100, auxiliary=LATENT_LOSSES[1:], sharding=ROTATED
    ),
    "SimpleFSDP 2, all losses, of latents too": case(
        shard=2, chunk=100, auxiliary=LATENT_LOSSES, sharding=SIMPLE
    ),
    "PP 2, 1F1B, all losses, of latents too": schedule("1F1B", **LATENT_BESIDE),
    "PP 2, GPipe, all losses, of latents too": schedule("GPipe", **LATENT_BESIDE),
    "PP 2, Interleaved1F1B, all losses, of latents too": schedule(
        "Interleaved1F1B", **LATENT_BESIDE
    ),
    "TP 2 x PP 2, all losses, of latents too": case(2, tp=2, chunk=64, auxiliary=LATENT_LOSSES),
    "FSDP 2 x PP 2, documents, all losses, of latents too": case(
        2, shard=2, documents=True, **LATENT_BESIDE
    ),
    "DDP 2, all losses, of latents too": case(replicate=2, **LATENT_BESIDE),
    "HSDP 2 x 2, all losses, of latents too": case(replicate=2, shard=2, **LATENT_BESIDE),
    "CP 2, ring, all losses, of latents too": case(cp=2, **LATENT_BESIDE, **RING),
    "SimpleFSDP, copies 2": case(replicate=2, sharding=SIMPLE),
    "SimpleFSDP, copies 2, added up afterwards": case(
        replicate=2, sharding=SIMPLE, communication=layouts.AFTERWARDS
    ),
    "SimpleFSDP 2, accumulating 4": case(shard=2, batch=1, sharding=SIMPLE),
    "SimpleFSDP 2, operators recomputed": case(shard=2, recompute=OPERATORS, sharding=SIMPLE),
    "SimpleFSDP, HSDP 2 x 2, full recomputation": case(
        replicate=2, shard=2, recompute=FULL, sharding=SIMPLE
    ),
    "SimpleFSDP 2 x TP 2, accumulating": case(shard=2, tp=2, batch=1, sharding=SIMPLE),
    "SimpleFSDP 2 x PP 2": case(2, shard=2, sharding=SIMPLE),
    "SimpleFSDP 2 x PP 2, ZBVZeroBubble": case(2, shard=2, **layouts.ZBV, sharding=SIMPLE),
    "SimpleFSDP, CP 2, documents": case(cp=2, documents=True, sharding=SIMPLE),
    "rotated 2, accumulating 4": case(shard=2, batch=1, sharding=ROTATED),
    "rotated 4, full recomputation": case(shard=4, recompute=FULL, sharding=ROTATED),
    "rotated 2, copies 2": case(replicate=2, shard=2, sharding=ROTATED),
    "rotated 2, documents, window": case(shard=2, documents=True, sharding=ROTATED).of(
        sliding_window=9
    ),
    "rotated 2 x CP 2, documents": case(shard=2, cp=2, documents=True, sharding=ROTATED),
    "rotated 2, in place, every second block recomputed": case(
        shard=2, recompute=layouts.SECOND, sharding=IN_PLACE
    ),
    "rotated 4, loss in chunks, operators recomputed": case(
        shard=4, chunk=100, recompute=OPERATORS, sharding=ROTATED
    ),
}
if keeps_nodes_of_functions():  # else the recipe is refused
    ALL["PP 2, ZBVZeroBubble, all losses, of latents too"] = schedule(
        "ZBVZeroBubble", **LATENT_BESIDE
    )
LAYOUTS = installed(ALL)


def few_bits(name, **settings):
    return {"name": name, "bucket": 64, **settings}


def exchanged(name, **settings):
    """Of the sum, not its sign, which a number near zero could change."""
    return {"replicas": {"name": name, "sign": False, **settings}}


LOCO = {"gradients": few_bits("loco")}
TWO_HOPS = LOCO | {"replicas": few_bits("loco")}
QSDP = {"weights": few_bits("qsdp"), "gradients": few_bits("qsdp")}
LEARNED = {"bits": 4, "levels": "learned", "learn_steps": 1}
QSDP_LEARNED = QSDP | {"gradients": few_bits("qsdp", **LEARNED)}
LOCAL_STEPS = {"replicas": {"name": "all_reduce", "every": 2}}
COMPRESSED = installed(
    {
        "FSDP 2, QSDP, learned levels": case(shard=2, communication=QSDP_LEARNED),
        "HSDP 2 x 2, LoCo in two hops": case(replicate=2, shard=2, communication=TWO_HOPS),
        "HSDP 2 x 2, DeMo": case(replicate=2, shard=2, communication=exchanged("demo")),
        "DDP 2, random": case(replicate=2, communication=exchanged("random")),
        "DDP 2 x TP 2, striding": case(replicate=2, tp=2, communication=exchanged("striding")),
        "DDP 2 x PP 2, slicing": case(2, replicate=2, batch=4, communication=exchanged("slicing")),
        "HSDP 2 x 2, local steps": case(replicate=2, shard=2, communication=LOCAL_STEPS),
        "DDP 2, DeMo of two steps": case(replicate=2, communication=exchanged("demo", every=2)),
        "FSDP 2, accumulating 4, LoCo": case(shard=2, batch=1, communication=LOCO),
        "FSDP 2 x TP 2, QSDP": case(shard=2, tp=2, communication=QSDP),
        "FSDP 2 x CP 2, LoCo and QSDP": case(shard=2, cp=2, communication=QSDP | LOCO),
        "FSDP 2 x PP 2, LoCo": case(2, shard=2, batch=4, communication=LOCO),
    }
)
"""Layouts that do not train the run of one rank, but that of a model of the ranks."""
DAILY = [
    name
    for name in (
        *("SimpleFSDP 2, accumulating 4", "rotated 2, accumulating 4"),
        "TP 2, attention in Float8, full recomputation",
        "FSDP 2, accumulating 4, all losses, of latents too",
    )
    if name in LAYOUTS
]
"""What `./scripts/test` compares with one rank."""
GATE = (
    *("SimpleFSDP 2, loss in chunks", "SimpleFSDP, HSDP 2 x 2, full recomputation"),
    *("SimpleFSDP 2 x TP 2, accumulating", "SimpleFSDP 2 x PP 2", "SimpleFSDP, CP 2, documents"),
    *("CP 2 x TP 2, attention in int8", "PP 2, attention in int8, accumulating 4"),
    "CP 2, ring, all losses, of latents too",
    *("rotated 4, full recomputation", "rotated 2 x CP 2, documents", "rotated 2, copies 2"),
    "rotated 2, in place, every second block recomputed",
)
"""What the gate compares besides; the others are compared before a release."""
