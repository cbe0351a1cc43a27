"""The page of all that is known of a device, from what the cases of each stage gave."""

import json

from tests.gpu.systems_page import systems

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


def write(folder):
    """Write OUTPUT/page.md from what lies in `folder`, and return it."""
    environment = json.loads((folder / "environment.json").read_text())
    stages = {
        name: read(folder / f"{name}.jsonl")
        for name in ("right", "runs", "ranks", "fast", "many", "systems")
    }
    summary = "\n".join(f"| {name} | {' | '.join(counts(rows))} |" for name, rows in stages.items())
    parts = [failures(stages), right(stages["right"]), fast(stages["fast"]), many(stages["many"])]
    figures = {case: row["figures"] for case, row in stages["systems"].items()}
    parts += [f"## {title}\n\n{table(heads, cells)}" for title, heads, cells in systems(figures)]
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


def table(heads, rows):
    heads = list(heads)
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


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
    kinds = {
        "loss": "relative loss error",
        "norm": "relative gradient norm error",
        "weight": "largest difference of a weight",
        "moved": "weight difference relative to update size",
    }
    cells = [
        [case, *(f"{row['figures'][kind]:.1e}" for kind in kinds)]
        for case, row in rows.items()
        if row["figures"].keys() >= kinds.keys()
    ]
    if not cells:
        return ""
    return "## How far five steps are from the CPU's\n\n" + table(["", *kinds.values()], cells)


def fast(rows):
    """A table of each model, and what the device did in its fastest and its slowest row."""
    product = rows.get("matrix product", {}).get("figures", {}).get("TFLOP/s")
    parts = ["## Speed"]
    if product:
        parts.append(f"A product of 8192 x 8192 bf16 matrices: {product:.0f} TFLOP/s.")
    if found := rows.get("calibration", {}).get("figures"):
        measured = "; ".join(f"{name} {value:,.4g}" for name, value in found.items())
        parts.append(f"`torchtitan plan --calibrate`: {measured}.")
    for case, row in rows.items():
        if case.startswith("Hadamard transform") and (rotated := row.get("figures")):
            times = "; ".join(f"{name} {number:.3g}" for name, number in rotated.items())
            parts.append(f"{case} in bf16: {times}.")
    codecs = {case: row["figures"] for case, row in rows.items() if case.startswith("codec of")}
    if codecs := {case: found for case, found in codecs.items() if found}:
        heads = ["", *(name.removesuffix(", GB/s") for name in next(iter(codecs.values())))]
        cells = [[case, *(f"{n:,.4g}" for n in found.values())] for case, found in codecs.items()]
        parts += ["### Codec, GB/s of float32 numbers", table(heads, cells)]
    parts += attention(rows)
    parts += experts(rows)
    models = {}
    for case, row in rows.items():
        if ": " in case and "tokens/s" in row["figures"]:
            model, name = case.split(": ")
            models.setdefault(model, {})[name] = row["figures"]
    for model, found in models.items():
        first = found.get("compiled", {}).get("tokens/s")
        cells = []
        for name, row in found.items():
            low, high = row["quartiles"]
            cells.append(
                [
                    name,
                    f"{row['tokens/s']:,.0f} ({low:,.0f} to {high:,.0f})",
                    f"{row['tokens/s'] / first:.3f}" if first else "-",
                    f"{row['MFU']:.1%}" if "MFU" in row else "-",
                    f"{row['TFLOP/s'] / product:.1%}" if product else "-",
                    f"{row['GiB']:.1f}",
                    *beside(row, "GiB", ".1f"),
                    *beside(row, "tokens/s", ",.0f"),
                    f"{row['launches']:.0f}" if "launches" in row else "-",
                    f"{row['idle']:.1%}" if "idle" in row else "-",
                    f"{row['warm-up s']:.0f}",
                ]
            )
        heads = ["", "tokens/s (quartiles)", "to compiled", "MFU", "of the product", "GiB"]
        heads += ["GiB planned", "tokens/s planned"]
        parts += [
            f"### {model}",
            table([*heads, "launches a step", "idle", "warm-up, s"], cells),
            traces(found),
        ]
    return "\n\n".join(filter(None, parts)) if parts[1:] else ""


