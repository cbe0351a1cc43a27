"""The pictures of the real run (docs/real_run.md), of the files in benchmarks/results/real_run."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from svg import EMPTY, INK, LINE, MUTED, NARROW, Picture

RESULTS = Path(__file__).parents[1] / "benchmarks/results/real_run"
MUON, ADAMW = "#0550ae", "#953800"
LEFT, RIGHT = 48, 374
Scale = Callable[[float], float]


def results(name: str) -> dict[str, Any]:
    """Return the file of a stage."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def axis(picture: Picture, y: Scale, ticks: Sequence[float], form: str = "{:g}") -> None:
    for tick in ticks:
        picture.line([(LEFT, y(tick)), (RIGHT, y(tick))], EMPTY)
        picture.text(LEFT - 6, y(tick) + 4, form.format(tick).replace("e-0", "e-"), "end", MUTED)


def between(low: float, high: float, bottom: float, top: float) -> Scale:
    """Return the heights of values from `low`, at `bottom`, to `high`, at `top`."""
    return lambda value: bottom - (bottom - top) * (value - low) / (high - low)


def held_out() -> Picture:
    """Held-out loss and bits per byte over tokens, of Muon with AdamW and of AdamW alone."""
    runs = {"AdamW": (results("adamw"), ADAMW), "Muon with AdamW": (results("main"), MUON)}
    ends = ", ".join(f"{name} {run['held_out'][-1][1]:.2f}" for name, (run, _) in runs.items())
    title = "Loss on held-out packages over tokens"
    picture = Picture(title, f"At the end, in nats per token: {ends}.", NARROW[0], 430)
    total = runs["AdamW"][0]["tokens"]
    steps = len(runs["AdamW"][0]["losses"])

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / steps

    panels = (("held_out", "loss, nats per token"), ("bits_per_byte", "bits per byte"))
    for number, (key, words) in enumerate(panels):
        top = 40 + 190 * number
        values = [value for run, _ in runs.values() for _, value in run[key]]
        low, high = int(min(values)), int(max(values)) + 1
        y = between(low, high, top + 150, top)
        picture.text(16, top - 14, f"held-out {words}", bold=True)
        axis(picture, y, range(low, high + 1))
        for row, (name, (run, color)) in enumerate(runs.items()):
            picture.line([(x(step), y(value)) for step, value in run[key]], color, 2.5)
            if not number:
                picture.text(RIGHT, top + 16 + 18 * row, name, "end", color, bold=True)
    for millions in range(0, int(total / 1e6) + 1, 2):
        at = x(steps * millions * 1e6 / total)
        picture.text(at, 400, f"{millions}M" if millions else 0, "middle", MUTED)
    picture.text((LEFT + RIGHT) / 2, 420, "tokens", "middle", MUTED)
    return picture


def disturbed() -> Picture:
    """Training loss of the run over that of its undisturbed twin, with what happened to it."""
    run, twin = results("main"), results("twin")
    title = "A run that is stopped, moved and killed, over its undisturbed twin"
    losses, undisturbed, marks = run["losses"], twin["losses"], run["marks"]
    apart = [abs(a - b) / b for a, b in zip(losses, undisturbed, strict=True)]
    about = f"The losses differ by at most {max(apart):.1e} of the loss."
    picture = Picture(title, about, NARROW[0], 430)
    steps = len(losses)

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / steps

    low, high = int(min(losses)), int(max(losses)) + 1
    y = between(low, high, 220, 40)
    picture.text(16, 24, "training loss", bold=True)
    axis(picture, y, range(low, high + 1, 2))
    picture.line([(x(n), y(loss)) for n, loss in enumerate(undisturbed, 1)], LINE, 6)
    picture.line([(x(n), y(loss)) for n, loss in enumerate(losses, 1)], MUON, 1.2)
    for number, (step, what) in enumerate(marks):
        for top, bottom in ((48 + 18 * number, 226), (262, 390)):
            picture.line([(x(step), top), (x(step), bottom)], ADAMW, 1, "5 3")
        picture.text(RIGHT, 52 + 18 * number, f"{step}: {what}", "end", ADAMW, bold=True)
    picture.text(16, 252, "difference, relative to the loss", bold=True)
    most = max(apart)
    y = between(0, most, 380, 268)
    axis(picture, y, (most / 2, most), "{:.1e}")
    picture.line([(x(n), y(each)) for n, each in enumerate(apart, 1)], MUON, 1)
    steps_below(picture, steps, 404)
    return picture


def speed() -> Picture:
    """Model FLOPs utilization of each step, beside the plan."""
    run, plan = results("main"), results("sizes")["chosen"]["plan"]["speed"]
    planned, seconds = plan["mfu"]["value"], plan["seconds_per_step"]["value"]
    shares = [planned * seconds / step for _, step in run["times"]]
    title = "Model FLOPs utilization"
    median = sorted(shares)[len(shares) // 2]
    about = f"Planned {planned:.0%}, median {median:.0%}; lower on other layouts."
    picture = Picture(title, about, NARROW[0], 270)
    picture.text(16, 24, title, bold=True)

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / len(shares)

    most = max(planned, *shares)
    y = between(0, most, 220, 50)
    axis(picture, y, [tick / 10 for tick in range(int(10 * most) + 1)], "{:.0%}")
    for step, _ in run["marks"]:
        picture.line([(x(step), 50), (x(step), 220)], ADAMW, 1, "5 3")
    picture.line([(LEFT, y(planned)), (RIGHT, y(planned))], INK, 1.5, "6 4")
    picture.line([(RIGHT - 118, 20), (RIGHT - 90, 20)], INK, 1.5, "6 4")
    picture.text(RIGHT, 24, f"planned: {planned:.0%}", "end")
    picture.line([(x(n), y(share)) for n, share in enumerate(shares, 1)], MUON, 1)
    steps_below(picture, len(shares), 240)
    return picture


def steps_below(picture: Picture, steps: int, y: float) -> None:
    """Write the numbers of steps below a chart."""
    for step in range(0, steps + 1, steps // 4):
        at = LEFT + (RIGHT - LEFT) * step / steps
        picture.text(at, y, step, "middle", MUTED)
    picture.text((LEFT + RIGHT) / 2, y + 18, "step", "middle", MUTED)


PICTURES = {"real_run_loss": held_out, "real_run_marks": disturbed, "real_run_speed": speed}
