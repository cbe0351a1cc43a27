"""Translates converters of TorchTitan v0.1 and v0.2, which have their names and keys in two places.

`model.converters` lists the names in order, and each has its keys in a section of that name, which
is ignored if the converter is not listed. Here both are a `[[convert]]` section.
"""

from collections.abc import Mapping
from typing import Any

from torchtitan.config import ConfigError, KeyPath, Setting, allowed_names, show
from torchtitan.legacy_recipes.translations import Converted, Gone, Translation, always, falsy, just

Settings = dict[KeyPath, Setting]

NAMES: KeyPath = ("model", "converters")
SWITCH: KeyPath = ("float8", "enable_float8_linear")
ONLY_EXPERTS = 'set experts = true in a [[convert]] section with recipe = "rowwise" or of mxfp8'
EXPERTS = ("quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
HERE = {
    "float8": "float8",
    "quantize.linear.float8": "float8",
    "mx": "mxfp8",
    "quantize.linear.mx": "mxfp8",
}
"""Current names of converters by old names, and by their sections: v0.1's, then v0.2's, which may
be combined."""


def _names(value: Any) -> list[str]:
    """A list, or what a flag says with commas."""
    parts = value if isinstance(value, list) else str(value).split(",") if value else []
    return [str(part).strip() for part in parts]


def _filtered(value: Any) -> list[str]:
    if "auto_filter_small_kn" in (names := _names(value)):
        raise ConfigError("linear layers are not filtered by size; list the names of all of them")
    return names


SAME = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp", "emulate")
OF_EXPERTS = {key: Gone(ONLY_EXPERTS, falsy) for key in ("moe_fqns", "moe_fqns_prototype")}
FLOAT8: dict[str, Converted | Gone] = {
    **{key: Converted(key) for key in SAME},
    "recipe_name": Converted("recipe", lambda value: value or "tensorwise"),
    "filter_fqns": Converted("filter_fqns", _filtered),
    "enable_float8_linear": Gone("a [[convert]] section enables it", always),
    "force_recompute_fp8_weight_in_bwd": Gone(
        'activation_checkpoint.mode = "full" recomputes them, with their block', falsy
    ),
    **{
        f"scaling_type_{of}": Gone("scales are always computed from the values", just("dynamic"))
        for of in ("input", "weight", "grad_output")
    },
    **OF_EXPERTS,
}
MX: dict[str, Converted | Gone] = {
    "filter_fqns": Converted("filter_fqns", _filtered),
    "recipe_name": Gone(
        "MXFP8 with scales rounded up is the only supported recipe; emulate = true emulates it",
        just("", "mxfp8", "mxfp8_cublas", "mxfp8_cublas_rceil"),
    ),
    "mxfp8_dim1_cast_kernel_choice": Gone("torchao chooses the kernel", always),
    "use_fp8_dim1_cast_triton_kernel": Gone("torchao chooses the kernel", always),
    **OF_EXPERTS,
}
OF: dict[str, dict[str, Converted | Gone]] = {"float8": FLOAT8, "mxfp8": MX}
NOT_IN_V0_2 = (
    *("enable_float8_linear", "force_recompute_fp8_weight_in_bwd"),
    *("scaling_type_input", "scaling_type_weight", "scaling_type_grad_output"),
    "use_fp8_dim1_cast_triton_kernel",
)
UNTIL_V0_1 = {
    f"{section}.{key}": row
    for section in ("float8", "mx")
    for key, row in OF[HERE[section]].items()
}
TABLE: Mapping[str, Converted | Gone] = {
    "model.converters": Converted("name"),
    **{
        f"quantize.linear.{section}.{key}": row
        for section in ("float8", "mx")
        for key, row in OF[HERE[section]].items()
        if key not in NOT_IN_V0_2
    },
    **{
        f"{section}.{key}": Gone(ONLY_EXPERTS, always)
        for section, keys in zip(EXPERTS, (("fqns",), ("fqns", "recipe_name")), strict=True)
        for key in keys
    },
}


def sections(
    settings: Settings, below: Settings, result: Translation
) -> tuple[dict[str, int], Settings]:
    """The requested converters, with their numbers; and the keys to be translated.

    Their `[[convert]]` sections are added to `result`.

    Args:
        below: the old settings that `settings` override: flags may name a converter whose keys are
            in the recipe, or change a key of one that the recipe names.
    """
    asked = _asked(settings)
    names = asked or (_asked(below) if asked is None else None) or {}
    keys = {path: setting for path, setting in settings.items() if path != NAMES}
    if asked is not None:
        _add_sections(settings, asked, result, replaces=bool(below))
        said = {_here(path) for path in keys}
        old = {p: s for p, s in below.items() if of(p) in names and _here(p) not in said}
        keys = old | keys
    return names, keys


def of(path: KeyPath) -> str | None:
    """The name, in this version, of the converter to which a key of an old section belongs."""
    return HERE.get(".".join(path[:-1]))


def _here(path: KeyPath) -> tuple[str | None, str]:
    return of(path), path[-1]


def keep_filters(names: Mapping[str, int], origin: str, result: Translation) -> None:
    """Float8 left out no linear where the recipe did not say so; here it leaves out the output."""
    for name, number in names.items():
        path = ("convert", str(number), "filter_fqns")
        if name == "float8" and path not in result.settings:
            result.settings[path] = Setting([], origin)


def _asked(settings: Settings) -> dict[str, int] | None:
    """The converters that a source asks for, with their numbers; None: it does not say."""
    if NAMES in settings:
        names = [HERE[name] for name in _names(settings[NAMES].value) if name in HERE]
    elif SWITCH in settings and settings[SWITCH].value is True:
        names = [HERE[SWITCH[0]]]
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
        both = f"[[convert]] of {settings[('convert',)].origin} sets the same thing; keep that"
        result.problems.append(f"{where}: got {show(value)}; {both}")
        return
    if path == NAMES and not _names(value):
        result.notices.append(f"{where}: {show(value)} is dropped; it names no converter")
    elif path == NAMES and names:
        result.notices.append(f"{where}: is now convert, a [[convert]] section for each")
        result.moved[NAMES] = ("convert", "0", "name")
    if names or replaces:
        result.settings[("convert",)] = Setting([{} for _ in names], origin)
    for name, number in names.items():
        result.settings[("convert", str(number))] = Setting({}, origin)
        result.settings[("convert", str(number), "name")] = Setting(name, origin)
