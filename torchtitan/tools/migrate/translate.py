"""Translates the settings of a recipe of TorchTitan, key by key, by the rows of the table.

Converters of TorchTitan have their names and keys in two places: `model.converters` lists the names
in order, and each has its keys in a section of that name, which is ignored if the converter is not
listed. Here both are a `[[convert]]` section.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.config import (
    KeyPath,
    RecipeError,
    Setting,
    allowed_names,
    located,
    read_file,
    show,
)
from torchtitan.config.other_names import OLD_KEYS, Moved, Translation, move, translate_key
from torchtitan.torchtitan_keys import (
    DEFAULTS,
    OF_CONVERTER,
    TABLE,
    foreign_keys,
    names_in,
    section_of_ours,
    version_of,
)

Settings = dict[KeyPath, Setting]

TOKENIZER = "model.tokenizer_path"
LOAD_IN_HF: KeyPath = ("checkpoint", "initial_load_in_hf")
NAMES: KeyPath = ("model", "converters")
SWITCH: KeyPath = ("float8", "enable_float8_linear")
EXPERTS = ("quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
ONLY_EXPERTS = 'set experts = true in a [[convert]] section with recipe = "rowwise" or of mxfp8'
CONVERTERS = {
    "float8": "float8",
    "quantize.linear.float8": "float8",
    "mx": "mxfp8",
    "quantize.linear.mx": "mxfp8",
}
"""Names of converters here by those of TorchTitan, which are those of their sections, too."""
OLD_SECTIONS = tuple(
    f"{name}."
    for name in (
        *("experimental", "float8", "memory_estimation", "mx", "quantize"),
        *("training.dataloader", "validation.dataloader"),
    )
)


class Migration(NamedTuple):
    """A recipe of TorchTitan, as it was written and as it is here."""

    written: Settings
    settings: Settings
    defaults: Settings
    """Values of TorchTitan's that the recipe does not say."""
    moved: Mapping[KeyPath, KeyPath]
    """New paths of the settings that were moved."""
    notices: list[str]


def read_old(path: Path) -> Migration:
    """Read a recipe and translate it, with a notice for each change.

    Raises:
        RecipeError: where a key has no counterpart; with all of them, one line each.
    """
    problems: list[str] = []
    written = read_file(path, problems)
    found = translate(written)
    rest = version_defaults(written, found.settings)
    notices = [*found.notices, *rest.notices]
    if problems := [*problems, *found.problems, *rest.problems]:
        raise RecipeError(problems, notices)
    return Migration(written, found.settings, rest.settings, found.moved, notices)


def translate(settings: Settings) -> Translation:
    """Translate the settings of a recipe, whatever version it was written for."""
    result = Translation({}, [], [], {})
    requested = _requested(settings)
    _add_converters(settings, requested, result)
    for path, setting in settings.items():
        if path not in (NAMES, LOAD_IN_HF):
            _translate_key(path, setting, settings, requested, result)
    if NAMES in settings and "float8" in requested:
        # Float8 left out no linear where the recipe did not say so; here it leaves out the output.
        filters = ("convert", str(requested["float8"]), "filter_fqns")
        result.settings.setdefault(filters, Setting([], settings[NAMES].origin))
    return result


def _translate_key(
    path: KeyPath,
    setting: Setting,
    settings: Settings,
    requested: Mapping[str, int],
    result: Translation,
) -> None:
    dotted, (value, origin) = ".".join(path), setting
    where, row = located(origin, dotted), OLD_KEYS.get(dotted, TABLE.get(dotted))
    converter = CONVERTERS.get(".".join(path[:-1]))
    if row is None and f"{dotted}.".startswith(OLD_SECTIONS):
        if unknown := _unknown(path, is_section=value == {}):
            result.problems.append(f"{where}: {unknown}")
    elif row and converter and converter not in requested:
        because = f"it only has an effect if model.converters names {'.'.join(path[:-1])}"
        result.notices.append(f"{where}: {show(value)} is dropped; {because}")
    elif isinstance(row, Moved) and converter:
        target = ("convert", str(requested[converter]), row.to.removeprefix(OF_CONVERTER))
        move(target, row.convert, path, setting, settings, result)
    else:
        translate_key(row, path, setting, settings, result)


