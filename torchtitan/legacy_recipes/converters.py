"""Converters as TorchTitan v0.1 and v0.2 wrote them: their names in one list, their keys elsewhere.

`model.converters` names them in order, and the keys of each stand in a section of that name, which
acts only where it is named. Here both are a `[[convert]]` section.
"""

from collections.abc import Mapping
from typing import Any

from torchtitan.config import ConfigError, KeyPath, Setting, Translation, allowed_names, show
from torchtitan.legacy_recipes.rows import Converted, Gone, always, falsy, just

Settings = dict[KeyPath, Setting]

NAMES: KeyPath = ("model", "converters")
SWITCH: KeyPath = ("float8", "enable_float8_linear")
ONLY_EXPERTS = "there are no models with experts"
EXPERTS = ("quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
HERE = {
    "float8": "float8",
    "quantize.linear.float8": "float8",
    "mx": "mxfp8",
    "quantize.linear.mx": "mxfp8",
}
"""Names of old converters, and of their sections, to names here."""


def _names(value: Any) -> list[str]:
    """A list, or what a flag says with commas."""
    parts = value if isinstance(value, list) else str(value).split(",") if value else []
    return [str(part).strip() for part in parts]


def _filtered(value: Any) -> list[str]:
    if "auto_filter_small_kn" in (names := _names(value)):
        raise ConfigError("linears are not left out by their size; name them, all of them")
    return names


SAME = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp", "emulate")
OF_EXPERTS = {key: Gone(ONLY_EXPERTS, falsy) for key in ("moe_fqns", "moe_fqns_prototype")}
FLOAT8: dict[str, Converted | Gone] = {
    **{key: Converted(key) for key in SAME},
    "recipe_name": Converted("recipe", lambda value: value or "tensorwise"),
    "filter_fqns": Converted("filter_fqns", _filtered),
    "enable_float8_linear": Gone("a [[convert]] section is what switches it on", always),
    "force_recompute_fp8_weight_in_bwd": Gone(
        'activation_checkpoint.mode = "full" recomputes them, with their block', falsy
    ),
    **{
        f"scaling_type_{of}": Gone("scales are always those of the values", just("dynamic"))
        for of in ("input", "weight", "grad_output")
    },
    **OF_EXPERTS,
}
MX: dict[str, Converted | Gone] = {
    "filter_fqns": Converted("filter_fqns", _filtered),
    "recipe_name": Gone(
        "MXFP8 with scales that are rounded up is the only recipe; emulate = true emulates it",
        just("", "mxfp8", "mxfp8_cublas", "mxfp8_cublas_rceil"),
    ),
    "mxfp8_dim1_cast_kernel_choice": Gone("torchao chooses the kernel", always),
    "use_fp8_dim1_cast_triton_kernel": Gone("torchao chooses the kernel", always),
    **OF_EXPERTS,
}
TABLE: Mapping[str, Converted | Gone] = {
    "model.converters": Converted("name"),
    **{
        f"{section}.{key}": row
        for section, name in HERE.items()
        for key, row in {"float8": FLOAT8, "mxfp8": MX}[name].items()
    },
}


def sections(
    settings: Settings, below: Settings, result: Translation
) -> tuple[dict[str, int], Settings]:
    """The converters that are asked for, with their numbers; and the keys to be translated.

    Their `[[convert]]` sections are added to `result`.

    Args:
        below: what `settings` go over, as old: flags may name a converter whose keys stand in the
            recipe, or change a key of one that the recipe names.
    """
    asked = _asked(settings)
    names = asked or (_asked(below) if asked is None else None) or {}
    keys = {path: setting for path, setting in settings.items() if path != NAMES}
    if asked is not None:
        _add_sections(settings, asked, result, replaces=bool(below))
        keys = {path: s for path, s in below.items() if ".".join(path[:-1]) in names} | keys
    return names, keys


def keep_filters(names: Mapping[str, int], origin: str, result: Translation) -> None:
    """Float8 left out no linear where the recipe did not say so; here it leaves out the output."""
    for name, number in names.items():
        path = ("convert", str(number), "filter_fqns")
        if HERE[name] == "float8" and path not in result.settings:
            result.settings[path] = Setting([], origin)


def _asked(settings: Settings) -> dict[str, int] | None:
    """The old converters that a source asks for, with their numbers; None: it does not say."""
    if NAMES in settings:
        names = [name for name in _names(settings[NAMES].value) if name in HERE]
    elif SWITCH in settings and settings[SWITCH].value is True:
        names = [SWITCH[0]]
    else:
        return None
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def _add_sections(
    settings: Settings, names: dict[str, int], result: Translation, replaces: bool
) -> None:
    path = NAMES if NAMES in settings else SWITCH
    value, origin = settings[path]
    where = f"{origin}: {'.'.join(path)}"
    for name in _names(value) if path == NAMES else ():
        if name in EXPERTS:
            result.problems.append(f"{where}: got {show(name)}; {ONLY_EXPERTS}")
        elif name not in HERE:
            result.problems.append(f"{where}: got {show(name)}; {allowed_names(name, HERE)}")
    if ("convert",) in settings and names:
        both = f"[[convert]] of {settings[('convert',)].origin} says the same thing; keep that"
        result.problems.append(f"{where}: got {show(value)}; {both}")
        return
    if path == NAMES and not _names(value):
        result.notices.append(f"{where}: {show(value)} is left out; it asks for no converter")
    elif path == NAMES and names:
        result.notices.append(f"{where}: is now convert, a [[convert]] section for each")
        result.moved[NAMES] = ("convert", "0", "name")
    if names or replaces:
        result.settings[("convert",)] = Setting([{} for _ in names], origin)
    for name, number in names.items():
        result.settings[("convert", str(number))] = Setting({}, origin)
        result.settings[("convert", str(number), "name")] = Setting(HERE[name], origin)
