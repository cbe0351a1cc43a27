"""Layouts of the systems in `torchtitan.research` that must train the run of one rank."""

from tests.layouts import CHANGES, case, changed, layout
from tests.tables import data
from torchtitan.comm import GRADIENTS, REPLICAS, WEIGHTS
from torchtitan.convert import CONVERTERS
from torchtitan.losses import AUXILIARY_LOSSES
from torchtitan.parallel import SHARDING
from torchtitan.torch_private.compiler import keeps_nodes_of_functions

SIMPLE = {"name": "simple_fsdp"}
ROTATED = {"name": "rotated"}
IN_PLACE = {**ROTATED, "in_place": True}
TABLE = data(__file__)
OWN = {
    words: change
    for words, change in TABLE["changes"].items()
    if all(each["name"] in CONVERTERS for each in change.get("convert", ()))
    and all(each["name"] in AUXILIARY_LOSSES for each in change.get("auxiliary_losses", ()))
}


def of_system(name):
    """The layout of a name; None if a converter or a loss that it has is not there."""
    unsaid = TABLE["unsaid"].get(name)
    system = next((f", {each}" for each in ("SimpleFSDP", "rotated") if name.startswith(each)), "")
    plain = name.replace("SimpleFSDP, ", "").replace("copies 2", "DDP 2")
    plain = plain.replace("SimpleFSDP", "FSDP").replace("rotated", "FSDP") + system
    words = ", ".join([plain, *([unsaid] if unsaid else [])])
    if any(each in words and each not in OWN for each in TABLE["changes"]):
        return None
    return layout(words, changes=CHANGES | OWN)


def installed(cases):
    """The cases whose systems are there."""
    return {name: each for name, each in cases.items() if each and _is_installed(each)}


def _is_installed(each):
    ways, sharding = each.sections.get("communication", {}), each.sections.get("sharding", {})
    registries = {"weights": WEIGHTS, "gradients": GRADIENTS, "replicas": REPLICAS}
    return sharding.get("name", "fsdp2") in SHARDING and all(
        way.get("name") in (None, *registries[kind]) for kind, way in ways.items()
    )


BESIDE_LATENT, LATENT_LOSSES = (
    changed(words, OWN).auxiliary if words in OWN else ()
    for words in ("losses of latents", "of latents too")
)
ALL = {
    name: of_system(name)
    for names in TABLE["tiers"].values()
    for name in names
    # Otherwise the recipe is refused.
    if keeps_nodes_of_functions() or not name.startswith("PP 2, ZBVZeroBubble, ")
}
LAYOUTS = installed(ALL)
DAILY = [name for name in TABLE["tiers"]["daily"] if name in LAYOUTS]
GATE = TABLE["tiers"]["gate"]


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
