"""Restoring hidden patches of images (He et al., 2021, arXiv:2111.06377).

The hidden patches of an image are drawn from the seed, the epoch and the number of the image: so
they do not depend on the layout, and are the same at every validation of held-out images. The
target is a hidden patch minus its own mean, divided by its own deviation; the loss is the mean
square error over all numbers of the hidden patches, and nothing else.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchtitan.data import DATASETS, DataConfig
from torchtitan.data.batch import Batch
from torchtitan.data.lanes import SampleStart, WholeLane, WholeSample
from torchtitan.data.order import Document, Identity, Source
from torchtitan.losses import at_least_float32, sum_over_ranks
from torchtitan.models.settings import ModelConfig
from torchtitan.research.vit_mae.images.crop import unit
from torchtitan.research.vit_mae.images.open_images import IMAGES, check_images, open_images
from torchtitan.research.vit_mae.images.settings import images_of
from torchtitan.research.vit_mae.images.source import ImageSample
from torchtitan.research.vit_mae.model import ViTMAEArgs, patchify, restore, take, unpatchify
from torchtitan.tasks import LossFunction, Task

Array = npt.NDArray[Any]

GAP = 2
"""Number of pixels between images."""


PICTURED = 8
"""Number of images in a picture."""
EPSILON = 1e-6
"""Constant added to the variance of a patch."""
MASKS = 1
"""Number that distinguishes the draws of masks from others of the same seed."""


@dataclasses.dataclass(frozen=True)
class MaskedImages(Batch):
    """Microbatch of images, of which the network sees some patches.

    Shapes: B images, N patches, V of them visible and M masked, P numbers of a patch.
    """

    visible: Tensor
    """Visible patches (B, V, P), float32."""
    targets: Tensor
    """Masked patches (B, M, P), float32, not normalised."""
    order: Tensor
    """Indices of the patches in the image (B, N), int64, the visible ones first."""

    @property
    def inputs(self) -> Tensor:
        return self.visible

    def context(self) -> dict[str, Tensor]:
        return {"order": self.order}

    def count(self) -> Tensor:
        """Number of images."""
        return torch.tensor(len(self.visible), device=self.visible.device)

    def images(self, patch_size: int) -> Tensor:
        """Return the whole images, (B, C, height, width), as input of the network."""
        patches = torch.cat((self.visible, self.targets), 1)
        return unpatchify(take(patches, self.order.argsort(1)), patch_size)


@dataclasses.dataclass(frozen=True)
class WholeImages(Batch):
    """Microbatch of images as they were read, which become `MaskedImages` on a device."""

    pixels: Tensor
    """(B, C, height, width), uint8 or float32 in 0..1."""
    order: Tensor
    """As in `MaskedImages`."""
    scale: Tensor
    """Mean and deviation of each channel (2, C, 1, 1), sent with the images: a constant that is
    made on the device would have the host wait for it."""
    args: ViTMAEArgs
    on_host = frozenset({"args"})

    def to(self, device: torch.device | str) -> MaskedImages:  # type: ignore[override]
        """Send the images, and normalize and mask them there."""
        there, visible = super().to(device), self.args.visible
        mean, std = there.scale
        patches = patchify((unit(there.pixels) - mean) / std, self.args.patch_size)
        masked = take(patches, there.order[:, visible:])
        return MaskedImages(take(patches, there.order[:, :visible]), masked, there.order)


def drawn(rows: Sequence[Tensor]) -> Tensor:
    """Draw rows of images, each (N, bands, H, W): (3, height, width) in 0..1.

    The first three bands are shown, or one as gray.
    """
    shown = [row[:, :3] if row.shape[1] >= 3 else row[:, :1].expand(-1, 3, -1, -1) for row in rows]
    padded = [F.pad(row.float().clamp(0, 1), (0, GAP, 0, GAP), value=1.0) for row in shown]
    return torch.cat([torch.cat(list(row), 2) for row in padded], 1)[:, :-GAP, :-GAP]


def mask_order(seed: int, epoch: int, number: int, patches: int) -> Tensor:
    """Draw the order of an image's patches (patches,), int64; the first are visible."""
    noise = np.random.default_rng([seed, epoch, number, MASKS]).random(patches)
    return torch.from_numpy(noise.argsort(kind="stable"))


