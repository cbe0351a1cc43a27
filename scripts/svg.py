"""An SVG written by hand, so that no drawing library becomes a dependency.

It has a light ground of its own, for pages that are light or dark.
"""

from collections.abc import Iterable
from html import escape

INK, MUTED, LINE, EMPTY, GROUND = "#24292f", "#57606a", "#8c959f", "#eff2f5", "#ffffff"

Box = tuple[float, float, float, float]
"""Left, top, width and height."""


class Picture:
    """An SVG that grows by what is drawn; lengths are pixels."""

    def __init__(self, title: str, about: str, width: int, height: int) -> None:
        box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" '
            'aria-labelledby="title about" font-family="sans-serif" font-size="12">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="about">{escape(about)}</desc>',
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
