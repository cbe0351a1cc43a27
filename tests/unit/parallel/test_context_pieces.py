"""Pieces of sequences, their owners, and the segments of each pair of ranks."""

import itertools
import random

import pytest
import torch

from tests.dense import document_mask
from torchtitan.parallel import context_pieces
from torchtitan.parallel.context import shard
from torchtitan.parallel.context_pieces import Cut, segments, work
from torchtitan.tasks.next_token import TokenBatch

LENGTH = 72
BALANCINGS = ("headtail", "documents", "none")


def documents(sizes):
    return torch.stack([torch.arange(len(s)).repeat_interleave(torch.tensor(s)) for s in sizes])


def drawn(length, sizes, rows, seed=0):
    """Documents of sizes that are drawn, cut at the end of a row."""
    draw, found = random.Random(seed), []
    for _ in range(rows):
        row = list[int]()
        while sum(row) < length:
            row.append(min(draw.randint(*sizes), length - sum(row)))
        found.append(row)
    return documents(found)


def seen(rows, rank, owner, window):
    """How often each query of a rank is paired with each key of another: (B, S, S)."""
    length = len(rows[0].positions(rank))
    pairs = torch.zeros(len(rows), length, length, dtype=torch.int64)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    for group in segments(rows, rank, owner, window):
        queries = torch.zeros(len(rows), length, dtype=torch.int64)
        for row, of_queries, of_keys, shift, limit in group:
            distance = i + shift - j
            inside = (i >= of_queries[0]) & (i < of_queries[1])
            inside = inside & (j >= of_keys[0]) & (j < of_keys[1]) & (distance >= 0)
            pairs[row] += inside & (distance < limit) if limit else inside
            queries[row, slice(*of_queries)] += 1
        assert queries.max() == 1, "a query in two segments of a group"
    return pairs


@pytest.mark.parametrize("balancing", BALANCINGS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_segments_are_the_mask(size, balancing, monkeypatch):
    """Together they hold each visible pair once, and no other."""
    monkeypatch.setattr(context_pieces, "MIN_PIECE", 3)
    context_pieces._row.cache_clear()
    together = torch.cat([drawn(LENGTH, (1, 20), 3), documents([[LENGTH], [70, 2], [1, 71]])])
    for window in (0, 1, 5, 17, 40, LENGTH):
        rows = Cut(size, balancing).rows(together, window)
        mask = document_mask(together, window).long()
        for rank, owner in itertools.product(range(size), repeat=2):
            at, other = (torch.stack([r.positions(x) for r in rows]) for x in (rank, owner))
            number = torch.arange(len(rows))[:, None, None]
            expected = mask[number, at[:, :, None], other[:, None]]
            assert torch.equal(seen(rows, rank, owner, window), expected)
    context_pieces._row.cache_clear()


def test_a_query_is_in_few_groups():
    """So kernels are called once or twice for the keys of a rank, however many its pieces."""
    rows = Cut(4, "documents").rows(drawn(32_768, (500, 8000), 2), 0)
    assert len(rows[0].owned[0]) == 8
    for rank, owner in itertools.product(range(4), repeat=2):
        assert len(segments(rows, rank, owner, 0)) <= 1
        assert len(segments(rows, rank, owner, 4096)) <= 2 + 2 * (rank == owner)


def largest_load(together, size, balancing, window):
    """The work of the rank with the most, relative to the mean; the mean over rows."""
    found = []
    for row in Cut(size, balancing).rows(together, window):
        keys = work(row.starts, window).double()
        load = torch.stack([keys[row.positions(rank)].sum() for rank in range(size)])
        found.append((load.max() / load.mean()).item())
    return sum(found) / len(found)


@pytest.mark.parametrize(("size", "window"), [(2, 0), (8, 0), (8, 2048)])
def test_documents_give_each_rank_as_much_work(size, window):
    together = drawn(32_768, (500, 8000), 32)
    load = {balancing: largest_load(together, size, balancing, window) for balancing in BALANCINGS}
    assert load["documents"] < 1.01
    assert min(load["headtail"], load["none"]) > 1 + 10 * (load["documents"] - 1)


def test_work_is_the_number_of_visible_keys():
    together = documents([[3, 4, 1]])
    for window in (0, 2):
        (row,) = Cut(2, "documents").rows(together, window)
        visible = document_mask(together, window)[0].sum(1)
        assert work(row.starts, window).tolist() == visible.tolist()


def test_parts_go_with_the_documents_of_each_row():
    """Each position is on one rank once, as many on each, and all fields of a batch agree."""
    together = documents([[40, 8], [8, 40]])
    positions = torch.arange(48).repeat(2, 1)
    ahead = torch.stack([positions + 1, positions + 2], dim=-1)
    batch = TokenBatch(positions + 100, positions + 101, positions, together, ahead, ahead)
    parts = [shard(batch, rank, 2, "documents") for rank in range(2)]
    for part in parts:
        assert part.tokens.shape == (2, 24)
        assert torch.equal(part.tokens, part.positions + 100)
        assert torch.equal(part.targets, part.positions + 101)
        assert torch.equal(part.ahead_tokens[..., 1], part.positions + 2)
        assert torch.equal(part.documents, together)
        assert torch.equal(part.positions, part.positions.sort(dim=1).values)
        assert not torch.equal(part.positions[0], part.positions[1])
    found = torch.cat([part.positions for part in parts], dim=1)
    assert torch.equal(found.sort(dim=1).values, positions)
    with pytest.raises(AssertionError, match="48 not in 10 pieces"):
        shard(batch, 0, 5, "documents")
