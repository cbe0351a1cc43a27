"""An SVG written by hand, so that no drawing library becomes a dependency.

It is light or dark as the reader's system is, on a ground of its own.
"""

from collections.abc import Iterable
from html import escape

INK, MUTED, LINE, EMPTY, GROUND = "#24292f", "#57606a", "#8c959f", "#eff2f5", "#ffffff"

DARK = {
    INK: "#e6edf3",
    MUTED: "#9da7b3",
    LINE: "#6e7781",
    EMPTY: "#2d333b",
    GROUND: "#161b22",
    "#5b8ff9": "#2f5fc4",
    "#f6a04d": "#a85a10",
    "#5fbf77": "#2f7d46",
    "#b68ad6": "#7a4fa0",
    "#cfdffd": "#22365f",
    "#fde3c8": "#5a3a17",
    "#cfecd7": "#1e4a2b",
    "#e7d9f2": "#43305a",
    "#8fb8f5": "#3b6fc0",
    "#f5b071": "#b3621a",
    "#8ccf9d": "#3a8250",
    "#4f83d6": "#2a4f8f",
    "#d97f2b": "#8a4b12",
    "#4a9d61": "#2c6b3e",
    "#953800": "#f0883e",
    "#0550ae": "#6cb6ff",
}
"""What the colors of pictures are where the reader's system is dark."""
STYLE = "".join(
    f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}'
    for light, dark in DARK.items()
)

NARROW = 390, 507
"""Width of a picture whose text can be read on a narrow screen, and its width on another."""

Box = tuple[float, float, float, float]
"""Left, top, width and height."""


class Picture:
    """An SVG that grows by what is drawn; lengths are pixels."""

    def __init__(self, title: str, about: str, width: int, height: int) -> None:
        # One for a narrow screen is larger where there is space.
        scale = max(1, NARROW[1] / width)
        size = f'width="{width * scale:g}" height="{height * scale:g}"'
        box = f'viewBox="0 0 {width} {height}" {size}'
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" '
            'aria-labelledby="title about" font-family="sans-serif" font-size="12">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="about">{escape(about)}</desc>',
            f"<style>@media (prefers-color-scheme:dark){{{STYLE}}}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{INK}"/>'
            "</marker></defs>",
            f'<rect width="{width}" height="{height}" rx="6" fill="{GROUND}"/>',
        ]

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        stroke: str = "none",
        dashed: bool = False,
    ) -> None:
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        dash = ' stroke-dasharray="3 2"' if dashed else ""
        self.parts.append(f'<rect {size} fill="{fill}" stroke="{stroke}"{dash}/>')

    def text(
        self,
        x: float,
        y: float,
        words: object,
        anchor: str = "start",
        color: str = INK,
        size: int = 12,
        bold: bool = False,
    ) -> None:
        style = f'text-anchor="{anchor}" fill="{color}" font-size="{size}"'
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {style}{weight}>{escape(str(words))}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float, both: bool = False) -> None:
        start = ' marker-start="url(#tip)"' if both else ""
        path = f'd="M{x:g} {y:g}L{to_x:g} {to_y:g}"'
        self.parts.append(f'<path {path} stroke="{INK}" marker-end="url(#tip)"{start}/>')

    def line(
        self, points: Iterable[tuple[float, float]], color: str, width: float = 1, dash: str = ""
    ) -> None:
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        style = f'fill="none" stroke="{color}" stroke-width="{width:g}"{dashed}'
        self.parts.append(f'<polyline points="{at}" {style}/>')

    def boxes(self, boxes: Iterable[Box], fill: str) -> None:
        """Many of one colour, as one path; edges without a seam."""
        path = "".join(f"M{x:g} {y:g}h{wide:g}v{high:g}h{-wide:g}z" for x, y, wide, high in boxes)
        self.parts.append(f'<path d="{path}" fill="{fill}" shape-rendering="crispEdges"/>')

    def numbers(self, numbers: Iterable[tuple[float, float, int]]) -> None:
        """Small numbers around (x, y)."""
        each = "".join(f'<text x="{x:g}" y="{y:g}">{number}</text>' for x, y, number in numbers)
        self.parts.append(f'<g font-size="8" text-anchor="middle" fill="{INK}">{each}</g>')

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"
