"""Systems from papers, one folder each, with a README that relates equations to the code.

The registries of the main road find them here by name, and import them when a recipe asks.
Nothing else names them. A folder can be removed; its names are then unknown to recipes.
"""

from pathlib import Path

ALL = {
    "auxiliary_loss": {"next_latent": "auxiliary_tasks.next_latent:NextLatentLoss"},
    "communication.weights": {"qsdp": "qsdp.qsdp:QSDPWeights"},
    "communication.gradients": {"loco": "loco.loco:LoCo", "qsdp": "qsdp.qsdp:QSDPGradients"},
    "communication.replicas": {
        "loco": "loco.loco:LoCoReplicas",
        "demo": "demo.demo:Demo",
        "random": "demo.demo:Random",
        "striding": "demo.demo:Striding",
        "slicing": "demo.demo:Slicing",
        "diloco": "diloco.diloco:DiLoCo",
    },
    "convert": {
        "low_precision_attention": (
            "hadamard_attention.low_precision_attention:LowPrecisionAttention"
        )
    },
    "data": {"images": "vit_mae.images.settings:ImageData"},
    "dataset": {
        "scenes": "vit_mae.images.datasets:SCENES",
        "scenes_validation": "vit_mae.images.datasets:SCENES_VALIDATION",
        "image_folder": "vit_mae.images.datasets:IMAGE_FOLDER",
        "image_shards": "vit_mae.images.datasets:IMAGE_SHARDS",
        "rasters": "vit_mae.images.datasets:RASTERS",
    },
    "evaluation": {"linear_probe": "vit_mae.probe:linear_probe"},
    "feature": {"qk_clip": "qk_clip.feature:logit_limit"},
    "model": {"vit_mae": "vit_mae.spec:VIT_MAE"},
    "optimizer": {"GaLore": "galore.galore:GaLore", "Ranger21": "ranger21.ranger21:Ranger21"},
    "optimizer_key": {"Muon.qk_clip": "qk_clip.settings:MuonClip"},
    "schedule": {"ranger21": "ranger21.warmdown:Ranger21Schedule"},
    "sharding": {
        "simple_fsdp": "simple_fsdp.simple_fsdp:SimpleFSDP",
        "rotated": "rtp.rotated:Rotated",
    },
    "state_dtype": {
        "bfloat16": "low_bit.low_bit:BFLOAT16",
        "float8": "low_bit.low_bit:FLOAT8",
        "8bit": "low_bit.low_bit:EIGHT_BITS",
        "4bit": "low_bit.low_bit:FOUR_BITS",
    },
    "task": {"masked_autoencoder": "vit_mae.masked_autoencoder:MaskedAutoencoder"},
    "verify": {"modelled": "common.modelled:modelled_steps"},
}
"""Folder, module and attribute of each system, by the registry of the core and the name in it."""

ENTRIES = {
    kind: {
        name: place
        for name, place in entries.items()
        if Path(__file__).parent.joinpath(place.split(".")[0]).is_dir()
    }
    for kind, entries in ALL.items()
}
"""The entries whose folders exist."""