def beside(figures, key, form):
    """The prediction of a figure, and its relative error."""
    if (value := figures.get(f"planned {key}")) is None:
        return ["-"]
    return [f"{value:{form}} ({value / figures[key] - 1:+.1%})"]


def quartiles(found):
    """Milliseconds, and what they are relative to another way's of the same round."""
    return [
        f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
        for (low, middle, high), digits in ((found["ms"], 2), (found["ratio"], 3))
    ]


def attention(rows):
    """A table of each length, with a row for each mask."""
    for case, row in rows.items():
        if "causal" not in (masks := row["figures"]):
            continue
        cells = [[name, *quartiles(found), f"{found['GiB']:.2f}"] for name, found in masks.items()]
        heads = ["", "ms (quartiles)", "to causal, by round", "GiB"]
        yield f"### {case.capitalize()}"
        yield "Forward and backward of 32 query heads and 8 key/value heads of 128, in bf16."
        yield table(heads, cells)


def experts(rows):
    """A table of each layer, with a row for each way to compute it, and for its parts."""
    for case, row in rows.items():
        if not (ways := row["figures"].get("ways")):
            continue
        waits, cells = row["figures"].get("waits", {}), []
        for name, found in ways.items():
            mfu = row["figures"].get(f"MFU, {name}")
            own = [f"{mfu:.1%}" if mfu else "-", str(waits.get(name, "-"))]
            cells.append([name, *quartiles(found), *own])
        heads = ["", "ms (quartiles)", "to a feed-forward of equal FLOPs, by round", "MFU"]
        yield f"### {case[0].upper()}{case[1:]}"
        yield "Forward and backward of a layer in bf16; MFU is by the FLOPs of the chosen experts."
        yield table([*heads, "waits of the host"], cells)
        if off := row["figures"].get("off"):
            yield "Relative differences: " + ", ".join(f"{k} {v:.1e}" for k, v in off.items()) + "."


def traces(found):
    """What takes longest on the device in the fastest row and in the slowest."""
    traced = [name for name in found if found[name].get("longest")]
    if not traced:
        return ""
    traced.sort(key=lambda name: found[name]["tokens/s"])
    lines = []
    for name in dict.fromkeys((traced[-1], traced[0])):
        lines.append(f"{name}, by time on the device: {'; '.join(found[name]['longest'])}.")
        lines.append(f"Longest idle gaps: {'; '.join(found[name]['gaps'])}.")
    return "\n\n".join(lines)


def many(rows):
    cells = []
    for case, row in rows.items():
        if "forward and backward s" in (figures := row["figures"]):
            low, high = figures["spread"]
            mfu = figures.get("MFU without waiting")
            cells.append(
                [
                    case,
                    f"{figures['tokens']:,}",
                    f"{figures['forward and backward s']:.3f} ({low:.3f} to {high:.3f})",
                    f"{figures['update s']:.3f}",
                    f"{figures['TFLOP/s']:.0f}",
                    "-" if mfu is None else f"{mfu:.1%}",
                    f"{figures['GiB']:.1f}",
                    *beside(figures, "GiB", ".1f"),
                    f"{figures['first s']:.0f}",
                ]
            )
    heads = ["", "tokens", "forward and backward, s", "update, s", "TFLOP/s", "MFU", "GiB"]
    heads += ["GiB planned", "first step, s"]
    if not cells:
        return ""
    return "\n\n".join(["## One rank of many", table(heads, cells), *collectives(rows)])


def collectives(rows):
    """The number of collectives in graphs, and their order among the products."""
    for case, row in rows.items():
        if tallies := row["figures"].get("collectives"):
            yield f"{case}: " + "; ".join(
                f"{kind} {found['before']} -> {found['after']} ({found['bytes'] / 1e6:,.0f} MB)"
                for kind, found in tallies.items()
            )
            for graph in row["figures"]["products before collectives"]:
                orders = "; ".join(f"{kind} {places}" for kind, places in graph.items())
                yield f"Products before each, in a graph: {orders}."
