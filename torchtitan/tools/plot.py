"""Plot the loss or other metrics of runs in one SVG file.

`torchtitan compare` draws more charts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final
from xml.sax.saxutils import escape

import typer

from torchtitan.config import ConfigError
from torchtitan.tools.history import Row, RunHistory
from torchtitan.tools.options import Text, Verb, verb
from torchtitan.tools.page import Axis, ticks, vertical_axis

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 48, 620, 20, 316
COLORS: Final = ("#1f6feb", "#d1570a", "#1a7f37", "#8250df", "#bf3989", "#57606a")
REFERENCE, GRID, INK = "#57606a", "#d8dee4", "#24292f"

Point = tuple[int, float]
app = verb()


@app.command(cls=Verb, help=__doc__)
def plot(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs (job.dump_folder): outputs/x.")
    ],
    output: Annotated[
        Path | None,
        Text(
            "FILE", "File to write (default: loss.svg in the first run's folder).", "--output", "-o"
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        Text("KEY", "Metric to plot, such as grad_norm; may be repeated (default: loss)."),
    ] = None,
    reference: Annotated[
        float | None,
        Text("LOSS", "Loss to compare with, drawn as a line, such as the unigram loss."),
    ] = None,
) -> None:
    metrics = metric or ["loss"]
    if output is not None:
        problem = (
            f"there is no folder {output.parent}"
            if not output.parent.is_dir()
            else "already exists; choose another file, or delete it"
            if output.exists()
            else "it is one file; draw one --metric at a time"
            if len(metrics) > 1
            else ""
        )
        if problem:
            raise ConfigError(f"--output: got {output}; {problem}")
    histories = [RunHistory.open(folder) for folder in runs]
    drawn = {
        key: draw([Curve.read(*pair, key) for pair in zip(histories, runs, strict=True)], reference)
        for key in metrics
    }
    for key, text in drawn.items():
        path = output or runs[0] / f"{key.replace('/', '-')}.svg"
        path.write_text(text, encoding="utf-8")
        print(path)


@dataclass(frozen=True)
class Curve:
    """The losses of a run by step, or another metric; those that are not finite are left out."""

    name: str
    metric: str
    training: Sequence[Point]
    validation: Sequence[Point]

    @classmethod
    def read(cls, history: RunHistory, folder: Path, metric: str) -> "Curve":
        """Read a metric of a run.

        Raises:
            ConfigError: if it has not been reported.
        """
        points = list(_points(history.rows, metric))
        if not points:
            numbers = {k for row in history.rows for k, v in row.items() if isinstance(v, float)}
            there = f"; its metrics: {', '.join(sorted(numbers))}" if numbers else ""
            raise ConfigError(f"{folder}: the run has reported no {metric}{there}")
        dots = list(_points(history.rows, "validation_loss")) if metric == "loss" else []
        return cls(str(folder), metric, points, dots)


def draw(curves: Sequence[Curve], reference: float | None = None) -> str:
    """Draw the SVG: training loss as lines, validation loss as dots, the reference dashed."""
    every = [point for curve in curves for point in (*curve.training, *curve.validation)]
    losses = [loss for _, loss in every] + ([] if reference is None else [reference])
    last = max(step for step, _ in every)
    across, up = Axis(0, last or 1, LEFT, RIGHT), vertical_axis(losses, BOTTOM, TOP)

    def x(step: float) -> float:
        return round(across.place(step), 1)

    def y(loss: float) -> float:
        return round(up.place(loss), 1)

    def text(left: float, base: float, words: object, color: str, anchor: str = "end") -> str:
        at = f'x="{left}" y="{base}" fill="{color}" text-anchor="{anchor}"'
        return f"<text {at}>{escape(str(words))}</text>"

    def level(loss: float, style: str) -> str:
        return f'<path d="M{LEFT} {y(loss)}H{RIGHT}" stroke={style}/>'

    font = 'font-family="sans-serif" font-size="12"'
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [f"<svg {box} {font}>", f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for loss in ticks(up.low, up.high):
        parts += [level(loss, f'"{GRID}"'), text(LEFT - 8, y(loss) + 4, f"{loss:g}", INK)]
    for step in dict.fromkeys(round(last * part / 4) for part in range(5)):
        parts.append(text(x(step), BOTTOM + 18, f"{step:,}", INK, "middle"))
    parts.append(text(x(last / 2), BOTTOM + 38, "optimizer step", INK, "middle"))
    if reference is not None:
        parts.append(level(reference, f'"{REFERENCE}" stroke-dasharray="6 4"'))
        parts.append(text(RIGHT, y(reference) - 6, f"reference: {reference:g}", REFERENCE))
    for number, curve in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        line = " ".join(f"{x(step)},{y(loss)}" for step, loss in curve.training)
        style = f'fill="none" stroke="{color}" stroke-width="2"'
        parts.append(f'<polyline points="{line}" {style}/>')
        for step, loss in curve.validation:
            parts.append(f'<circle cx="{x(step)}" cy="{y(loss)}" r="4" fill="{color}"/>')
        parts.append(text(RIGHT, TOP + 14 + 18 * number, curve.name, color))
    dots = "; dots: validation" if any(curve.validation for curve in curves) else ""
    metric = curves[0].metric
    title = "training loss" if metric == "loss" else metric
    parts.append(text(RIGHT, HEIGHT - 6, f"{title}{dots}", INK))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _points(rows: Sequence[Row], key: str) -> Iterator[Point]:
    for row in rows:
        value = row.get(key)
        if isinstance(value, float | int) and math.isfinite(value):
            yield row["step"], value
