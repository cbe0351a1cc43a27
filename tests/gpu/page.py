"""The page of all that is known of a device, from what the cases of each stage gave.

A column is a format of the figures of a case; where one of these is not there, the cell is a dash.
"""

import json

from tests.tables import data

STAGES = ("right", "runs", "ranks", "fast", "many", "systems", "real", "peer")
PAGE = """\
# On a GPU

<!-- Written by scripts/gpu. -->

{about}

`{command}`

| stage | passed | failed | left out |
|---|---:|---:|---:|
{summary}

{parts}
"""
COLUMNS = data(__file__)


def write(folder):
    """Write OUTPUT/page.md from what lies in `folder`, and return it."""
    environment = json.loads((folder / "environment.json").read_text())
    stages = {name: read(folder / f"{name}.jsonl") for name in STAGES}
    summary = "\n".join(f"| {name} | {' | '.join(counts(rows))} |" for name, rows in stages.items())
    parts = [failures(stages)]
    for name, part in PARTS.items():
        parts += part({case: row["figures"] for case, row in stages[name].items()})
    shown = ("device", "driver", "torch", "torchao", "python", "cores", "date")
    text = PAGE.format(
        about=", ".join(
            f"{name} {environment[name]}" for name in shown if environment.get(name) is not None
        ),
        command=environment["command"],
        summary=summary,
        parts="\n\n".join(filter(None, parts)),
    )
    (folder / "page.md").write_text(text)
    return text


def read(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["case"]: row for row in map(json.loads, lines)}


def counts(rows):
    failed = sum(row["error"] is not None for row in rows.values())
    left_out = sum("left out" in row["figures"] for row in rows.values())
    return [str(len(rows) - failed - left_out), str(failed), str(left_out)]


