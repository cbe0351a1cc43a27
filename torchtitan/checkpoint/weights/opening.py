"""Opens weights of any format, under our names; the format is detected from the files."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from torchtitan.checkpoint.dcp.reader import DcpCheckpoint, is_dcp, saved_by_dcp
from torchtitan.checkpoint.dcp.torchtitan import TorchTitanCheckpoint, translated
from torchtitan.checkpoint.folder import read_state, read_verified_manifest, saved_steps
from torchtitan.checkpoint.manifest import STATE_FILE, Damaged
from torchtitan.checkpoint.ranges import Sizes
from torchtitan.checkpoint.storage import INDEX, Renamed, SavedTensors, TensorSource
from torchtitan.checkpoint.store import HISTORY, MANIFEST, NAME, OF_NODE
from torchtitan.checkpoint.weights.extras import Extras
from torchtitan.checkpoint.weights.foreign import weight_kinds
from torchtitan.checkpoint.weights.hugging_face_files import INDEX as HUGGING_FACE_INDEX
from torchtitan.checkpoint.weights.hugging_face_files import HuggingFaceWeights
from torchtitan.checkpoint.weights.meta_files import PARAMS, MetaWeights
from torchtitan.checkpoint.weights.network import Network, in_recipe, of_recipe, of_shapes
from torchtitan.config import ConfigError, RecipeError, allowed_names, import_modules, show
from torchtitan.logging import logger
from torchtitan.models import MODELS
from torchtitan.models.spec import ModelSpec
from torchtitan.remote import RemotePath, refuse_pointer

SIGNS = {
    "ours": (MANIFEST, INDEX, STATE_FILE, "step-*", "*/step-*"),
    "hf": (HUGGING_FACE_INDEX, "*.safetensors", "sharded/*.safetensors"),
    "meta": (PARAMS, "consolidated.*.pth"),
}
"""Files that identify the format of a folder."""


class Opened(NamedTuple):
    """Opened weights under our names, and the known facts about them."""

    source: TensorSource
    network: Network
    extras: Extras
    state: Callable[[], Mapping[str, Any]] | None = None
    """Function that reads a full checkpoint's state besides its tensors, in the form of
    train_state.json; None if it has only weights."""


def find(path: Path, frequent: bool = False) -> list[Path]:
    """Find the checkpoints at `path` by step: itself, a folder of them, or a run's dump folder.

    With `frequent`, those of this node too. Raises ConfigError if there is none.
    """
    is_step = path.name.startswith("step-") and path.is_dir()
    if is_step or (path / MANIFEST).is_file() or saved_by_dcp(path):
        return [path]
    below = sorted(p for p in path.iterdir() if p.is_dir()) if path.is_dir() else []
    own = [] if isinstance(path, RemotePath) else [p for p in below if (p / OF_NODE).exists()]
    folders = [path, *(each for each in below if each not in own)]
    if frequent:
        written = [each / HISTORY for each in folders if (each / HISTORY).exists()]
        told = [Path(json.loads(path.read_bytes())["folder"]) for path in written]
        folders += dict.fromkeys(each for each in [*own, *told] if each != path)
    found = [step for folder in folders for step in saved_steps(folder).values()]
    if not found:
        raise ConfigError(
            f"{path}: there is no checkpoint (step-N) in it; wanted one, a folder of them, "
            "or the job.dump_folder of a run"
        )
    return found


def newest(folder: Path) -> Path:
    """Return the newest complete checkpoint in a folder; the folder itself if it contains none.

    One of this project is complete if it exists; one of `dcp.save` if it has `.metadata`.
    """
    steps = saved_steps(folder)
    # On an object store these can only be ours.
    for path in folder.iterdir() if folder.is_dir() else ():
        if (name := NAME.fullmatch(path.name)) and saved_by_dcp(path):
            steps[int(name[1])] = path
    for step in (steps[number] for number in sorted(steps, reverse=True)):
        is_ended = (step / ".metadata").exists() or not is_dcp(step)
        if is_ended and any(step.iterdir()):
            return step
        logger.warning("%s: skipped, as its save is unfinished: it has no .metadata", step)
    return steps[max(steps)] if steps else folder


def find_format(folder: Path) -> str:
    """Detect the format of the weights in a folder."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    if is_dcp(newest(folder)):
        return "dcp"
    found = [kind for kind, signs in SIGNS.items() if any(any(folder.glob(sign)) for sign in signs)]
    if len(found) > 1 and "ours" in found:
        return "ours"  # whose files are also safetensors
    if len(found) > 1:
        raise ConfigError(f"{folder}: it contains {' and '.join(found)}; choose one with --from")
    if not found:
        if pickled := next(folder.glob("*.bin"), None):
            refuse_pointer(pickled)
            raise ConfigError(
                f"{pickled}: pickled weights are not read; write them as safetensors with "
                "transformers: from_pretrained(...), then save_pretrained(...)"
            )
        signs = ", ".join(sign for signs in SIGNS.values() for sign in signs)
        raise ConfigError(f"{folder}: found no weights; looked for {signs}")
    return found[0]


