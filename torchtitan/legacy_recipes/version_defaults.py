"""The defaults of TorchTitan that differ from ours, for recipes that leave them unset.

A recipe is TorchTitan's if it has a key that only TorchTitan has, and no section that only this
project has: v0.2.2 refuses unknown keys, so no recipe of TorchTitan has both. Of recipes that
extend each other, the one that all rest on decides. It was written for the newest version that has
all its keys.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchtitan.config import KeyPath, Setting, show
from torchtitan.legacy_recipes.table import OURS, TABLE, UNTIL_V0_1, UNTIL_V0_2_0
from torchtitan.legacy_recipes.translations import Kept, Moved, Translation

Settings = Mapping[KeyPath, Setting]

TOKENIZER = "model.tokenizer_path"
OUR_SECTIONS = ("communication", "convert", "data", "loss", "sharding", "spikes")

V0_1: dict[str, Any] = {
    "job.dump_folder": "./torchtitan/outputs",
    "job.description": "default job",
    TOKENIZER: "./torchtitan/datasets/tokenizer/tokenizer.model",
    "data.dataset": "c4_test",
    "comm.trace_buf_size": 20000,
}
V0_2_0 = V0_1 | {
    TOKENIZER: "./tests/assets/tokenizer",
    "parallelism.pipeline_parallel_embedding_weight": 1,
    "parallelism.pipeline_parallel_head_weight": 1,
    "checkpoint.last_save_model_only": True,
    "validation.dataset": "c4_validation",
    "validation.steps": -1,
    "validation.unit": "local",
    "validation.local_batch_size": 8,
    "validation.seq_len": 2048,
}
V0_2_2 = V0_2_0 | {"job.dump_folder": "./outputs", "data.num_workers": 0}
DEFAULTS = {"v0.1": V0_1, "v0.2.0": V0_2_0, "v0.2.2": V0_2_2}
"""Defaults that differ from ours, by version."""


def version_defaults(files: Sequence[Settings], flags: Settings, settings: Settings) -> Translation:
    """Collect the defaults below all settings, and translate keys that only work together.

    Args:
        files: as written: what all rest on, what extends that, and so on.
        flags: as written.
        settings: all of them, translated.
    """
    result = Translation({}, [], [], {})
    signs = [[path for path in file if _is_foreign(path)] for file in files]
    first = next((file[path] for file in files for path in file if _is_foreign(path)), None)
    root = files[0] if files else {}
    recipe = next(iter(root.values())).origin.rpartition(":")[0] if root else "the recipe"
    ours = next((path for path in root if path[0] in OUR_SECTIONS), None)
    if files and signs[0] and ours is None:
        _theirs(*_version(signs[0]), settings, recipe, result)
    elif first:
        why = f"it has [{ours[0]}]" if ours else f"{recipe} has none"
        result.notices.append(
            f"{first.origin}: a key of TorchTitan, in a recipe of this project ({why}); keys that "
            "are absent have this project's defaults"
        )
    _load_beside_tokenizer([*files, flags], {**result.settings, **settings}, result)
    return result


def _is_foreign(path: KeyPath) -> bool:
    """Whether only TorchTitan has a key."""
    name = ".".join(path)
    row = TABLE.get(name)
    is_here = name in OURS or isinstance(row, Kept) or (isinstance(row, Moved) and row.to == name)
    return row is not None and not is_here


def _version(keys: Sequence[KeyPath]) -> tuple[str, str]:
    """The version that a recipe with these keys was written for, and the key that shows it."""
    names = [".".join(key) for key in keys]
    for version, until in ("v0.1", UNTIL_V0_1), ("v0.2.0", UNTIL_V0_2_0):
        if known := [name for name in names if name in until]:
            return version, known[0]
    return "v0.2.2", names[0]


def _theirs(version: str, sign: str, settings: Settings, recipe: str, result: Translation) -> None:
    """Add the defaults of a recipe of TorchTitan, with notices of them and of their limits."""
    # No version saves unless it is told to.
    wanted = {"checkpoint.enable": False, **DEFAULTS[version], **dict(_sizes(version, settings))}
    here = {key: v for key, v in wanted.items() if tuple(key.split(".")) not in settings}
    dataset = here.get("data.dataset", _value(settings, "data.dataset"))
    if dataset == "c4_test" and ("data", "dataset_path") not in settings:
        here["data.dataset_path"] = "tests/assets/c4_test"
    origin = f"{recipe} (a default of TorchTitan {version})"
    for key, value in here.items():
        result.settings[tuple(key.split("."))] = Setting(value, origin)
    words = ", ".join(f"{key} = {show(value)}" for key, value in here.items())
    result.notices.append(
        f"{recipe}: a recipe of TorchTitan {version}, as it has {sign}; absent keys have the "
        f"defaults of that version: {words or 'the same as here'}"
    )
    if ("debug", "seed") not in settings:
        result.notices.append(
            f"{recipe}: debug.seed: TorchTitan would draw one at random; here it is 0"
        )
    name, flavor = _value(settings, "model.name"), _value(settings, "model.flavor", "debugmodel")
    if name not in (None, "llama3") and flavor == "debugmodel":
        result.notices.append(
            f"{recipe}: model.flavor: the debugmodel of {name} may have other sizes in TorchTitan; "
            "set them in [model] to train the same network"
        )
    initial = settings.get(("checkpoint", "initial_load_path"))
    if initial and initial.value and not _value(settings, "checkpoint.enable"):
        result.problems.append(
            f"{initial.origin}: checkpoint.initial_load_path: got {show(initial.value)}; without "
            "checkpoint.enable = true TorchTitan ignores it, but this project loads it; set "
            "enable = true, or remove initial_load_path"
        )


def _sizes(version: str, settings: Settings) -> Iterator[tuple[str, Any]]:
    """The sizes of Llama 3 that differ in what a flavor does not say."""
    if _value(settings, "model.name", "llama3") != "llama3":
        return
    if _value(settings, "model.flavor", "debugmodel") == "debugmodel":
        yield "model.n_kv_heads", _value(settings, "model.n_heads", 16)
        yield "model.rope_scaling", 8.0
    if version == "v0.1":  # it scales no rotary frequencies
        yield "model.rope_scaling", 1.0


def _load_beside_tokenizer(
    sources: Sequence[Settings], settings: Settings, result: Translation
) -> None:
    """Translate `initial_load_in_hf` without a path: the weights in the tokenizer's folder."""
    asked = [s[key] for s in sources if (key := ("checkpoint", "initial_load_in_hf")) in s]
    if not asked:
        return
    value, origin = asked[-1]
    where, tokenizer = f"{origin}: checkpoint.initial_load_in_hf", _value(settings, TOKENIZER)
    if not isinstance(value, bool):
        result.problems.append(f"{where}: got {show(value)}; wanted true or false")
    elif not value or _value(settings, "checkpoint.initial_load_path"):
        because = "the format of weights is detected from their files"
        result.notices.append(f"{where}: {show(value)} is dropped; {because}")
    elif not _value(settings, "checkpoint.enable", True):
        because = "nothing is loaded without checkpoint.enable = true"
        result.notices.append(f"{where}: true is dropped; {because}")
    elif not isinstance(tokenizer, str):
        result.problems.append(
            f"{where}: got true; it loads the weights from the folder of the tokenizer, but "
            f"{TOKENIZER} is not set; set it, or checkpoint.initial_load_path"
        )
    else:
        is_file = tokenizer.endswith((".json", ".model"))
        folder = tokenizer.rpartition("/")[0] or "." if is_file else tokenizer
        result.settings[("checkpoint", "initial_load_path")] = Setting(folder, origin)
        result.notices.append(f"{where}: is now checkpoint.initial_load_path = {show(folder)}")


def _value(settings: Settings, key: str, default: Any = None) -> Any:
    setting = settings.get(tuple(key.split(".")))
    return default if setting is None else setting.value