def _unknown(path: KeyPath, *, is_section: bool) -> str | None:
    """Describe the mistake in the name of a key or section among TorchTitan's own sections.

    Returns None if there is none, or if it is that of the enclosing section.
    """
    for depth in range(1, len(path) + 1):
        above = "".join(f"{key}." for key in path[: depth - 1])
        below = [name.removeprefix(above) for name in TABLE if name.startswith(above)]
        known = dict.fromkeys(name.split(".")[0] for name in below)
        if path[depth - 1] not in known:
            what = "section" if is_section else "key"
            at_end = depth == len(path)
            return f"unknown {what}; {allowed_names(path[-1], known)}" if at_end else None
    return None if is_section else "wanted a section"


def _requested(settings: Settings) -> dict[str, int]:
    """The converters that a recipe asks for, by their names here, with their numbers."""
    names: list[str] = []
    if NAMES in settings:
        names = [CONVERTERS[n] for n in names_in(settings[NAMES].value) if n in CONVERTERS]
    elif SWITCH in settings and settings[SWITCH].value is True:
        names = [CONVERTERS[SWITCH[0]]]
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def _add_converters(settings: Settings, requested: Mapping[str, int], result: Translation) -> None:
    """Add the `[[convert]]` sections of the requested converters."""
    path = NAMES if NAMES in settings else SWITCH
    if path not in settings:
        return
    value, origin = settings[path]
    where, names = f"{origin}: {'.'.join(path)}", names_in(value) if path == NAMES else []
    for name in names:
        if name in EXPERTS:
            result.problems.append(f"{where}: got {show(name)}; {ONLY_EXPERTS}")
        elif name not in CONVERTERS:
            result.problems.append(f"{where}: got {show(name)}; {allowed_names(name, CONVERTERS)}")
    if requested and ("convert",) in settings:
        both = f"[[convert]] of {settings[('convert',)].origin} sets the same thing; keep that"
        result.problems.append(f"{where}: got {show(value)}; {both}")
        return
    if path == NAMES and not names:
        result.notices.append(f"{where}: {show(value)} is dropped; it names no converter")
    elif path == NAMES and requested:
        result.notices.append(f"{where}: is now convert, a [[convert]] section for each")
        result.moved[NAMES] = ("convert", "0", "name")
    if requested:
        result.settings[("convert",)] = Setting([{} for _ in requested], origin)
    for name, number in requested.items():
        result.settings[("convert", str(number))] = Setting({}, origin)
        result.settings[("convert", str(number), "name")] = Setting(name, origin)


def version_defaults(written: Settings, settings: Settings) -> Translation:
    """Collect the defaults below a recipe, and translate keys that only work together.

    A recipe that extends another has the defaults of that one.

    Args:
        written: the recipe.
        settings: the same, translated.
    """
    result = Translation({}, [], [], {})
    foreign, ours = foreign_keys(written), section_of_ours(written)
    if foreign and ("extends",) not in written:
        if ours is None:
            _add_defaults(*version_of(foreign), settings, written[foreign[0]].origin, result)
        else:
            result.notices.append(
                f"{written[foreign[0]].origin}: a key of TorchTitan, in a recipe of this project "
                f"(it has [{ours}]); keys that are absent have this project's defaults"
            )
    _load_beside_tokenizer(written, {**result.settings, **settings}, result)
    return result


def _add_defaults(
    version: str, sign: str, settings: Settings, origin: str, result: Translation
) -> None:
    """Add the defaults of a recipe of TorchTitan, with notices of them and of their limits."""
    recipe = origin.rpartition(":")[0]
    # No version saves unless it is told to.
    wanted = {"checkpoint.enable": False, **DEFAULTS[version], **dict(_sizes(version, settings))}
    here = {key: v for key, v in wanted.items() if tuple(key.split(".")) not in settings}
    dataset = here.get("data.dataset", _value(settings, "data.dataset"))
    if dataset == "c4_test" and ("data", "dataset_path") not in settings:
        here["data.dataset_path"] = "tests/assets/c4_test"
    for key, value in here.items():
        origin = f"{recipe} (a default of TorchTitan {version})"
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


def _load_beside_tokenizer(written: Settings, settings: Settings, result: Translation) -> None:
    """Translate `initial_load_in_hf` without a path: the weights in the tokenizer's folder."""
    if (setting := written.get(LOAD_IN_HF)) is None:
        return
    value, origin = setting
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
