"""Draws the pictures of the first pages: python scripts/draw_pages.py [folder]."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from svg import EMPTY, GROUND, INK, LINE, MUTED, Picture

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "images"
CURVE = ROOT / "benchmarks/results/one_curve.json"
COLORS = (INK, "#953800", "#0550ae")
PALE = ("#cfdffd", "#fde3c8", "#cfecd7", "#e7d9f2")


def one_curve() -> Picture:
    """The losses of the same recipe on several layouts, and the differences, enlarged."""
    runs = json.loads(CURVE.read_text(encoding="utf-8"))["runs"]
    title = "One recipe on 1, 4 and 8 ranks: the same loss curve"
    names = [run["layout"] for run in runs]
    about = f"The losses of {'; '.join(names)} lie on each other; below, the relative differences."
    picture = Picture(title, about, 680, 400)
    picture.text(16, 24, "training loss", bold=True)
    first = runs[0]["loss"]
    top = max(first)

    def x(step: int) -> float:
        return 60 + 600 * step / (len(first) - 1)

    def level(y: float, words: str) -> None:
        picture.line([(60, y), (660, y)], EMPTY)
        picture.text(52, y + 4, words, "end", MUTED)

    for loss in range(0, int(top) + 1, 2):
        level(220 - 180 * loss / top, str(loss))
    for number, (run, color) in enumerate(zip(runs, COLORS, strict=True)):
        # The first is the widest, under the others.
        points = [(x(step), 220 - 180 * loss / top) for step, loss in enumerate(run["loss"])]
        picture.line(points, color, 9 - 3.5 * number)
        picture.text(660, 48 + 18 * number, run["layout"], "end", color, bold=True)
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
    picture.text(360, 394, "step", "middle", MUTED)
    return picture


def recipe_to_run() -> Picture:
    """The values and verbs between a recipe and a run."""
    title, about = "How a recipe becomes a run", "; ".join(f"{a}: {b}" for a, *b in STAGES)
    picture = Picture(title, about, 680, 128)
    for number, (name, first, second) in enumerate(STAGES):
        x = 16 + 166 * number
        picture.rect(x, 20, 142, 88, PALE[number], LINE)
        picture.text(x + 71, 44, name, "middle", bold=True)
        picture.text(x + 71, 70, first, "middle", size=11)
        picture.text(x + 71, 88, second, "middle", size=11)
        if number:
            picture.arrow(x - 22, 64, x - 3, 64)
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


PICTURES = {"one_curve": one_curve, "recipe_to_run": recipe_to_run, "lanes": lanes}


def main(folder: Path = FOLDER) -> None:
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
