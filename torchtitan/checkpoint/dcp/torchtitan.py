"""Checkpoints of TorchTitan, under our names.

    theirs                                 here
    <weight>                               model.<weight>
    optimizer.state.<weight>.<state>       optimizer.<weight>.<state>
    optimizer.param_groups.<weight>.<key>  the recipe's; a difference is logged
    lr_scheduler.last_epoch                train_state: step - schedule_start
    train_state.step, .ntokens_seen        train_state: step, tokens
    dataloader.dp_rank_<r>                 private to their ranks, and not read

Weights and states have the same layout in both, so only names are translated. TorchTitan v0.1
writes `model.<weight>`, and `lr_scheduler` and `train_state` as one value each. v0.3 renames the
weights in `RENAMED`, and fuses the moments of queries, keys and values, which are not read.

TorchTitan reads every key of its optimizer, scheduler and counters, so an export has all of them,
in the classic form of torch's distributed checkpoint (DCP), which `dcp.load` opens:

    __0_0.distcp, __0_1.distcp, ...   tensors and values, each as `torch.save` writes it
    .metadata                         their names and locations: a pickle, as torch requires

torch's own writer keeps all tensors of a file until it is complete; here one is in memory at a
time.
"""

import math
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.checkpoint.contents import SavedRun
from torchtitan.checkpoint.dcp.reader import DcpCheckpoint
from torchtitan.checkpoint.folder import TrainState, place_in_schedule
from torchtitan.checkpoint.storage import Renamed, TensorSource
from torchtitan.checkpoint.weights.foreign import cast, fitting, unwrapped, weight_kinds, weights_of
from torchtitan.checkpoint.weights.network import Network
from torchtitan.config import ConfigError, RecipeError, show
from torchtitan.logging import logger
from torchtitan.optim import OPTIMIZERS, NamedParameter, OptimizerConfig, UpdateRule, rate_in_recipe
from torchtitan.optim.grouping import assign
from torchtitan.torch_private.distributed import storage_info

STATE, OPTION = "optimizer.state.", "optimizer.param_groups."
STEP, TOKENS = "train_state.step", "train_state.ntokens_seen"
LAST_EPOCH = "lr_scheduler.last_epoch"
NO_WEIGHTS = {"optimizer", "lr_scheduler", "train_state", "dataloader"}
"""First parts of the names of entries that are not weights."""
RENAMED = {"attention.qkv_linear.": "attention.", "lm_head.": "output."}
"""Parts of the names of weights in v0.3, and the same parts here."""
SHOWN = 5
"""Maximum number of mismatched states in a message."""
OPTIONS = ("initial_lr", "betas", "eps", "weight_decay")
"""Options of each weight that a recipe also has."""


def to_ours(theirs: str) -> str | None:
    """Return our name of a tensor; None if it is neither a weight nor an optimizer state."""
    if theirs.startswith(STATE):
        return f"optimizer.{theirs.removeprefix(STATE)}"
    if theirs.partition(".")[0] in NO_WEIGHTS:
        return None
    for renamed, name in RENAMED.items():
        theirs = theirs.replace(renamed, name)
    return f"model.{theirs}"


def translated(saved: DcpCheckpoint) -> dict[str, str]:
    """Map our names to TorchTitan's, for tensors that both have."""
    plain = unwrapped("the checkpoint", saved.shapes(), ())
    names = {ours: theirs for name, theirs in plain.items() if (ours := to_ours(name))}
    weights = [name for name in names if name.startswith("model.")]
    if all(name.startswith("model.model.") for name in weights):  # v0.1
        return {name.replace("model.model.", "model.", 1): names[name] for name in names}
    return names