@dataclasses.dataclass(frozen=True)
class MaskedPatches:
    """Packing of each image as a sample, with some patches hidden."""

    args: ViTMAEArgs
    seed: int

    @property
    def identity(self) -> Identity:
        """Return the identity that must be equal for a run to resume."""
        return {"masks": f"{self.args.visible} of {self.args.patches} patches are visible"}

    def lane(
        self, number: int, documents: Iterator[Document], start: SampleStart | None
    ) -> WholeLane:
        """Open the samples of a lane from `start`."""
        drawn = (Document(position, self._drawn(image)) for position, image in documents)
        return WholeLane(number, drawn, start)

    def _drawn(self, sample: ImageSample) -> tuple[Array, Array]:
        """Return an image, and the order of its patches, as arrays, which are pickled faster."""
        order = mask_order(self.seed, sample.epoch, sample.number, self.args.patches)
        return sample.image.numpy(), order.numpy()

    def collate(self, samples: Sequence[WholeSample]) -> WholeImages:
        """Join the samples into a batch."""
        args = self.args
        images = [torch.from_numpy(sample.content[0]) for sample in samples]
        if len({image.dtype for image in images}) > 1:
            images = [unit(image) for image in images]
        order = torch.from_numpy(np.stack([sample.content[1] for sample in samples]))
        scale = torch.tensor([args.pixel_mean, args.pixel_std])[..., None, None]
        return WholeImages(torch.stack(images), order, scale, args)


class MaskedAutoencoder(Task):
    """Task of restoring hidden patches from the visible ones."""

    unit, rate, content = "images", "images_per_second", "images"
    sample = "image"
    outputs = "numbers of a patch"
    has_picture = True

    def __init__(self, model: ModelConfig, args: Any) -> None:
        assert isinstance(args, ViTMAEArgs), "the arguments of a masked autoencoder"
        self.args = args

    @classmethod
    def blank_batch(cls, size: int, seq_len: int, args: Any, has_documents: bool) -> MaskedImages:
        """Return images of zeros."""
        return MaskedImages(
            torch.zeros(size, args.visible, args.patch_numbers),
            torch.zeros(size, args.masked, args.patch_numbers),
            torch.zeros(size, args.patches, dtype=torch.int64),
        )

    def packing(self, config: DataConfig, seq_len: int, seed: int) -> MaskedPatches:
        return MaskedPatches(self.args, seed)

    def open_source(self, config: DataConfig, seed: int) -> Source:
        return open_images(config, size=self.args.image_size, bands=self.args.channels, seed=seed)

    @classmethod
    def check_files(cls, config: DataConfig) -> None:
        check_images(config)

    @classmethod
    def left_out(cls, config: DataConfig) -> str | None:
        is_ours = DATASETS[config.dataset].kind in IMAGES
        return "corrupt_images" if is_ours and images_of(config).corrupt == "skip" else None

    def preview(self, batch: Batch) -> str:
        batch = batch.to("cpu")  # which masks the images
        assert isinstance(batch, MaskedImages)
        visible, patches = batch.visible.shape[1], batch.order.shape[1]
        size = " x ".join(map(str, batch.images(self.args.patch_size).shape[1:]))
        return f"{size}, {visible} of its {patches} patches visible"

    def picture(self, batch: Batch, outputs: Tensor) -> Tensor:
        """Draw some images, below each its visible patches, and below that the restored image.

        Hidden patches have the mean color; a restored one has the mean and the deviation of the
        original patch, which the network does not predict.
        """
        assert isinstance(batch, MaskedImages)
        batch, outputs = batch.split(PICTURED)[0], outputs[:PICTURED].float()
        variance, mean = torch.var_mean(batch.targets.float(), -1, keepdim=True)
        restored = outputs * (variance + EPSILON).sqrt() + mean
        rows = (batch.targets, torch.zeros_like(batch.targets), restored)
        whole = [
            dataclasses.replace(batch, targets=row).images(self.args.patch_size) for row in rows
        ]
        return drawn([restore(images, self.args) for images in whole])

    @classmethod
    def loss(cls, outputs: Tensor, targets: Tensor) -> Tensor:
        return squares(outputs, normalized(targets)) / targets[0].numel()

    @classmethod
    def split_loss(cls, group: dist.ProcessGroup, size: int) -> LossFunction:
        return partial(split_squares, group=group)


def normalized(patches: Tensor) -> Tensor:
    """Subtract each patch's own mean, and divide by its own deviation; float32."""
    wide = at_least_float32(patches)
    variance, mean = torch.var_mean(wide, -1, keepdim=True)
    return (wide - mean) / (variance + EPSILON).sqrt()


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the squared differences, in float32."""
    return (at_least_float32(outputs) - targets).square().sum()


def split_squares(outputs: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Compute the loss of outputs whose last dim is split over the ranks of `group`, in equal parts
    except the last."""
    size, rank = targets.shape[-1], dist.get_rank(group)
    part = -(-size // dist.get_world_size(group))
    own = normalized(targets)[..., part * rank : part * (rank + 1)]
    return sum_over_ranks(squares(outputs, own), group) / targets[0].numel()
