"""A model of images with a task of its own, in one module outside the package.

It hides every second patch of small images, and trains a network to restore them.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from torchtitan.data import DATASETS, SOURCES, Dataset
from torchtitan.data.lanes import WholeLane
from torchtitan.data.sources import ShuffledDocuments
from torchtitan.models import MODELS
from torchtitan.models.output import AuxiliaryLoss
from torchtitan.models.settings import ModelConfig
from torchtitan.models.spec import ModelSpec, SampleShapes
from torchtitan.tasks import TASKS, Batch, Task

SIDE, PATCH = 16, 4
PATCHES, PIXELS = (SIDE // PATCH) ** 2, PATCH**2


# --- the data ---


class Squares:
    """A thousand images of a bright square each, generated when they are read."""

    fingerprint = "squares, version 1"

    def __init__(self):
        self.windows = [0, 1000]  # may be read in any order

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        draw = np.random.default_rng(index)
        image = np.zeros((SIDE, SIDE), np.float32)
        top, left = draw.integers(SIDE // 2, size=2)
        image[top : top + 6, left : left + 6] = draw.uniform(0.5, 1.0)
        return image


SOURCES["squares"] = lambda dataset, config, tokenizer, seed: ShuffledDocuments(
    "squares", Squares(), seed=seed, shuffle=config.shuffle
)
DATASETS["squares"] = Dataset("squares", "images of one square each", content="images")


# --- the task ---


@dataclass(frozen=True)
class ImageBatch(Batch):
    patches: Tensor
    """(B, patches, pixels) float32; hidden patches are zeros."""
    targets: Tensor
    """All patches, (B, patches, pixels) float32."""

    @property
    def inputs(self):
        return self.patches

    def count(self):
        return torch.tensor(len(self.patches), device=self.patches.device)


class Patches:
    """Each image is a sample."""

    def __init__(self):
        self.identity = {"patch": PATCH}

    def lane(self, number, documents, start):
        return WholeLane(number, documents, start)

    def collate(self, samples):
        images = torch.from_numpy(np.stack([sample.content for sample in samples]))
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
        whole = patches.reshape(len(images), PATCHES, PIXELS)
        seen = whole.clone()
        seen[:, ::2] = 0.0
        return ImageBatch(seen, whole)


class RestoreImages(Task):
    """Restoration of hidden patches."""

    unit, rate, content = "images", "images_per_second", "images"

    def packing(self, config, seq_len, seed):
        return Patches()

    def preview(self, batch):
        return f"{PATCHES} patches, {batch.targets[0].mean():.2f} bright"

    @classmethod
    def loss(cls, outputs, targets):
        each = F.mse_loss(outputs.float(), targets, reduction="none")
        return each.mean((1, 2)).sum()  # a sum over images: the library divides it by their number

    def derived(self, loss, count, measured):
        return {"psnr": -10 * math.log10(loss / count)}


TASKS["restore_images"] = RestoreImages


# --- the model ---


@dataclass(frozen=True, kw_only=True)
class Args:
    dim: int
    n_layers: int
    activity_weight: float = 0.0


class RestorerConfig(ModelConfig):
    """Settings of a network that mixes patches."""

    dim: int | None = Field(None, gt=0)
    """Width of a patch (default: the flavor's)."""
    n_layers: int | None = Field(None, gt=0)
    """Blocks (default: the flavor's)."""
    activity_weight: float | None = Field(None, ge=0)
    """Weight of the mean square between blocks (default: the flavor's)."""


class Embedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.pixels = nn.Linear(PIXELS, dim, bias=False)
        self.positions = nn.Linear(dim, PATCHES, bias=False)  # only its weight is used

    def forward(self, patches):
        return self.pixels(patches) + self.positions.weight


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.norm = nn.RMSNorm(args.dim)
        self.across = nn.Linear(PATCHES, PATCHES, bias=False)
        self.within = nn.Linear(args.dim, args.dim, bias=False)
        self.activity = AuxiliaryLoss("activity", args.activity_weight)

    def forward(self, x):
        x = x + self.across(self.norm(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.within(F.gelu(x))
        return self.activity(x, x.float().square().mean((1, 2)).sum())


class Restorer(nn.Module):
    def __init__(self, args, seq_len):
        super().__init__()
        self.embedding = Embedding(args.dim)
        self.layers = nn.ModuleDict({str(i): Block(args) for i in range(args.n_layers)})
        self.output = nn.Linear(args.dim, PIXELS, bias=False)

    def init_buffers(self):
        """There are none."""

    def forward(self, patches):
        x = patches if self.embedding is None else self.embedding(patches)
        for block in self.layers.values():
            x = block(x)
        return x if self.output is None else self.output(x)


MODELS["restorer"] = ModelSpec(
    name="restorer",
    task="restore_images",
    flavors={"tiny": Args(dim=32, n_layers=2)},
    settings=RestorerConfig,
    build=Restorer,
    blocks=lambda model: {f"layers.{name}": b for name, b in model.layers.named_children()},
    init_std=lambda args, name: "ones" if name.endswith("norm.weight") else 0.05,
    before_blocks=("embedding",),
    after_blocks=("output",),
    shapes=lambda args, seq_len: SampleShapes(
        (PATCHES, PIXELS), (PATCHES, args.dim), (PATCHES, PIXELS), torch.float32
    ),
    flops_per_unit=lambda args, seq_len: 6 * PATCHES * args.n_layers * args.dim * (args.dim + 16),
)