def table(rows, columns):
    """A table with a line for each row, by name."""
    lines = [["", *columns], ["---", *["---:"] * len(columns)]]
    lines += [[name, *(cell(form, row) for form in columns.values())] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def cell(form, figures):
    try:
        return form.format_map(figures | derived(figures))
    except KeyError:
        return "-"


def derived(figures):
    """Figures that follow from others: errors of a plan, memory or its lack, ends of a curve."""
    found = {
        f"{key} off": figures[f"planned {key}"] / figures[key] - 1
        for key in ("GiB", "tokens/s")
        if {key, f"planned {key}"} <= figures.keys()
    }
    if "GiB" in figures or "out of memory" in figures:
        found["held"] = f"{figures['GiB']:,.1f}" if "GiB" in figures else "out of memory"
    if losses := figures.get("losses"):
        found |= {"first loss": losses[0], "last loss": losses[-1]}
    return found


def failures(stages):
    """What failed, with its first line and its last, and what was left out and why."""
    found = []
    for stage, rows in stages.items():
        for case, row in rows.items():
            if row["error"]:
                # Of a traceback of a rank, what lies between is where; the log has it.
                lines = row["error"].strip().splitlines()
                said = " ".join(dict.fromkeys((lines[0], lines[-1])))
                found.append(f"- {stage}, {case}: {said:.300}")
            elif "left out" in row["figures"]:
                found.append(f"- {stage}, {case}: left out: {row['figures']['left out']}")
    return "\n".join(["## Failed, or left out\n", *found]) if found else ""


def fast(rows):
    """Rates of the device, and a table of each model."""
    parts = [*rates(rows), *attention(rows), *experts(rows), *models(rows)]
    return ["## Speed", *parts] if parts else []


def rates(rows):
    if product := rows.get("matrix product", {}).get("TFLOP/s"):
        yield f"A product of 8192 x 8192 bf16 matrices: {product:.0f} TFLOP/s."
    if found := rows.get("calibration"):
        measured = "; ".join(f"{name} {value:,.4g}" for name, value in found.items())
        yield f"`torchtitan plan --calibrate`: {measured}."
    for case, row in rows.items():
        if case.startswith("Hadamard transform") and row:
            times = "; ".join(f"{name} {number:.3g}" for name, number in row.items())
            yield f"{case} in bf16: {times}."
    if codecs := {case: row for case, row in rows.items() if case.startswith("codec of") and row}:
        names = next(iter(codecs.values()))
        yield "### Codec, GB/s of float32 numbers"
        yield table(codecs, {name.removesuffix(", GB/s"): f"{{{name}:,.4g}}" for name in names})


def attention(rows):
    """A table of each length, with a row for each mask."""
    for case, masks in rows.items():
        if "causal" in masks:
            yield f"### {case.capitalize()}"
            yield "Forward and backward of 32 query heads and 8 key/value heads of 128, in bf16."
            yield table(masks, COLUMNS["attention"])


def experts(rows):
    """A table of each layer, with a row for each way to compute it, and for its parts."""
    for case, row in rows.items():
        if not (ways := row.get("ways")):
            continue
        waits = row.get("waits", {})
        for name, found in ways.items():
            found["waits"] = waits.get(name, "-")
            if mfu := row.get(f"MFU, {name}"):
                found["MFU"] = mfu
        yield f"### {case[0].upper()}{case[1:]}"
        yield "Forward and backward of a layer in bf16; MFU is by the FLOPs of the chosen experts."
        yield table(ways, COLUMNS["experts"])


def models(rows):
    """A table of each model, and what the device did in its fastest and its slowest row."""
    product = rows.get("matrix product", {}).get("TFLOP/s")
    by_model = {}
    for case, row in rows.items():
        if ": " in case and "tokens/s" in row:
            model, name = case.split(": ")
            by_model.setdefault(model, {})[name] = row
    for model, found in by_model.items():
        first = found.get("compiled", {}).get("tokens/s")
        for row in found.values():
            if first:
                row["to compiled"] = row["tokens/s"] / first
            if product:
                row["of the product"] = row["TFLOP/s"] / product
        yield f"### {model}"
        yield table(found, COLUMNS["speed"])
        yield from traces(found)


def traces(found):
    """What takes longest on the device in the fastest row and in the slowest."""
    traced = [name for name in found if found[name].get("longest")]
    traced.sort(key=lambda name: found[name]["tokens/s"])
    for name in dict.fromkeys((*traced[-1:], *traced[:1])):
        yield f"{name}, by time on the device: {'; '.join(found[name]['longest'])}."
        yield f"Longest idle gaps: {'; '.join(found[name]['gaps'])}."


def many(rows):
    timed = {case: row for case, row in rows.items() if "forward and backward s" in row}
    if timed:
        yield "## One rank of many"
        yield table(timed, COLUMNS["many"])
    for case, row in timed.items():
        yield from collectives(case, row)
    yield from launched_twice(rows)


def collectives(case, row):
    """The number of collectives in graphs, and their order among the products."""
    if tallies := row.get("collectives"):
        yield f"{case}: " + "; ".join(
            f"{kind} {found['before']} -> {found['after']} ({found['bytes'] / 1e6:,.0f} MB)"
            for kind, found in tallies.items()
        )
        for graph in row["products before collectives"]:
            orders = "; ".join(f"{kind} {places}" for kind, places in graph.items())
            yield f"Products before each, in a graph: {orders}."


def systems(rows):
    """A table of each kind of case."""
    for title, kind in COLUMNS["systems"].items():
        names = {case: case.removeprefix(kind["cases"]) for case in rows}
        if found := {name: rows[case] for case, name in names.items() if name != case}:
            yield f"## {title}\n\n{table(found, kind['columns'])}"
    for case, row in rows.items():
        if methods := row.get("methods"):
            yield f"## {case.capitalize()}\n\n{table(methods, COLUMNS['bases'])}"


def titled(title, columns, figure):
    """The part with one table: of the cases that have a figure."""

    def part(rows):
        if found := {case: row for case, row in rows.items() if figure in row}:
            yield f"## {title}\n\n{table(found, COLUMNS[columns])}"

    return part


launched_twice = titled("A recipe by compiler cache", "launches", "cold GiB")
PARTS = {
    "right": titled("How far five steps are from the CPU's", "right", "moved"),
    "fast": fast,
    "many": many,
    "systems": systems,
    "real": titled("The real run", "real", "end"),
    "peer": titled("Beside TorchTitan 0.2.2", "peer", "ratio"),
}
