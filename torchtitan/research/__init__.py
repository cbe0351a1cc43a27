"""Systems from papers, a module or a package each, and a page that relates equations to the code.

The registries of the core find them here by name, and import them when a recipe selects them.
Nothing else names them. Each can be removed; its names are then unknown to recipes.
"""

import re
from importlib.util import find_spec

ALL = {
    "auxiliary_loss": {"next_latent": "auxiliary_tasks:NextLatentLoss"},
    "communication.weights": {"qsdp": "qsdp:QSDPWeights"},
    "communication.gradients": {"loco": "loco:LoCo", "qsdp": "qsdp:QSDPGradients"},
    "communication.replicas": {
        "loco": "loco:LoCoReplicas",
        "demo": "demo:Demo",
        "random": "demo:Random",
        "striding": "demo:Striding",
        "slicing": "demo:Slicing",
        "diloco": "diloco:DiLoCo",
    },
    "convert": {"low_precision_attention": "hadamard_attention:LowPrecisionAttention"},
    "data": {"images": "vit_mae.images.settings:ImageData"},
    "dataset": {
        "scenes": "vit_mae.images.settings:SCENES",
        "scenes_validation": "vit_mae.images.settings:SCENES_VALIDATION",
        "image_folder": "vit_mae.images.settings:IMAGE_FOLDER",
        "image_shards": "vit_mae.images.settings:IMAGE_SHARDS",
        "rasters": "vit_mae.images.settings:RASTERS",
    },
    "evaluation": {"linear_probe": "vit_mae.probe:linear_probe"},
    "feature": {"qk_clip": "qk_clip:logit_limit"},
    "model": {"vit_mae": "vit_mae.spec:VIT_MAE"},
    "optimizer": {"GaLore": "galore.galore:GaLore", "Ranger21": "ranger21:Ranger21"},
    "optimizer_key": {"Muon.qk_clip": "qk_clip:MuonClip"},
    "schedule": {"ranger21": "ranger21:Ranger21Schedule"},
    "sharding": {
        "simple_fsdp": "simple_fsdp.simple_fsdp:SimpleFSDP",
        "rotated": "rtp.rotated:Rotated",
    },
    "state_dtype": {
        "bfloat16": "low_bit:BFLOAT16",
        "float8": "low_bit:FLOAT8",
        "8bit": "low_bit:EIGHT_BITS",
        "4bit": "low_bit:FOUR_BITS",
    },
    "task": {"masked_autoencoder": "vit_mae.masked_autoencoder:MaskedAutoencoder"},
    "verify": {"modelled": "common.modelled:modelled_steps"},
}
"""Module and attribute of each system, by the registry of the core and the name in it."""


def _module(place: str) -> str:
    return f"{__name__}.{re.split('[.:]', place)[0]}"


MODULES = {_module(place) for entries in ALL.values() for place in entries.values()}
ABSENT = [name for name in sorted(MODULES) if not find_spec(name)]
"""Modules that are not installed; a refusal ends with a note of them."""
ENTRIES = {
    kind: {name: place for name, place in entries.items() if _module(place) not in ABSENT}
    for kind, entries in ALL.items()
}
"""The entries whose modules exist."""
