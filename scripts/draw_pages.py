"""Draws the pictures of the first pages: python scripts/draw_pages.py [folder]."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import draw_real_run
from svg import EMPTY, GROUND, INK, LINE, MUTED, NARROW, Picture

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks/results"
LAYERS = ("#5b8ff9", "#f6a04d", "#5fbf77", "#b68ad6", "#8fb8f5", "#f5b071", "#8ccf9d")
COLORS = (INK, "#953800", "#0550ae")
PALE = ("#cfdffd", "#fde3c8", "#cfecd7", "#e7d9f2")


def recorded(name: str) -> dict[str, Any]:
    """Return the data of a picture."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def one_curve() -> Picture:
    """The losses of the same recipe on several layouts, and the differences, enlarged."""
    runs = recorded("one_curve")["runs"]
    title = "One recipe on 1, 4 and 8 ranks: the same loss curve"
    names = [run["layout"] for run in runs]
    about = f"The losses of {'; '.join(names)} lie on each other; below, the relative differences."
    picture = Picture(title, about, NARROW[0], 400)
    picture.text(16, 24, "training loss", bold=True)
    first = runs[0]["loss"]
    top = max(first)

    def x(step: int) -> float:
        return 48 + 326 * step / (len(first) - 1)

    def level(y: float, words: str) -> None:
        picture.line([(48, y), (374, y)], EMPTY)
        picture.text(42, y + 4, words, "end", MUTED)

    for loss in range(0, int(top) + 1, 2):
        level(220 - 180 * loss / top, str(loss))
    for number, (run, color) in enumerate(zip(runs, COLORS, strict=True)):
        # The first is the widest, under the others.
        points = [(x(step), 220 - 180 * loss / top) for step, loss in enumerate(run["loss"])]
        picture.line(points, color, 9 - 3.5 * number)
        picture.text(374, 160 + 18 * number, run["layout"], "end", color, bold=True)
    others = [[(a - b) / b for a, b in zip(run["loss"], first, strict=True)] for run in runs[1:]]
    most = max(abs(each) for other in others for each in other)
    picture.text(16, 252, "difference from 1 rank, relative to the loss", bold=True)
    for share in (-1, 0, 1):
        level(312 - 44 * share, f"{share * most:.0e}" if share else "0")
    for width, other, color in zip((5, 1.5), others, COLORS[1:], strict=True):
        points = [(x(step), 312 - 44 * each / most) for step, each in enumerate(other)]
        picture.line(points, color, width)
    for step in range(0, len(first) + 1, 10):
        picture.text(x(max(step - 1, 0)), 378, max(step, 1), "middle", MUTED)
    picture.text(211, 394, "step", "middle", MUTED)
    return picture


def killed_run() -> Picture:
    """The losses of a run that is killed, and resumed on another layout."""
    whole = recorded("one_curve")["runs"][0]["loss"]
    killed, resumed = recorded("killed_run")["runs"]
    last, first = killed["steps"][-1], resumed["steps"][0]
    title = "A run that is killed, and resumed on another layout"
    about = f"The losses of {killed['layout']} until kill -9 after step {last}, and of "
    about += f"{resumed['layout']} from step {first}, lie on the curve of an undisturbed run."
    picture = Picture(title, about, NARROW[0], 320)
    picture.text(16, 24, "training loss", bold=True)
    top = max(whole)

    def x(step: float) -> float:
        return 48 + 326 * (step - 1) / (len(whole) - 1)

    def y(loss: float) -> float:
        return 270 - 230 * loss / top

    for loss in range(0, int(top) + 1, 2):
        picture.line([(48, y(loss)), (374, y(loss))], EMPTY)
        picture.text(42, y(loss) + 4, loss, "end", MUTED)
    for step in range(0, len(whole) + 1, 10):
        picture.text(x(max(step, 1)), 290, max(step, 1), "middle", MUTED)
    picture.text(211, 308, "step", "middle", MUTED)
    picture.line([(x(step), y(loss)) for step, loss in enumerate(whole, 1)], LINE, 10)
    for run, color, width in ((killed, COLORS[1], 5), (resumed, COLORS[2], 2)):
        points = zip(run["steps"], run["loss"], strict=True)
        picture.line([(x(step), y(loss)) for step, loss in points], color, width)
    marks = ((first - 1, 235, "resumed from", COLORS[2]), (last, 235, "kill -9", COLORS[1]))
    for step, low, words, color in marks:
        picture.line([(x(step), 100), (x(step), low)], color, 2, "5 3")
        anchor = "start" if step == last else "end"
        picture.text(x(step) + (6 if step == last else -6), 230, words, anchor, color, bold=True)
    picture.text(x(first - 1) - 6, 246, f"step {first - 1}", "end", color=COLORS[2])
    picture.text(x(last) + 6, 246, f"after step {last}", color=COLORS[1])
    names = (("undisturbed: 1 rank", MUTED), (killed["layout"], COLORS[1]))
    for number, (name, color) in enumerate((*names, (resumed["layout"], COLORS[2]))):
        picture.text(374, 48 + 18 * number, name, "end", color, bold=True)
    return picture


