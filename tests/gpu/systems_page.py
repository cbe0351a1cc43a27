"""The part of the page about systems from papers."""


def systems(rows):
    """Yield the title, heads and cells of each table, given the figures of each case."""
    ranks = {name.removeprefix("8B: "): row for name, row in rows.items() if name[:4] == "8B: "}
    heads = ["", "ranks", "GiB reserved", "GiB planned", "difference", "ms a step (range)"]
    if ranks:
        cells = [[name, *rank(row)] for name, row in ranks.items()]
        yield "8B on a rank of many, by system", heads, cells
    trained = {name: row for name, row in rows.items() if name.startswith("7B in 24 GB: ")}
    heads = ["", "GiB reserved", "of GiB", "ms a step", "more with a refresh, s", "loss"]
    if trained:
        cells = [[name.partition(": ")[2], *small_card(row)] for name, row in trained.items()]
        yield "Llama 7B in 24 GB", heads, cells
    for name, row in rows.items():
        if methods := row.get("methods"):
            cells = [
                [method, "{:.1f} ({:.1f} to {:.1f})".format(*found["ms"]), f"{found['energy']:.4f}"]
                for method, found in methods.items()
            ]
            yield name.capitalize(), ["", "ms (range)", "energy"], cells
    pictured = {name: row for name, row in rows.items() if name.startswith("ViT-MAE ")}
    heads = ["", "images/s", "images a step", "GiB reserved"]
    if pictured:
        cells = [[name.removeprefix("ViT-MAE "), *images(row)] for name, row in pictured.items()]
        yield "ViT-MAE", heads, cells


def rank(row):
    if "GiB" not in row:
        return ["-", lost(row), number(row, "planned GiB"), "-", "-"]
    cells = [str(row["ranks"]), number(row, "GiB"), number(row, "planned GiB")]
    planned = row.get("planned GiB")
    cells.append("-" if planned is None else f"{planned / row['GiB'] - 1:+.1%}")
    low, high = row["spread"]
    return [*cells, f"{row['ms']:,.0f} ({low:,.0f} to {high:,.0f})"]


def small_card(row):
    if "GiB" not in row:
        return [lost(row), "-", "-", "-", "-"]
    losses = f"{row['losses'][0]:.2f} to {row['losses'][-1]:.2f}"
    cells = [number(row, key) for key in ("GiB", "allowed GiB", "ms", "refresh s")]
    return [*cells, losses]


def images(row):
    if "GiB" not in row:
        return [lost(row), "-", "-"]
    return [f"{row['images/s']:,.1f}", str(row["images"]), number(row, "GiB")]


def number(row, key):
    return f"{row[key]:,.1f}" if key in row else "-"


def lost(row):
    """The reason for which there are no figures."""
    return "out of memory" if "out of memory" in row else "-"
