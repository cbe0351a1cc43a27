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


COMPRESSED = installed({name: case(**given) for name, given in TABLE["compressed"].items()})
"""Layouts that do not train the run of one rank, but that of a model of the ranks."""