def memory_over_step() -> Picture:
    """Memory by kind over a planned step, beside the limit."""
    found = recorded("plan_memory_over_step")
    limit, sizes = found["limit_gib"], found["gib"]
    title = "Memory over a step: llama3_8b on 8 H100, FSDP 8"
    parts = ", ".join(f"{name} {max(size):.1f}" for name, size in sizes.items())
    about = f"GiB on a device, at most: {parts}; the limit is {limit:.1f}."
    picture = Picture(title, about, NARROW[0], 430)
    picture.text(16, 24, title, bold=True)
    ends = [*found["kernels"][1:], found["kernels"][-1] + 1]

    def x(kernels: float) -> float:
        return round(60 + 314 * kernels / ends[-1], 1)

    def y(gib: float) -> float:
        return round(290 - 240 * gib / limit, 1)

    for gib in range(0, int(limit) + 1, 20):
        picture.line([(60, y(gib)), (374, y(gib))], EMPTY)
        picture.text(52, y(gib) + 4, f"{gib} GiB" if gib else 0, "end", MUTED)
    picture.line([(60, y(limit)), (374, y(limit))], INK, 1.5, "6 4")
    picture.text(374, y(limit) + 16, f"limit of a device: {limit:.1f} GiB", "end")
    below = [0.0] * len(ends)
    spans = [*zip(found["kernels"], ends, strict=True)]
    for number, ((name, size), color) in enumerate(zip(sizes.items(), LAYERS, strict=True)):
        levels = [low + high for low, high in zip(below, size, strict=True)]
        boxes = zip(spans, below, levels, strict=True)
        picture.boxes(
            [
                (x(a), y(high), round(x(b) - x(a), 1), round(y(low) - y(high), 1))
                for (a, b), low, high in boxes
                if high > low
            ],
            color,
        )
        below = levels
        left, top = 60 + 150 * (number % 2), 350 + 20 * (number // 2)
        picture.rect(left, top, 12, 12, color)
        picture.text(left + 20, top + 10, name)
    kinds = [moment.removeprefix("end of ").split()[0] for moment in found["moments"]]
    starts = [i for i, kind in enumerate(kinds) if kind in PHASES and kind not in kinds[i - 1 : i]]
    for start, end in zip(starts, [*starts[1:], len(ends) - 1], strict=True):
        middle = (found["kernels"][start] + found["kernels"][end]) / 2
        picture.line([(x(found["kernels"][start]), 290), (x(found["kernels"][start]), 296)], INK)
        picture.text(x(middle), 310, kinds[start], "middle", MUTED)
    picture.text(195, 330, "first and last of 128 accumulated batches, then the update", "middle")
    return picture


PHASES = ("forward", "backward")


def recipe_to_run() -> Picture:
    """The values and verbs between a recipe and a run."""
    title, about = "How a recipe becomes a run", "; ".join(f"{a}: {b}" for a, *b in STAGES)
    picture = Picture(title, about, NARROW[0], 16 + 76 * len(STAGES))
    for number, (name, *words) in enumerate(STAGES):
        y = 16 + 76 * number
        picture.rect(45, y, 300, 54, PALE[number], LINE)
        picture.text(195, y + 21, name, "middle", bold=True)
        picture.text(195, y + 42, " ".join(words), "middle")
        if number:
            picture.arrow(195, y - 22, 195, y - 3)
    return picture


STAGES = (
    ("recipe", "TOML, what it extends,", "and flags"),
    ("JobConfig", "checked as a whole:", "all mistakes at once"),
    ("Run", "model, data, optimizer", "on this rank"),
    ("Trainer", "steps, checkpoints,", "metrics"),
)


def lanes() -> Picture:
    """Documents that are dealt to lanes, cut into samples, and read by ranks."""
    count, samples, size = 4, 3, 120
    title = "From documents to lanes to a batch"
    about = "Each lane joins its own documents and cuts samples of equal length. A step takes the "
    about += "next sample of each lane, and the ranks divide the lanes among them."
    picture = Picture(title, about, 680, 270)
    for lane in range(count):
        y = 52 + 46 * lane
        picture.text(16, y + 19, f"lane {lane}", bold=True)
        x = 84.0
        for number, length in documents(lane, samples * size):
            picture.rect(x, y, length, 28, PALE[number % len(PALE)], GROUND)
            cut = 84 + size * ((x - 84) // size + 1)  # the label stands beside it
            place = cut if x + 46 > cut else x
            if place + 40 < x + length:
                picture.text(place + 6, y + 18, f"doc {number}", size=11)
            x += length
        for sample in range(samples + 1):
            place = 84 + sample * size
            picture.line([(place, y - 5), (place, y + 33)], INK, 2)
    for step in range(samples):
        picture.text(84 + size * (step + 0.5), 34, f"step {step + 1}", "middle", MUTED)
    for ranks, x in ((1, 490), (2, 590)):
        picture.text(x + 34, 34, f"{ranks} rank{'s' * (ranks > 1)}", "middle", MUTED)
        for rank in range(ranks):
            height = 184 / ranks
            picture.rect(x, 45 + rank * height, 68, height - 8, EMPTY, LINE)
            picture.text(x + 34, 45 + rank * height + height / 2, f"rank {rank}", "middle")
    picture.text(16, 254, "Samples depend on the seed and the lanes, never on the ranks.")
    return picture


def documents(lane: int, room: int) -> Iterator[tuple[int, float]]:
    """Yield the documents of a lane of four, and how long each is drawn."""
    number = lane
    while room > 0:
        length = min(48 + number * 53 % 101, room)
        yield number, length
        room -= length
        number += 4


PICTURES = {
    "one_curve": one_curve,
    "killed_run": killed_run,
    "memory_over_step": memory_over_step,
    "recipe_to_run": recipe_to_run,
    "lanes": lanes,
    **draw_real_run.PICTURES,
}


def main(folder: Path = FOLDER) -> None:
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
