"""Draws the pictures of docs/parallelism.md: python scripts/draw_parallelism.py [folder].

Pipelines are drawn from the orders that the schedules run, and context parallelism from the tiles
that it computes.
"""

import sys
from collections import defaultdict
from pathlib import Path
from textwrap import wrap

from svg import EMPTY, INK, LINE, MUTED, NARROW, Box, Picture

from torchtitan.parallel import schedules
from torchtitan.parallel.context_pieces import Cut

FOLDER = Path(__file__).parents[1] / "docs" / "images"
RANKS = ("#5b8ff9", "#f6a04d", "#5fbf77", "#b68ad6")
PALE = ("#cfdffd", "#fde3c8", "#cfecd7", "#e7d9f2")
KINDS = {"F": "#8fb8f5", "B": "#f5b071", "I": "#f5b071", "W": "#8ccf9d"}
SECOND = {"F": "#4f83d6", "B": "#d97f2b", "I": "#d97f2b", "W": "#4a9d61"}


def copies_and_parts(copies: int, parts: int, title: str, about: str, notes: list[str]) -> Picture:
    """Six blocks on copies x parts ranks; the third block is in use, so it is gathered."""
    blocks, width, height, gap = 6, 42, 26, 10
    ranks = copies * parts
    bottom = 38 + ranks * (height + gap) + (copies - 1) * 14
    lines = [
        line for note in ("Every rank reads its own samples.", *notes) for line in wrap(note, 54)
    ]
    picture = Picture(title, about, NARROW[0], bottom + 20 * len(lines) + 8)

    def left(block: int) -> int:
        return 66 + block * (width + 12)

    def top(rank: int) -> int:
        return 38 + rank * (height + gap) + rank // parts * 14

    for block in range(blocks):
        picture.text(left(block) + width / 2, 24, f"block {block}", "middle", MUTED)
    for rank in range(ranks):
        picture.text(16, top(rank) + 17, f"rank {rank}", bold=True)
        for block in range(blocks):
            for part in range(parts):
                is_here = part == rank % parts or block == 2
                x, each = left(block) + part * width / parts, width / parts
                picture.rect(x, top(rank), each, height, RANKS[part] if is_here else EMPTY)
            picture.rect(left(block), top(rank), width, height, "none", LINE)
    for copy in range(copies if parts > 1 else 0):
        first, last = top(copy * parts), top(copy * parts + parts - 1) + height
        picture.rect(
            left(2) - 5, first - 5, width + 10, last - first + 10, "none", INK, dashed=True
        )
    for block in range(blocks if copies > 1 else 0):
        x = left(block) + width / 2
        picture.arrow(x, top(parts - 1) + height + 1, x, top(ranks - parts) - 1, both=True)
    for number, line in enumerate(lines):
        picture.text(16, bottom + 16 + 20 * number, line)
    return picture


def ddp() -> Picture:
    notes = ["Backward: an all-reduce of each block's gradients, once per step."]
    about = "Two ranks; each holds all six blocks and reads samples of its own."
    return copies_and_parts(2, 1, "DDP: every rank has the whole model", about, notes)


def fsdp() -> Picture:
    notes = [
        "Forward: an all-gather before a block is used; then its other parts are freed.",
        "Backward: an all-gather again, and a reduce-scatter of the block's gradients.",
    ]
    about = "Four ranks; each holds a quarter of every block, and all of the block in use."
    return copies_and_parts(1, 4, "FSDP: every rank has a part of each block", about, notes)


def hsdp() -> Picture:
    notes = [
        "Dashed: all-gathers and reduce-scatters stay among the ranks of one copy.",
        "Arrows: an all-reduce of each part's gradients between the copies, once per step.",
    ]
    about = "Two copies of two ranks; each rank holds half of every block."
    return copies_and_parts(2, 2, "HSDP: copies of a model in parts", about, notes)


SQUARE, ACROSS = 54, 164
"""Side of an activation, tokens downwards and features to the right; from one to the next."""


