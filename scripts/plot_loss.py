"""Draws the loss of a run: plot_loss.py metrics.jsonl loss.svg [unigram loss to compare with].

The SVG is written by hand, so that no plotting library becomes a dependency.
"""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 40, 620, 20, 316
TRAINING, VALIDATION, UNIGRAM, GRID, INK = "#1f6feb", "#d1570a", "#57606a", "#d8dee4", "#24292f"


def draw(rows: list[dict[str, float]], unigram: float | None) -> str:
    """The SVG: training loss as a line, validation loss as dots, the unigram loss dashed."""
    training = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    validation = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    last = max(step for step, _ in training)
    top = int(max(loss for _, loss in training)) + 1

    def x(step: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * step / last, 1)

    def y(loss: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * loss / top, 1)

    def text(left: float, base: float, words: object, color: str, anchor: str = "end") -> str:
        return f'<text x="{left}" y="{base}" fill="{color}" text-anchor="{anchor}">{words}</text>'

    def level(loss: float, style: str) -> str:
        return f'<path d="M{LEFT} {y(loss)}H{RIGHT}" stroke={style}/>'

    font = 'font-family="sans-serif" font-size="12"'
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [f"<svg {box} {font}>", f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for loss in range(top + 1):
        parts += [level(loss, f'"{GRID}"'), text(LEFT - 8, y(loss) + 4, loss, INK)]
    steps = [round(last * part / 4) for part in range(5)]
    parts += [text(x(step), BOTTOM + 18, step, INK, "middle") for step in steps]
    parts.append(text(x(last / 2), BOTTOM + 38, "optimizer step", INK, "middle"))
    parts.append(text(RIGHT, TOP + 14, "training loss, nats a token", TRAINING))
    parts.append(text(RIGHT, TOP + 32, "validation loss", VALIDATION))
    if unigram is not None:
        parts.append(level(unigram, f'"{UNIGRAM}" stroke-dasharray="6 4"'))
        parts.append(text(x(last * 0.9), y(unigram) - 6, f"unigram model: {unigram}", UNIGRAM))
    points = " ".join(f"{x(step)},{y(loss)}" for step, loss in training)
    parts.append(f'<polyline points="{points}" fill="none" stroke="{TRAINING}" stroke-width="2"/>')
    dots = [f'cx="{x(step)}" cy="{y(loss)}"' for step, loss in validation]
    return "\n".join(
        [*parts, *(f'<circle {c} r="5" fill="{VALIDATION}"/>' for c in dots), "</svg>"]
    )


if __name__ == "__main__":
    metrics, output, *reference = sys.argv[1:]
    lines = Path(metrics).read_text(encoding="utf-8").splitlines()
    drawing = draw([json.loads(line) for line in lines], float(reference[0]) if reference else None)
    Path(output).write_text(drawing + "\n", encoding="utf-8")