class TorchTitanCheckpoint(Renamed):
    """Tensors of such a checkpoint, and its other values; see `TensorSource`."""

    def __init__(self, path: Path, network: Network) -> None:
        """Open a checkpoint; raise ConfigError if its weights do not match `network`."""
        self.path, self.saved, self.network = path, DcpCheckpoint(path), network
        super().__init__(self.saved, translated(self.saved))
        fitting(path, network, weight_kinds(self), network.parameters())
        if (shape := network.spec.attention(network.args)) and shape.has_norms:
            raise ConfigError(
                f"{path}: the order of the rows of queries and keys of {network} in TorchTitan is "
                "unknown; use its weights in the format hf"
            )

    @property
    def dtype(self) -> str:
        """Dtype of the weights, as written in a recipe."""
        dtype, _ = next(iter(weight_kinds(self).values()))
        return str(dtype).removeprefix("torch.")

    @property
    def tokens(self) -> int | None:
        """Number of tokens that it was trained on, if recorded."""
        tokens = self.saved.number(TOKENS)
        return tokens if type(tokens) is int and tokens >= 0 else None

    @property
    def holds_run(self) -> bool:
        """Whether the checkpoint has more than weights."""
        return self.saved.number(STEP) is not None

    def counters(self) -> dict[str, int]:
        """Return its counters, as in `TrainState`; raise ConfigError if it has no step."""
        step, last_epoch = self.saved.number(STEP), self.saved.number(LAST_EPOCH)
        if type(step) is not int or step < 0:
            raise ConfigError(f"{self.path}: {STEP}: got {show(step)}; wanted a number of steps")
        if self.path.name.startswith("step-") and self.path.name != f"step-{step}":
            raise ConfigError(
                f"{self.path}: its {STEP} is {step}, which its name contradicts; rename the folder"
            )
        begun = step - last_epoch if type(last_epoch) is int and 0 <= last_epoch <= step else 0
        tokens = self.tokens or 0
        before = tokens * begun // max(step, 1)
        counted = {"step": step, "tokens": tokens, "schedule_start": begun}
        return counted | {"schedule_start_tokens": before}

    def run(self) -> SavedRun:
        """Return everything that a run resumes from."""
        return SavedRun(self.path, self, self.counters())

    def options(self, weight: str) -> dict[str, float]:
        """Return a weight's recorded update options, by the keys of a recipe; `lr` is the peak."""
        lr, betas, *rest = (self.saved.number(f"{OPTION}{weight}.{key}") for key in OPTIONS)
        pair = betas if isinstance(betas, Sequence) and len(betas) == 2 else (None, None)
        values = zip(("lr", "beta1", "beta2", *OPTIONS[2:]), (lr, *pair, *rest), strict=True)
        return {key: value for key, value in values if isinstance(value, int | float)}

    def rules(self, optimizer: OptimizerConfig) -> dict[str, UpdateRule]:
        """Return the recipe's update rule of each weight."""
        spec, shapes = self.network.spec, self.network.parameters()
        parameters = [
            NamedParameter(torch.empty(shape, device="meta"), name, spec.role(name, len(shape)))
            for name, shape in shapes.items()
        ]
        return {a.parameter.name: a.rule for a in assign(parameters, optimizer)}

    def check_states(self, optimizer: OptimizerConfig) -> None:
        """Raise ConfigError unless the states are exactly those that an optimizer keeps."""
        found: dict[str, set[str]] = {}
        for name in self.names:
            if name.startswith("optimizer."):
                weight, _, state = name.removeprefix("optimizer.").rpartition(".")
                found.setdefault(weight, set()).add(state)
        kinds = set().union(*found.values())
        wrong = []
        for weight, rule in self.rules(optimizer).items():
            wanted = rule.state_names()
            if wanted is None:  # compared once they are created
                continue
            if not wanted & kinds and wanted != kinds:
                raise ConfigError(
                    f"{self.path}: it holds other optimizer states ({_words(kinds)}) than those "
                    f"of optimizer.name = {optimizer.name} ({_words(wanted)}); choose another "
                    "optimizer, or do not load them: checkpoint.exclude_from_loading = "
                    '["optimizer"]'
                )
            there = found.get(weight, set())
            wrong += [f"missing: {STATE}{weight}.{state}" for state in sorted(wanted - there)]
            wrong += [f"unexpected: {STATE}{weight}.{state}" for state in sorted(there - wanted)]
        if wrong:
            more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
            lines = (f"  {line}" for line in [*wrong[:SHOWN], *more])
            raise RecipeError([f"{self.path}: not the states of {optimizer.name}:", *lines])

    def state(self) -> dict[str, Any]:
        """Return a run's state besides tensors, in our form, without a position in the data."""
        name = "Adam" if self._option("decoupled_weight_decay") is False else "AdamW"
        section = {"name": name, **self.options(next(iter(self.network.parameters())))}
        self.check_states(OPTIMIZERS[name].model_validate(section))
        return {
            "train_state": asdict(TrainState()) | self.counters(),
            "recipe": {f"optimizer.{key}": value for key, value in section.items()},
        }

    def _option(self, key: str) -> Any:
        """Return an option of the first weight."""
        return self.saved.number(f"{OPTION}{next(iter(self.network.parameters()))}.{key}")

    @property
    def rate(self) -> float | None:
        """Learning rate of the next step, if recorded."""
        rate = self._option("lr")
        return rate if isinstance(rate, float) else None

    def changes(self, optimizer: OptimizerConfig) -> list[str]:
        """Return the differences in how a recipe updates weights, one line each."""
        rules = self.rules(optimizer)
        # Options are read for one layer only, since they are the same in all.
        kinds = {weight: re.sub(r"\.\d+\.", ".*.", weight) for weight in rules}
        likes = {kind: weight for weight, kind in kinds.items()}
        options = {kind: self.options(weight) for kind, weight in likes.items()}
        changed: Counter[tuple[str, float, float]] = Counter()
        for weight, rule in rules.items():
            for key, there in options[kinds[weight]].items():
                here = getattr(rule, key, there)
                if not math.isclose(there, here, rel_tol=1e-6):
                    changed[key, there, here] += 1
        lines = [
            f"optimizer.{key}: {there:g} -> {here:g}"
            + (f" (for {count} of {len(rules)} weights)" if count < len(rules) else "")
            for (key, there, here), count in changed.items()
        ]
        decoupled, rule = self._option("decoupled_weight_decay"), next(iter(rules.values()))
        if isinstance(decoupled, bool) and getattr(rule, "decoupled", decoupled) != decoupled:
            lines.append(f"optimizer.name: {'AdamW' if decoupled else 'Adam'} -> {optimizer.name}")
        return lines


