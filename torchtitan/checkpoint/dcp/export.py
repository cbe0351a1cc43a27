"""Export of a checkpoint of ours as TorchTitan saves one; the names are in `dcp.torchtitan`.

TorchTitan reads every key of its optimizer, scheduler and counters, so all of them are written, in
the classic form of torch's distributed checkpoint (DCP), which `dcp.load` opens:

    __0_0.distcp, __0_1.distcp, ...   tensors and values, each as `torch.save` writes it
    .metadata                         their names and locations: a pickle, as torch requires

torch's own writer keeps all tensors of a file until it is complete; here one is in memory at a
time.
"""

import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.checkpoint.dcp.torchtitan import to_theirs
from torchtitan.checkpoint.storage import TensorSource
from torchtitan.checkpoint.weights.foreign import cast, weights_of
from torchtitan.checkpoint.weights.network import Network
from torchtitan.config import RecipeError, show
from torchtitan.logging import logger
from torchtitan.optim import rate_in_recipe
from torchtitan.torch_private.distributed import storage_info

CHUNK_BYTES = 64 * 2**20
"""Bytes of a tensor per item: a rank that needs a part of it reads whole items."""
Keys = tuple[str, ...]
"""Path of a value in nested dictionaries; joined by dots, its name."""


def write_dcp(folder: Path, items: Iterable[tuple[Keys, Any]], max_file_bytes: int) -> None:
    """Write tensors and plain values into an empty folder.

    Args:
        max_file_bytes: maximum size of a file, unless a single item is larger.
    """
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    kinds: dict[str, Any] = {}
    keys_of: dict[str, Keys] = {}
    places: dict[MetadataIndex, Any] = {}
    number, end = 0, 0
    for keys, value in items:
        name = ".".join(keys)
        keys_of[name], kinds[name] = keys, BytesStorageMetadata()
        if isinstance(value, Tensor):
            kinds[name] = TensorStorageMetadata(TensorProperties(value.dtype), value.shape, [])
        for offsets, part in _chunks(value):
            size = part.nbytes if isinstance(part, Tensor) else 0
            if end and end + size > max_file_bytes:
                number, end = number + 1, 0
            path, begin = folder / f"__0_{number}.distcp", end
            end = _append(path, part)
            places[MetadataIndex(name, offsets)] = storage_info(path.name, begin, end - begin)
            if offsets is not None:
                kinds[name].chunks.append(ChunkStorageMetadata(offsets, part.shape))
        del value, part  # before the next is read
    metadata = Metadata(kinds, keys_of, places, StorageMeta(), "1.0.0")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _chunks(value: Any) -> Iterator[tuple[torch.Size | None, Any]]:
    """Yield blocks of rows of a tensor with their offsets; anything else unchanged."""
    if not isinstance(value, Tensor):
        yield None, value
    elif value.nbytes <= CHUNK_BYTES or not value.ndim:
        yield torch.Size([0] * value.ndim), value
    else:
        rows = max(CHUNK_BYTES * len(value) // value.nbytes, 1)
        for at in range(0, len(value), rows):
            yield torch.Size([at] + [0] * (value.ndim - 1)), value[at : at + rows]


def _append(path: Path, value: Any) -> int:
    """Append an item to a file; return the new length of the file."""
    if isinstance(value, Tensor) and value.untyped_storage().nbytes() != value.nbytes:
        value = value.clone()  # else its whole storage would be written
    with path.open("ab") as file:
        torch.save(value, file)
        return file.tell()


OPTIMIZERS = ("AdamW", "Adam")
STATES = ("step", "exp_avg", "exp_avg_sq")


def write_torchtitan(
    folder: Path,
    source: TensorSource,
    network: Network,
    state: Mapping[str, Any] | None,
    dtype: torch.dtype | None,
    max_file_bytes: int,
) -> None:
    """Write our weights, or a whole run, into a folder, with one tensor at a time in memory.

    Args:
        state: content of train_state.json; None exports the weights alone.
        dtype: dtype of exported weights without a run; None: each keeps its own.

    Raises:
        RecipeError: if TorchTitan cannot resume the run.
    """
    if state is None:
        write_dcp(folder, _weights(source, network, dtype), max_file_bytes)
        for line in _unknown_sizes(network):
            logger.warning("PyTorch can read this checkpoint, but TorchTitan cannot: %s", line)
        return
    if found := [*_obstacles(state["recipe"]), *_unknown_sizes(network)]:
        lines = (f"  {line}" for line in found)
        raise RecipeError(["--with-optimizer: TorchTitan cannot continue this run:", *lines])
    write_dcp(folder, _run(source, network, state), max_file_bytes)
    average = ", the average of the weights" * bool(state["recipe"].get("optimizer.average"))
    logger.warning(
        "not converted: the position of the data, the random states%s; continue the run in "
        'TorchTitan with checkpoint.exclude_from_loading = ["dataloader"]',
        average,
    )


def _weights(
    source: TensorSource, network: Network, dtype: torch.dtype | None = None
) -> Iterator[tuple[Keys, Tensor]]:
    """Yield the weights, with top-level keys, converted to `dtype`; None: each keeps its own."""
    for name in weights_of(source, network):
        ours = f"model.{name}"
        theirs = to_theirs(ours)
        assert theirs is not None, ours
        yield (theirs,), cast(name, source.read(ours), dtype)


def _unknown_sizes(network: Network) -> Iterator[str]:
    """Yield the sizes of a network that TorchTitan's Llama does not have."""
    spec, args = network.spec, network.args
    sizes = spec.settings.sizes_of(args)
    if spec.tied(args):
        yield "model.tied: TorchTitan's Llama has a separate output matrix"
    if sizes.get("head_dim") and sizes["head_dim"] * args.n_heads != args.dim:
        yield "model.head_dim: TorchTitan's Llama has heads of dim / n_heads"
    if getattr(args, "qkv_bias", False):
        yield f"model.name: TorchTitan's Llama has no biases, and {spec.name} has"
    if {"head_norm", "joint_norm"}.intersection(spec.tensor_plan.values()):
        yield f"model.name: TorchTitan's Llama has no norms in heads, and {spec.name} has"
    if sizes.get("sliding_window"):
        yield "model.sliding_window: TorchTitan's Llama attends to all tokens"
    if sizes.get("base_width"):
        yield "model.base_width: TorchTitan's Llama has no factors of logits; use the format hf"
    if sizes.get("norm") == "none":
        yield "model.norm: TorchTitan's Llama has norms"


def _obstacles(recipe: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why TorchTitan cannot resume the run of a recipe, by dotted keys."""
    if (name := recipe["optimizer.name"]) not in OPTIMIZERS:
        yield f"optimizer.name: got {show(name)}; TorchTitan has {', '.join(OPTIMIZERS)}"
    uneven = {
        "optimizer.groups": any(key.startswith("optimizer.groups") for key in recipe),
        "optimizer.no_weight_decay_on": bool(recipe.get("optimizer.no_weight_decay_on")),
    }
    for key in (key for key, is_used in uneven.items() if is_used):
        yield f"{key}: TorchTitan updates all weights with the same settings"
    if "lr_scheduler.warmup_steps" not in recipe or rate_in_recipe(recipe, 1, 0) is None:
        yield "lr_scheduler: unknown, as the checkpoint was itself converted from dcp"


def _run(
    source: TensorSource, network: Network, state: Mapping[str, Any]
) -> Iterator[tuple[Keys, Any]]:
    """Yield everything that TorchTitan resumes from."""
    recipe, counters = state["recipe"], state["train_state"]
    yield from _weights(source, network)
    step, peak = counters["step"], recipe["optimizer.lr"]
    done = step - counters.get("schedule_start", 0)
    tokens = counters["tokens"] - counters.get("schedule_start_tokens", 0)
    rate = rate_in_recipe(recipe, done + 1, tokens)
    assert rate is not None, "a run without a known schedule is refused"
    options = _options(recipe, peak, rate)
    for name in network.parameters():
        for kind in STATES:
            yield ("optimizer", f"state.{name}.{kind}"), source.read(f"optimizer.{name}.{kind}")
        for key, value in options.items():
            yield ("optimizer", f"param_groups.{name}.{key}"), value
    schedule = {
        "base_lrs": [peak],
        "last_epoch": done,
        "_step_count": done + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": [rate],
    }
    for key, value in schedule.items():
        yield ("lr_scheduler", key), value
    yield ("train_state", "step"), step
    yield ("train_state", "ntokens_seen"), counters["tokens"]


def _options(recipe: Mapping[str, Any], peak: float, rate: float) -> dict[str, Any]:
    """Return the options of a torch optimizer's group, which apply to each weight."""
    implementation = recipe.get("optimizer.implementation", "fused")
    return {
        "lr": rate,
        "betas": (recipe["optimizer.beta1"], recipe["optimizer.beta2"]),
        "eps": recipe["optimizer.eps"],
        "weight_decay": recipe["optimizer.weight_decay"],
        "amsgrad": False,
        "maximize": False,
        "foreach": implementation == "foreach",
        "capturable": False,
        "differentiable": False,
        "fused": implementation == "fused",
        "decoupled_weight_decay": recipe["optimizer.name"] == "AdamW",
        "initial_lr": peak,
    }
