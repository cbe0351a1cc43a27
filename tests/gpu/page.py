"""The page of all that is known of a device, from what the cases of each stage gave.

A column is a format of the figures of a case; where one of these is not there, the cell is a dash.
"""

import json

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
QUARTILES = "{ms[1]:.2f} ({ms[0]:.2f} to {ms[2]:.2f})"
RATIOS = "{ratio[1]:.3f} ({ratio[0]:.3f} to {ratio[2]:.3f})"
RIGHT = {
    "relative loss error": "{loss:.1e}",
    "relative gradient norm error": "{norm:.1e}",
    "largest difference of a weight": "{weight:.1e}",
    "weight difference relative to update size": "{moved:.1e}",
}
SPEED = {
    "tokens/s (quartiles)": "{tokens/s:,.0f} ({quartiles[0]:,.0f} to {quartiles[1]:,.0f})",
    "to compiled": "{to compiled:.3f}",
    "MFU": "{MFU:.1%}",
    "of the product": "{of the product:.1%}",
    "GiB": "{GiB:.1f}",
    "GiB planned": "{planned GiB:.1f} ({GiB off:+.1%})",
    "tokens/s planned": "{planned tokens/s:,.0f} ({tokens/s off:+.1%})",
    "launches a step": "{launches:.0f}",
    "idle": "{idle:.1%}",
    "warm-up, s": "{warm-up s:.0f}",
}
ATTENTION = {"ms (quartiles)": QUARTILES, "to causal, by round": RATIOS, "GiB": "{GiB:.2f}"}
EXPERTS = {
    "ms (quartiles)": QUARTILES,
    "to a feed-forward of equal FLOPs, by round": RATIOS,
    "MFU": "{MFU:.1%}",
    "waits of the host": "{waits}",
}
MANY = {
    "tokens": "{tokens:,}",
    "forward and backward, s": "{forward and backward s:.3f} ({spread[0]:.3f} to {spread[1]:.3f})",
    "update, s": "{update s:.3f}",
    "TFLOP/s": "{TFLOP/s:.0f}",
    "MFU": "{MFU without waiting:.1%}",
    "GiB": "{GiB:.1f}",
    "GiB planned": "{planned GiB:.1f} ({GiB off:+.1%})",
    "first step, s": "{first s:.0f}",
}
SYSTEMS = {
    "8B on a rank of many, by system": (
        "8B: ",
        {
            "ranks": "{ranks}",
            "GiB reserved": "{held}",
            "GiB planned": "{planned GiB:,.1f}",
            "difference": "{GiB off:+.1%}",
            "ms a step (range)": "{ms:,.0f} ({spread[0]:,.0f} to {spread[1]:,.0f})",
        },
    ),
    "Llama 7B in 24 GB": (
        "7B in 24 GB: ",
        {
            "GiB reserved": "{held}",
            "of GiB": "{allowed GiB:,.1f}",
            "ms a step": "{ms:,.1f}",
            "more with a refresh, s": "{refresh s:,.1f}",
            "loss": "{first loss:.2f} to {last loss:.2f}",
        },
    ),
    "ViT-MAE": (
        "ViT-MAE ",
        {
            "images/s": "{images/s:,.1f}",
            "the same batch again": "{same/s:,.1f}",
            "ratio": "{ratio:.3f}",
            "images a step": "{images}",
            "cores": "{cores}",
            "GiB reserved": "{held}",
        },
    ),
}
"""Tables: the beginning of their cases, and their columns."""
REAL = {"loss": "{end:.3f}", "tokens/s": "{tokens_per_second:,.0f}", "s": "{seconds:,.0f}"}
PEER = {
    "tokens/s": "{tokens/s:,.0f}",
    "of TorchTitan": "{tokens/s of TorchTitan:,.0f}",
    "ratio (range over turns)": "{ratio:.3f} ({spread[0]:.3f} to {spread[1]:.3f})",
    "planned": "{planned tokens/s:,.0f} ({tokens/s off:+.1%})",
    "GiB": "{GiB:.1f}",
    "GiB of TorchTitan": "{GiB of TorchTitan:.1f}",
    "GiB planned": "{planned GiB:.1f} ({GiB off:+.1%})",
}
BASES = {"ms (range)": "{ms[0]:.1f} ({ms[1]:.1f} to {ms[2]:.1f})", "energy": "{energy:.4f}"}


def write(folder):
    """Write OUTPUT/page.md from what lies in `folder`, and return it."""
    environment = json.loads((folder / "environment.json").read_text())
    stages = {name: read(folder / f"{name}.jsonl") for name in STAGES}
    summary = "\n".join(f"| {name} | {' | '.join(counts(rows))} |" for name, rows in stages.items())
    parts = [failures(stages)]
    for part in (right, fast, many, systems, real, peer):
        rows = stages[part.__name__]
        parts += part({case: row["figures"] for case, row in rows.items()})
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


def right(rows):
    """How far each case was from the CPU at most."""
    compared = {case: row for case, row in rows.items() if row.keys() >= {"loss", "moved"}}
    if compared:
        yield "## How far five steps are from the CPU's"
        yield table(compared, RIGHT)


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
            yield table(masks, ATTENTION)


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
        yield table(ways, EXPERTS)


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
        yield table(found, SPEED)
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
        yield table(timed, MANY)
    for case, row in timed.items():
        yield from collectives(case, row)


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
    for title, (beginning, columns) in SYSTEMS.items():
        found = {
            case.removeprefix(beginning): row
            for case, row in rows.items()
            if case.startswith(beginning)
        }
        if found:
            yield f"## {title}\n\n{table(found, columns)}"
    for case, row in rows.items():
        if methods := row.get("methods"):
            yield f"## {case.capitalize()}\n\n{table(methods, BASES)}"


def real(rows):
    if found := {case: row for case, row in rows.items() if "end" in row}:
        yield "## The real run"
        yield table(found, REAL)


def peer(rows):
    if found := {case: row for case, row in rows.items() if "ratio" in row}:
        yield "## Beside TorchTitan 0.2.2"
        yield table(found, PEER)
