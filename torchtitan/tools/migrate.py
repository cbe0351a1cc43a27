"""Convert a recipe of TorchTitan v0.1 or v0.2 to the keys of this version."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tomli
import tomlkit
import typer
from tomlkit.items import AoT, Comment, InlineTable, Table, Whitespace

from torchtitan.checks import load_job
from torchtitan.config import (
    CannotRun,
    KeyPath,
    RecipeError,
    Setting,
    Sources,
    allowed_names,
    located,
    print_message,
    read_file,
    read_recipe,
    read_text,
    show,
)
from torchtitan.config.other_names import Moved, Translation, move, old_key, translate_key
from torchtitan.tools.options import Output, Verb, verb, write_output
from torchtitan.torchtitan_keys import (
    DEFAULTS,
    OF_CONVERTER,
    TABLE,
    foreign_keys,
    names_in,
    refuse_foreign,
    section_of_ours,
    version_of,
)

Settings = dict[KeyPath, Setting]

TOKENIZER = "model.tokenizer_path"
LOAD_IN_HF: KeyPath = ("checkpoint", "initial_load_in_hf")
NAMES: KeyPath = ("model", "converters")
SWITCH: KeyPath = ("float8", "enable_float8_linear")
EXPERTS = ("quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
ONLY_EXPERTS = "experts keep their dtype; leave it out"
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
    """Translate the settings of a recipe, whatever version it was written for.

    Converters of TorchTitan have their names and keys in two places: `model.converters` lists the
    names in order, and each has its keys in a section of that name, which is ignored if the
    converter is not listed. Here both are a `[[convert]]` section.
    """
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
    where, row = located(origin, dotted), old_key(path) or TABLE.get(dotted)
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
        result.notices.append(f"{recipe}: debug.seed: TorchTitan draws one at random; here it is 0")
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


Body = list[tuple[Any, Any]]


def rewrite(text: str, migration: Migration) -> str:
    """Return the text of a recipe in this version's form; only what was translated changes.

    A renamed key keeps its place, and a key that moves to another section takes its comments along.
    The edits are on what tomlkit calls the body of a table: the list of its lines, where keys have
    a place among comments.
    """
    if not migration.notices:
        return text
    written, settings, defaults, moved, _ = migration
    document = tomlkit.parse(text.rstrip("\n") + "\n")
    _expand(document.body)
    for old, setting in written.items():
        target = moved.get(old, old)
        new = settings.get(target)
        if new is None and setting.value != {}:
            _cut(document.body, old)
        elif new and (target, new.value) != (old, setting.value):
            _rewrite(document.body, old, target, new.value)
    for target in settings.keys() - written.keys() - set(moved.values()):
        if len(target) > 2:  # in a list of sections; the list and its sections are made with it
            value = tomlkit.item(settings[target].value)
            _add(document.body, target, [(tomlkit.key(target[-1]), value)])
    _drop_empty(document.body)
    for target, setting in defaults.items():
        _add(document.body, target, [(tomlkit.key(target[-1]), tomlkit.item(setting.value))])
    return _remove_gaps(tomlkit.dumps(document))


def _expand(body: Body) -> None:
    """Write sections that are inline tables, `a = { b = 1 }`, as ordinary ones, after all keys."""
    for line in list(body):
        key, item = line
        if isinstance(item, InlineTable):
            body.remove(line)
            item = tomlkit.item(item.unwrap())
            body.append((tomlkit.key(key.key), item))
        if isinstance(item, Table):
            _expand(item.value.body)


def _rewrite(document: Body, old: KeyPath, target: KeyPath, value: Any) -> None:
    """Write a key and its value under another name, or in another section."""
    body, index = _find(document, old)
    item = body[index][1]
    if item.unwrap() != value:
        old_trivia, item = item.trivia, tomlkit.item(value)
        item.trivia.comment_ws, item.trivia.comment = old_trivia.comment_ws, old_trivia.comment
    if old[:-1] == target[:-1]:
        body[index] = (tomlkit.key(target[-1]), item)
        return
    comments = _cut(document, old, with_comments=True)[:-1]
    _add(document, target, [*comments, (tomlkit.key(target[-1]), item)])


def _add(document: Body, target: KeyPath, lines: Body) -> None:
    """Write lines, of which the last is a key, into its section: the name of a section first."""
    home = _section(document, target[:-1])
    at = 0 if target[-1] == "name" else _end_of_keys(home)
    home[at:at] = lines


def _cut(document: Body, path: KeyPath, *, with_comments: bool = False) -> Body:
    """Take out a key, or also the comments right above it; returns the lines taken."""
    body, index = _find(document, path)
    start = index
    while with_comments and start and isinstance(body[start - 1][1], Comment):
        start -= 1
    lines = body[start : index + 1]
    del body[start : index + 1]
    return lines


def _tables(
    body: Body, path: KeyPath = (), *, has_keys: bool = True
) -> Iterator[tuple[KeyPath, Body, bool]]:
    """(path, body, whether it may have keys) of the document and all tables in it.

    A table that is only part of the header of another, as `a` is of `[a.b]`, may not have keys.
    """
    yield path, body, has_keys
    for key, item in body:
        if isinstance(item, Table):
            has_keys = key.is_dotted() or not item.is_super_table()
            yield from _tables(item.value.body, (*path, key.key), has_keys=has_keys)
        elif isinstance(item, AoT):
            for number, table in enumerate(item.body):
                yield from _tables(table.value.body, (*path, key.key, str(number)))


def _find(document: Body, path: KeyPath) -> tuple[Body, int]:
    """The body of a key, and its index there."""
    return next(
        (body, index)
        for above, body, _ in _tables(document)
        for index, (key, _) in enumerate(body)
        if key is not None and (*above, key.key) == path
    )


def _section(document: Body, section: KeyPath) -> Body:
    """The body of a section, made at the end of the document where there is none."""
    for path, body, has_keys in _tables(document):
        if path == section and has_keys:
            return body
    made: Body
    *above, last = section
    if not last.isdecimal():
        home, table = _section(document, tuple(above)), tomlkit.table()
        home += [(None, Whitespace("\n")), (tomlkit.key(last), table)]
        made = table.value.body
        return made
    home = _section(document, tuple(above[:-1]))
    sections = next((item for key, item in home if key and key.key == above[-1]), None)
    if sections is None:
        sections = tomlkit.aot()
        home.append((tomlkit.key(above[-1]), sections))
    while len(sections.body) <= int(last):
        sections.append(tomlkit.table())
        sections.body[-1].trivia.indent = "\n"
    made = sections.body[int(last)].value.body
    return made


def _end_of_keys(body: Body) -> int:
    """The position for another key: after the last one, before blank lines and nested tables."""
    keys = [i for i, (key, item) in enumerate(body) if key and not isinstance(item, Table | AoT)]
    return keys[-1] + 1 if keys else 0


def _remove_gaps(text: str) -> str:
    """The text with one blank line where there are several, unless they are part of a value."""
    tidy = re.sub(r"\n{3,}", "\n\n", text.strip("\n")) + "\n"
    return tidy if tomli.loads(tidy) == tomli.loads(text) else text


def _drop_empty(body: Body) -> None:
    """Take out tables without keys; comments in them stay."""
    for index in reversed(range(len(body))):
        item = body[index][1]
        if isinstance(item, Table):
            _drop_empty(item.value.body)
            if not any(key for key, _ in item.value.body):
                body[index : index + 1] = item.value.body


app = verb()


@app.command(cls=Verb, help=__doc__)
def migrate(
    recipe: Annotated[Path, typer.Argument(help="Recipe of TorchTitan v0.1 or v0.2.")],
    output: Output = None,
) -> None:
    migration = read_old(recipe)
    text = rewrite(read_text(recipe), migration)
    for notice in [*migration.notices, *missing(recipe, migration)]:
        print_message("note", notice)
    write_output(text, output)


def missing(recipe: Path, migration: Migration) -> list[str]:
    """The reasons why a translated recipe cannot be trained here.

    Raises:
        RecipeError: if a setting is impossible, such as a model that does not exist here.
    """
    sources = migrated(recipe, migration)
    *extended, _, _ = sources.settings
    try:
        refuse_foreign(extended)
    except RecipeError as error:
        return [f"it cannot be trained yet: {line}" for line in error.lines]
    try:
        load_job(sources, [], None, "cuda")
    except RecipeError as error:
        # What a module adds is unknown if it cannot be imported.
        is_known = not any(": job.imports: " in line for line in error.lines)
        if is_known and not isinstance(error, CannotRun):
            raise RecipeError(error.lines, [*migration.notices, *error.notices]) from error
        return [f"it cannot be trained yet: {line}" for line in error.lines]
    return []


def migrated(recipe: Path, migration: Migration) -> Sources:
    """The settings of a migrated recipe, at their places in the old one."""
    problems: list[str] = []
    extended = read_recipe(recipe, problems)[:-1]
    own = {path: setting for path, setting in migration.settings.items() if path != ("extends",)}
    return Sources([*extended, migration.defaults, own], str(recipe), [], problems)
