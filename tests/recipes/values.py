"""Values of every type of TOML, and recipes made of them, drawn by hypothesis."""

import json
import math
from datetime import UTC, date, datetime, time

from hypothesis import strategies as st

from torchtitan.config.schema import field_schema, json_types, kind_of, places
from torchtitan.job import JobConfig

EDGES = [0, 1, 2, 3, 7, 8, 64, 2**31, 2**32, 2**53, 2**62, 2**63 - 1]
EDGES = [*EDGES, *(-n for n in EDGES), 2**63, 10**12, 10**26, 10**400, -(2**63) - 1]
FLOATS = [0.0, -0.0, 5e-324, 1e-30, 0.5, 1.0, 1e30, 1.7e308, math.inf, -math.inf, math.nan]
TEXTS = ["", " ", "~", "~nobody/x", "/", "..", ".", "\0", "a\nb", "\\", '"', "'", "é", "\U0001d518"]
TEXTS += ["\u202e", "x" * 300, "x" * 5000, "a/" * 3000, "none", "true", "1", "-1", "nan", "[", "{}"]
TEXTS += ["%s", "{0}"]
DATES = [date(2026, 1, 1), time(1, 2, 3), datetime(2026, 1, 1, tzinfo=UTC)]


def any_value():
    """A value of any type of TOML."""
    fields = (info for place in places(JobConfig) for info in place.settings.model_fields.values())
    words = sorted({str(info.default) for info in fields})
    letters = st.characters(exclude_categories=["Cs"])
    numbers = (st.integers(), st.integers(-4, 100), st.sampled_from(FLOATS), st.floats())
    texts = (st.sampled_from(TEXTS), st.sampled_from(words), st.text(letters, max_size=20))
    edges, dates = st.sampled_from(EDGES), st.sampled_from(DATES)
    leaf = st.one_of(st.booleans(), edges, *numbers, *texts, dates)
    keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=3)
        ),
        max_leaves=6,
    )


def fitting(types):
    """A value of one of these types of JSON, so that what is said of a number or a path is met."""
    by_type = {
        "integer": st.sampled_from(EDGES) | st.integers(-2, 100),
        "number": st.sampled_from(FLOATS) | st.floats(),
        "boolean": st.booleans(),
        "string": st.sampled_from(TEXTS),
        "array": st.lists(st.sampled_from([*TEXTS, *EDGES]), max_size=3),
    }
    return st.one_of([by_type[kind] for kind in sorted(types) if kind in by_type])


def _keys():
    """Every key of every section and choice, with the names that choose it, and its types."""
    found = []
    for place in places(JobConfig):
        chosen = {f"{place.path}.name": place.choice} if place.choice else {}
        if place.owner:
            chosen[f"{place.path.rpartition('.')[0]}.name"] = place.owner
        if place.choice == "vit_mae":
            chosen["data.dataset"] = "scenes"  # the default is text
        for key, info in place.settings.model_fields.items():
            types = json_types(field_schema(info)) if kind_of(info) is info else {"array"}
            types |= {"array"} if "tuple" in str(info.annotation) else set()
            found.append((f"{place.path}.{key}", chosen, types))
        found.append((place.path, {}, {"string"}))
    return found


KEYS = _keys()


def toml(value):
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml(k)} = {toml(v)}' for k, v in value.items())}}}"
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value)


def recipe(settings):
    """A recipe with these values by dotted key; `convert.0` is the first of a list."""
    lines = []
    tables = {}
    for key, value in settings.items():
        section, _, last = key.rpartition(".")
        if not section:
            lines.append(f"{last} = {toml(value)}")
        elif last == "0":
            lines.append(f"{section} = {toml([value])}")
        else:
            tables.setdefault(section, []).append(f"{last} = {toml(value)}")
    for section, content in tables.items():
        header = f"[[{section[:-2]}]]" if section.endswith(".0") else f"[{section}]"
        lines += [header, *content]
    return "\n".join(lines) + "\n"