def _words(names: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "none"


# --- export ---

CHUNK_BYTES = 64 * 2**20
"""Bytes of a tensor per item: a rank that needs a part of it reads whole items."""
Keys = tuple[str, ...]
"""Path of a value in nested dictionaries; joined by dots, its name."""


def write_dcp(folder: Path, items: Iterable[tuple[Keys, Any]], max_file_bytes: int) -> None:
    """Write tensors and plain values into an empty folder; a file may be one larger item."""
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
            if size and part.untyped_storage().nbytes() != size:
                part = part.clone()  # else its whole storage would be written
            with path.open("ab") as file:
                torch.save(part, file)
                end = file.tell()
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


WRITTEN = ("AdamW", "Adam")
"""Optimizers whose states TorchTitan reads."""
STATES = ("step", "exp_avg", "exp_avg_sq")


def write_torchtitan(
    folder: Path,
    source: TensorSource,
    network: Network,
    state: Mapping[str, Any] | None,
    dtype: torch.dtype | None,
    max_file_bytes: int,
) -> None:
    """Write our weights, or a run with its `state`, with one tensor at a time in memory.

    `dtype` is for weights without a run; None: each keeps its own. Raises RecipeError if TorchTitan
    cannot resume the run.
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
        yield (name,), cast(name, source.read(f"model.{name}"), dtype)


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
    if (name := recipe["optimizer.name"]) not in WRITTEN:
        yield f"optimizer.name: got {show(name)}; TorchTitan has {', '.join(WRITTEN)}"
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
    next_step, tokens = place_in_schedule(counters)
    rate = rate_in_recipe(recipe, next_step, tokens)
    assert rate is not None, "a run without a known schedule is refused"
    options = _options(recipe, peak, rate)
    for name in network.parameters():
        for kind in STATES:
            yield ("optimizer", f"state.{name}.{kind}"), source.read(f"optimizer.{name}.{kind}")
        for key, value in options.items():
            yield ("optimizer", f"param_groups.{name}.{key}"), value
    schedule = {
        "base_lrs": [peak],
        "last_epoch": next_step - 1,
        "_step_count": next_step,
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
