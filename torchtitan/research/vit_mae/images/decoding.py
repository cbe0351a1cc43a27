"""Decoding of images: photographs by pillow, rasters by numpy or tifffile.

Pillow and tifffile are optional, and imported when an image is decoded. Their errors become a
`CorruptImage` with the reason.
"""

import importlib.util
import io
import struct
import tokenize
import zlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtitan.config import ConfigError
from torchtitan.packages import install
from torchtitan.research.vit_mae.images.crop import Crop

PHOTOGRAPHS: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm")
NUMPY: Final = (".npy",)
TIFF: Final = (".tif", ".tiff")
RASTERS: Final = NUMPY + TIFF
SUFFIXES: Final = PHOTOGRAPHS + RASTERS
PACKAGES: Final = {"pillow": ("PIL", PHOTOGRAPHS), "tifffile": ("tifffile", TIFF)}
"""Decoder packages: the name in Python, and the suffixes they decode."""
MODES: Final = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's modes, by the number of bands."""
DAMAGE: Final = (
    *(OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError),
    *(struct.error, zlib.error, tokenize.TokenError),
)
"""Errors that decoders raise for malformed bytes."""


class CorruptImage(ConfigError):
    """Error that an image cannot be decoded; the message names it and the reason."""


def check_packages(suffixes: set[str]) -> None:
    """Refuse files whose decoder is not installed.

    Raises:
        ConfigError: with the package to install.
    """
    for package, (module, decoded) in PACKAGES.items():
        needed = sorted(suffixes.intersection(decoded))
        if needed and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"{package}, which decodes {' and '.join(needed)} files, is not installed: "
                f"{install(package)}"
            )


def decode(content: bytes, suffix: str, bands: int, crop: Crop) -> Tensor:
    """Decode a part of an image to (bands, height, width), uint8 or float32 in 0..1.

    A JPEG is reduced by `crop.reduction`: fewer coefficients of its cosine transform are computed.

    Args:
        bands: number of bands to which a photograph is converted; a raster keeps its own.

    Raises:
        CorruptImage: if it cannot be decoded.
        ConfigError: if it does not have the required size or bands.
    """
    try:
        if suffix in PHOTOGRAPHS:
            return scaled(_photograph(content, bands, crop), crop)
        if suffix in NUMPY:
            pixels = bands_first(np.load(io.BytesIO(content), allow_pickle=False))
        else:
            pixels = _tiff(content)
        return crop.part(scaled(pixels, crop))
    except ConfigError:
        raise
    except DAMAGE as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CorruptImage(f"{crop.name}: it cannot be decoded: {reason}") from None


def _photograph(content: bytes, bands: int, crop: Crop) -> npt.NDArray[Any]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            if crop.config.crop != "resized":
                image.load()  # a size that is refused is not that of damaged bytes
            box = crop.box(image.height, image.width)
            factor = crop.reduction(box)
            if image.draft(None, (image.width // factor, image.height // factor)) is None:
                factor = 1  # not a JPEG
            top, left, height, width = (each // factor for each in box)
            part = image.crop((left, top, left + width, top + height))
            if part.mode.startswith(("I", "F")):  # 16 bits; pillow would cut them off at 255
                gray = np.asarray(part).astype(np.uint16)
                return np.repeat(gray[None], bands if bands in MODES else 1, 0)
            pixels = np.array(part.convert(MODES.get(bands, "RGB")))
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from None
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _tiff(content: bytes) -> npt.NDArray[Any]:
    import tifffile

    with tifffile.TiffFile(io.BytesIO(content)) as file:
        series = file.series[0]
        pixels, axes = series.asarray(), series.axes
    if pixels.ndim == 3 and axes.endswith("YXS"):
        pixels = pixels.transpose(2, 0, 1)
    return bands_first(pixels)


def bands_first(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert (bands, H, W) or (H, W) to (bands, H, W).

    Raises:
        ValueError: if it has another number of dims.
    """
    if pixels.ndim not in (2, 3):
        raise ValueError(f"it has the shape {pixels.shape}; wanted (bands, H, W) or (H, W)")
    return pixels[None] if pixels.ndim == 2 else pixels


def scaled(pixels: npt.NDArray[Any], crop: Crop) -> Tensor:
    """Return the requested bands: bytes as they are, unless another value than 255 becomes 1, and
    other numbers as float32, with the largest value scaled to 1.

    Raises:
        CorruptImage: if a value is not a finite number.
        ConfigError: if there is no such band.
    """
    config, name = crop.config, crop.name
    if config.bands:
        if max(config.bands) >= len(pixels):
            raise ConfigError(
                f"{name}: it has {len(pixels)} bands, but data.images.bands selects band "
                f"{max(config.bands)}, counted from 0"
            )
        pixels = pixels[list(config.bands)]
    kind = pixels.dtype
    if kind.kind not in "uif" or not pixels.size:
        raise CorruptImage(f"{name}: it has {pixels.shape} numbers of type {kind}")
    if kind == np.uint8 and config.max_value in (None, 255):
        return torch.from_numpy(pixels)
    largest = float(np.iinfo(kind).max) if kind.kind in "ui" else 1.0
    found = torch.from_numpy(pixels.astype(np.float32)) / (config.max_value or largest)
    if kind.kind == "f" and not bool(found.isfinite().all()):
        raise CorruptImage(f"{name}: it has values that are not finite, such as NaN")
    return found