def open_ours(folder: Path, model: str | None, flavor: str | None) -> Opened:
    """Open a checkpoint of ours, or the newest in a folder of them or of a run."""
    path = find(folder)[-1]
    manifest = read_verified_manifest(path)
    state = read_state(path, manifest)
    recipe, source = state["recipe"], Verified(path)
    if (model or recipe["model.name"]) not in MODELS:
        import_modules(recipe.get("job.imports") or (), f"{path}: job.imports")
    network, extras = of_recipe(path, recipe, model, flavor), Extras.of_recipe(recipe)
    return Opened(source, network, extras, None if manifest.model_only else lambda: state)


def open_foreign(kind: str, folder: Path, model: str | None, flavor: str | None) -> Opened:
    """Open weights in a format of other software, a key of `FOREIGN`."""
    weights = FOREIGN[kind](folder, families(model), flavor)
    return Opened(weights, weights.network, weights.extras())


def open_dcp(folder: Path, model: str | None, flavor: str | None) -> Opened:
    """Open a checkpoint of `dcp.save`, or the newest in a folder, of the flavor of its shapes."""
    path = newest(folder)
    saved = DcpCheckpoint(path)
    kinds = weight_kinds(Renamed(saved, translated(saved)))
    found = {name: shape for name, (_, shape) in kinds.items()}
    command = f"torchtitan checkpoint convert {folder} NEW --recipe RECIPE.toml"
    try:
        opened = _opened_as(of_shapes(path, found, families(model), flavor), path, Extras())
    except RecipeError as error:
        hint = f"  if its recipe sets sizes, name it: {command}"
        raise RecipeError([*error.lines, hint]) from None
    if flavor is None:
        logger.warning(
            "%s: its shapes match %s, from which settings that do not affect shapes, such as "
            "heads and RoPE, are taken too. If its recipe sets other values: %s",
            path,
            opened.network,
            command,
        )
    return opened


def open_dcp_of(folder: Path, recipe: Mapping[str, Any]) -> Opened:
    """Open a checkpoint of `dcp.save` whose recipe, with all sizes, is known, by dotted keys."""
    return _opened_as(in_recipe(recipe), newest(folder), Extras.of_recipe(recipe))


def _opened_as(network: Network, path: Path, extras: Extras) -> Opened:
    weights = TorchTitanCheckpoint(path, network)
    return Opened(weights, network, extras, weights.state if weights.holds_run else None)


FOREIGN: dict[str, type[HuggingFaceWeights] | type[MetaWeights]] = {
    "hf": HuggingFaceWeights,
    "meta": MetaWeights,
}
OPEN: dict[str, Callable[[Path, str | None, str | None], Opened]] = {
    "ours": open_ours,
    **{kind: partial(open_foreign, kind) for kind in FOREIGN},
    "dcp": open_dcp,
}


def families(model: str | None) -> list[ModelSpec[Any]]:
    """Return the families that weights may belong to."""
    if model is None:
        return list(MODELS.values())
    if model not in MODELS:
        raise ConfigError(f"--model: got {show(model)}; {allowed_names(model, MODELS)}")
    return [MODELS[model]]


class Verified(SavedTensors):
    """Tensors of a checkpoint of ours, each verified to be what was saved."""

    def part(self, name: str, offsets: Sizes, sizes: Sizes) -> Tensor:
        """Read and verify a tensor, or read a block of it, for which there is no digest."""
        tensor = super().part(name, offsets, sizes)
        if sizes == self.kinds[name][1] and not self.is_intact(name, tensor):
            raise Damaged(f"{self.checkpoint}: damaged: {name} differs from what was saved")
        return tensor