def activation(picture: Picture, x: float, y: float, rank: int, kind: str) -> None:
    """What a tensor rank of two has of an activation: all, part of the tokens or the features."""
    picture.rect(x, y, SQUARE, SQUARE, EMPTY)
    half = SQUARE / 2
    if kind == "tokens":
        picture.rect(x, y + rank * half, SQUARE, half, RANKS[rank])
    elif kind == "features":
        picture.rect(x + rank * half, y, half, SQUARE, RANKS[rank])
    else:
        picture.rect(x, y, SQUARE, SQUARE, RANKS[rank] if kind == "whole" else PALE[rank])
    picture.rect(x, y, SQUARE, SQUARE, "none", LINE)


def tensor() -> Picture:
    """Half a block, and what stands before and after the blocks, on two ranks."""
    flows = {
        "Attention; the feed-forward is the same with w1 and w3, then w2": [
            *("tokens", ("all-gather", "")),
            *("whole", ("wq wk wv", "columns")),
            *("features", ("attention", "own heads")),
            *("features", ("wo", "rows")),
            *("sums", ("reduce-scatter", "")),
            "tokens",
        ],
        "Embedding, and the logits with their loss": [
            *("ids", ("table", "own rows")),
            *("sums", ("reduce-scatter", "")),
            *("tokens", ("all-gather", "")),
            *("whole", ("output", "columns")),
            *("features", ("all-reduce", "3 numbers per token")),
            "loss",
        ],
    }
    title = "Tensor parallelism: every rank has a part of each matrix"
    about = "What two ranks have of the activations between the matrices, in the forward."
    picture = Picture(title, about, 976, 408)
    for row, (heading, flow) in enumerate(flows.items()):
        top = 16 + row * 186
        picture.text(16, top + 14, heading, bold=True)
        for rank in range(2):
            y = top + 40 + rank * (SQUARE + 18)
            picture.text(16, y + 30, f"rank {rank}")
            for index, what in enumerate(flow):
                x = 80 + index // 2 * ACROSS
                if isinstance(what, tuple):
                    x += SQUARE + 4
                    middle = x + (ACROSS - SQUARE) / 2 - 4
                    picture.arrow(x, y + SQUARE / 2, x + ACROSS - SQUARE - 8, y + SQUARE / 2)
                    is_sent = what[0].startswith(("all-", "reduce-"))
                    picture.text(middle, y + 20, what[0], "middle", bold=is_sent)
                    picture.text(middle, y + 43, what[1], "middle", MUTED, 11)
                elif what in ("ids", "loss"):
                    picture.text(x + SQUARE / 2, y + 30, what, "middle")
                else:
                    activation(picture, x, y, rank, what)
    words = "Squares: tokens downwards, features to the right; pale: partial sums. In the backward "
    picture.text(16, 394, words + "all-gather and reduce-scatter change places.")
    return picture


def pipeline(pp: int = 4, microbatches: int = 8) -> Picture:
    """Every schedule as it runs, to one scale: a model takes the same time in all of them."""
    unit, row, left = 18, 16, 66
    title = "Pipeline parallelism: seven schedules"
    about = f"What each of {pp} ranks does over time with {microbatches} microbatches."
    picture = Picture(title, about, 680, 54 + len(schedules.SCHEDULES) * (pp * row + 40))
    words = {"F": "forward", "B": "backward, or its half for the inputs", "W": "for the weights"}
    for x, (kind, meaning) in zip((left, left + 110, left + 380), words.items(), strict=True):
        picture.rect(x, 14, 14, 12, KINDS[kind])
        picture.rect(x + 14, 14, 14, 12, SECOND[kind])
        picture.text(x + 34, 24, meaning)
    picture.text(
        left, 42, "Darker: the second stage of a rank. Numbers: microbatches.", color=MUTED
    )
    for number, (name, schedule) in enumerate(schedules.SCHEDULES.items()):
        stages = pp if schedule.stages == "one" else 2 * pp
        slots = schedules.timeline(schedules.order(name, stages, pp, microbatches))
        top, scale = 54 + number * (pp * row + 40), unit * pp / stages
        picture.text(left, top + 14, name, bold=True)
        picture.text(
            left + 180, top + 14, f"idle {100 * schedules.bubble(slots):.0f} % of the time"
        )
        for rank in range(pp):
            picture.text(16, top + 32 + rank * row, f"rank {rank}", size=11)
        boxes: dict[str, list[Box]] = defaultdict(list)
        numbers = []
        for slot in slots:
            x, y = left + slot.start * scale, top + 20 + slot.rank * row
            width = (slot.end - slot.start) * scale
            fill = (KINDS if slot.action.stage < pp else SECOND)[slot.action.kind]
            boxes[fill].append((x, y, width - 1, row - 2))
            numbers.append((x + width / 2, y + 10, slot.action.microbatch))
        for fill, found in boxes.items():
            picture.boxes(found, fill)
        picture.numbers(numbers)
    return picture


