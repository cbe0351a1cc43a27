"""Linear probe: the accuracy of predicting an image's class by a linear function of features.

The features of an image are the mean of the frozen encoder's outputs over its patches, unmasked.
They are standardized by mean and deviation over the training images (a batch norm without learned
parameters), and a multinomial logistic regression is fitted to them, all images at once: the mean
cross entropy plus `PENALTY` / 2 times the sum of squared weights, which has one minimum, found by
L-BFGS in float64. So there is no learning rate, no epochs, and no randomness. Every fifth
image of the data set, by its number, is held out.

An encoder with new weights is probed the same way for comparison, since random features are also
informative.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.checkpoint.folder import read_state, read_verified_manifest
from torchtitan.checkpoint.weights.foreign import weights_of
from torchtitan.checkpoint.weights.network import Network
from torchtitan.checkpoint.weights.opening import OPEN, find, find_format
from torchtitan.config import ConfigError
from torchtitan.device import pick
from torchtitan.logging import logger
from torchtitan.models.spec import build_empty, initialize
from torchtitan.research.vit_mae.images.crop import unit
from torchtitan.research.vit_mae.images.decoding import CorruptImage
from torchtitan.research.vit_mae.images.open_images import open_view
from torchtitan.research.vit_mae.images.settings import ImageData
from torchtitan.research.vit_mae.images.source import ImageSample, ImageView
from torchtitan.research.vit_mae.model import ViTMAE, normalize
from torchtitan.tools.evaluate import EvaluationRequest, Result
from torchtitan.tools.inference import converters_in_use, converters_of_recipe

PROBE = "linear_probe"
"""Name of the task."""
HELD_OUT = 5
PENALTY = 1e-3
MOST_ITERATIONS = 500
Encode = Callable[[Tensor], Tensor]
"""Function from images (N, bands, H, W) in 0..1 to features (N, D) float64."""
ORDER_SEED = 0
"""Seed for choosing images if not all are used, since a folder is ordered by class."""


class Found(NamedTuple):
    """Results of a probe; accuracies are on held-out images, from 0 to 1."""

    accuracy: float
    random_encoder: float
    """Accuracy with new weights, drawn by the seed of the run."""
    most_frequent: float
    """Accuracy of always guessing the most frequent class in training."""
    classes: int
    images: int
    held_out: int


class Features(NamedTuple):
    """Features of images by several encoders, and their labels."""

    found: list[Tensor]
    """Features of each encoder (N, D), float64."""
    labels: Tensor
    """Classes (N,), int64."""
    is_held_out: Tensor
    """Mask of held-out images (N,), bool."""


def linear_probe(request: EvaluationRequest) -> Result:
    """Run the evaluation `torchtitan evaluate --tasks linear_probe`."""
    found = run_probe(request)
    lines = (
        f"{PROBE}  accuracy        {found.accuracy:.4f}  of {found.held_out} held-out images in "
        f"{found.classes} classes",
        f"{PROBE}  random encoder  {found.random_encoder:.4f}",
        f"{PROBE}  most frequent   {found.most_frequent:.4f}",
    )
    return Result(found._asdict(), lines)


def run_probe(request: EvaluationRequest) -> Found:
    """Probe an encoder.

    Raises:
        ConfigError: if there is no such encoder, or its images have no classes.
    """
    place = request.place
    if place.convert:
        raise ConfigError(f"--convert.0.name: {PROBE} converts nothing; leave it out")
    kind = place.format or find_format(place.path)
    opened = OPEN[kind](place.path, place.model, place.flavor)
    network = opened.network
    if network.spec.build is not ViTMAE:
        raise ConfigError(f"--tasks: {PROBE} needs an image model, and {network} is not one")
    weights_of(opened.source, network)
    recipe: dict[str, Any] = {}
    if kind == "ours":
        path = find(place.path)[-1]
        recipe = read_state(path, read_verified_manifest(path))["recipe"]
    converters_in_use(place.convert, converters_of_recipe(recipe, str(place.path)), network)
    args = network.args
    config = data_of(recipe, request.dataset, request.dataset_path)
    view = open_view(config, size=args.image_size, bands=args.channels)
    if not view.images.has_classes:
        raise ConfigError(
            f"{view.images.name(0)} and the other images have no classes, which a probe needs; "
            "use subfolders of an image_folder or of rasters, or .cls files in image_shards"
        )
    device, dtype = pick(0).torch_device, request.dtype or torch.float32

    trained = _encoder(network, device)
    for name, weight in trained.state_dict().items():
        weight.copy_(opened.source.read(f"model.{name}"))
    new = _encoder(network, device)
    initialize(
        new.named_parameters(), partial(network.spec.init_std, args), recipe.get("debug.seed", 0)
    )
    encoders = [partial(features, each.to(dtype)) for each in (trained, new)]
    made = encode(view, request.limit, request.batch_size, encoders)
    train, held_out = made.labels[~made.is_held_out], made.labels[made.is_held_out]
    counts = train.bincount()
    kinds = int((counts > 0).sum())
    if kinds < 2 or not len(held_out):
        raise ConfigError(
            "a probe needs training images of at least two classes, and held-out images; got "
            f"{len(train)} of {kinds} classes, and {len(held_out)} held out"
        )
    count = int(made.labels.max()) + 1
    of_trained, of_new = (accuracy(each, made, count) for each in made.found)
    frequent = float((held_out == counts.argmax()).double().mean())
    return Found(of_trained, of_new, frequent, count, len(made.labels), len(held_out))


def data_of(recipe: dict[str, Any], name: str | None, path: str | None) -> ImageData:
    """Return the section `[data]` of a recorded recipe, with another data set if one is named.

    Raises:
        ConfigError: if neither names one.
    """
    said: dict[str, Any] = {}
    for key, value in recipe.items():
        section, _, rest = key.partition(".")
        if section == "data" and value is not None:
            inner, _, leaf = rest.partition(".")
            (said.setdefault(inner, {}) if leaf else said)[leaf or inner] = value
    if name is not None:
        said |= {"dataset": name, "dataset_path": path}
    elif path is not None:
        said["dataset_path"] = path
    if "dataset" not in said:
        raise ConfigError(
            "name the images of the probe with --dataset; these weights do not record a data set"
        )
    said["images"] = said.get("images", {}) | {"augment": False}
    return ImageData.model_validate(said)


@torch.no_grad()
def encode(view: ImageView, limit: int | None, batch: int, encoders: Sequence[Encode]) -> Features:
    """Encode each image of a data set, or at most `limit` of them, by several encoders."""
    numbers = np.random.default_rng(ORDER_SEED).permutation(len(view))[:limit]
    found: list[list[Tensor]] = [[] for _ in encoders]
    labels: list[int] = []
    held_out: list[bool] = []
    for start in range(0, len(numbers), batch):
        some = numbers[start : start + batch].tolist()
        samples = [sample for number in some if (sample := _sample(view, number))]
        labels += [view.images.label(sample.number) for sample in samples]
        held_out += [sample.number % HELD_OUT == HELD_OUT - 1 for sample in samples]
        for encoder, rows in zip(encoders, found, strict=True):
            if samples:
                rows.append(encoder(torch.stack([unit(sample.image) for sample in samples])))
    made = [torch.cat(rows) if rows else torch.empty(0, 0) for rows in found]
    return Features(made, torch.tensor(labels, dtype=torch.int64), torch.tensor(held_out))


def _sample(view: ImageView, number: int) -> ImageSample | None:
    try:
        return view.sample(number)
    except CorruptImage as error:
        if view.config.corrupt == "stop":
            raise
        logger.warning("skipped: %s", error)
        return None


def _encoder(network: Network, device: torch.device) -> ViTMAE:
    made = build_empty(network.spec.build, network.args, 1, torch.float32).to_empty(device=device)
    assert isinstance(made, ViTMAE)
    made.init_buffers()
    return made.requires_grad_(False)


def features(encoder: ViTMAE, images: Tensor) -> Tensor:
    """Return mean features over the patches of images (N, bands, H, W) in 0..1: (N, D) float64."""
    weight = next(encoder.parameters())
    given = normalize(images.to(weight.device), encoder.args).to(weight.dtype)
    return encoder.encode(given)[:, 1:].double().mean(1).cpu()


def accuracy(found: Tensor, made: Features, classes: int) -> float:
    """Return the accuracy on held-out images of a regression fitted on the others."""
    train = ~made.is_held_out
    logits = fit(found[train], made.labels[train], classes)(found[made.is_held_out])
    return float((logits.argmax(1) == made.labels[made.is_held_out]).double().mean())


def fit(found: Tensor, labels: Tensor, classes: int) -> Any:
    """Fit a logistic regression of `labels` (N,) on standardized `found` (N, D).

    The returned function maps features (M, D) to logits (M, classes).
    """
    mean, std = found.mean(0), found.std(0, correction=0)

    def standardized(x: Tensor) -> Tensor:
        return (x - mean) / std.clamp_min(1e-12)

    x = standardized(found)
    line = nn.Linear(x.shape[1], classes, dtype=torch.float64)
    nn.init.zeros_(line.weight)
    nn.init.zeros_(line.bias)
    search = torch.optim.LBFGS(
        line.parameters(),
        max_iter=MOST_ITERATIONS,
        tolerance_grad=1e-8,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        search.zero_grad()
        loss = F.cross_entropy(line(x), labels) + PENALTY / 2 * line.weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    search.step(closure)  # type: ignore[no-untyped-call]
    return lambda others: line(standardized(others)).detach()