def context(size: int = 4) -> Picture:
    """Who computes which scores, with both ways to cut; and the ring, step by step."""
    title = "Context parallelism: every rank has a part of the sequence"
    about = "Scores of queries and keys by the rank that computes them, and the ring's steps."
    picture = Picture(title, about, 760, 560)
    for column, balancing in enumerate(("headtail", "none")):
        left, top, side = 40 + column * 290, 56, 216
        picture.text(left, 24, f'load balancer "{balancing}"', bold=True)
        picture.text(left + side / 2, 46, "keys", "middle", MUTED)
        scores(picture, Cut(size, balancing), left, top, side)
    for rank in range(size):
        picture.rect(600, 56 + rank * 24, 14, 14, RANKS[rank])
        picture.text(622, 68 + rank * 24, f"queries of rank {rank}")
    ring(picture, Cut(size, "headtail"), 40, 346)
    return picture


def scores(picture: Picture, cut: Cut, left: float, top: float, side: float) -> None:
    """The square of all scores, from the tiles of all pairs of ranks."""
    each = 2
    length = each * cut.chunks // cut.size
    unit = side / (length * cut.size)
    pieces = [
        (rank,) if cut.chunks == cut.size else (rank, cut.chunks - 1 - rank)
        for rank in range(cut.size)
    ]
    where = [[piece * each + i for piece in mine for i in range(each)] for mine in pieces]
    picture.rect(left, top, side, side, EMPTY)
    counts = []
    for rank in range(cut.size):
        tiles = ((owner, cut.tile(rank, owner, length)) for owner in range(cut.size))
        boxes = [
            (left + key * unit, top + row * unit, unit, unit)
            for owner, tile in tiles
            for row in where[rank][tile.queries if tile else slice(0)]
            for key in where[owner][tile.keys if tile else slice(0)]
            if key <= row
        ]
        picture.boxes(boxes, RANKS[rank])
        counts.append(len(boxes))
    picture.rect(left, top, side, side, "none", LINE)
    shares = ", ".join(f"{100 * count / sum(counts):.0f} %" for count in counts)
    picture.text(left, top + side + 20, f"share of the work: {shares}")


def ring(picture: Picture, cut: Cut, left: float, top: float) -> None:
    """Whose keys and values each rank has in each step, and what of the scores it computes."""
    side, across, down = 34, 150, 44
    picture.text(left, top, "The ring, step by step", bold=True)
    words = "Colour: whose keys a rank has. Shape: the scores of its queries that it computes."
    picture.text(left + 160, top, words, color=MUTED)
    for rank in range(cut.size):
        y = top + 30 + rank * down
        picture.text(left, y + 22, f"rank {rank}")
        for step in range(cut.size):
            owner, x = (rank - step) % cut.size, left + 80 + step * across
            if not rank:
                picture.text(x + side / 2, top + 22, f"step {step}", "middle", MUTED)
            picture.rect(x, y, side, side, EMPTY)
            tile = cut.tile(rank, owner, side)
            assert tile is not None, "under headtail every rank sees something of every other"
            width, height = (part.stop - part.start for part in (tile.keys, tile.queries))
            x_tile, y_tile = x + tile.keys.start, y + tile.queries.start
            if tile.causal:
                path = f'd="M{x:g} {y:g}V{y + side:g}H{x + side:g}z"'
                picture.parts.append(f'<path {path} fill="{RANKS[owner]}"/>')
            else:
                picture.rect(x_tile, y_tile, width, height, RANKS[owner])
            picture.rect(x, y, side, side, "none", LINE)
            picture.text(x + side + 6, y + 21, f"of rank {owner}", color=MUTED, size=11)


PICTURES = {
    "parallel_ddp": ddp,
    "parallel_fsdp": fsdp,
    "parallel_hsdp": hsdp,
    "parallel_tensor": tensor,
    "parallel_pipeline": pipeline,
    "parallel_context": context,
}


def main(folder: Path) -> None:
    """Draw all pictures into `folder`."""
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else FOLDER)
