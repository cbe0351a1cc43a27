"""Formulas of the traffic of fixed techniques in an optimizer step, as functions of numbers.

The formulas of parameters are in `torchtitan.parallel.work`, for use by the shardings.
"""

from collections.abc import Iterator, Sequence

from torchtitan.comm.unit import Operation
from torchtitan.parallel.work import Traffic

FP32 = 4
"""Bytes of a float32."""


def of_stream(
    hidden: int, *, gathers: int, sums: int, more_gathers: int, more_sums: int, split: bool
) -> Iterator[Traffic]:
    """Yield the activations of tensor parallelism between the matrices (arXiv:1909.08053).

    A gather in the forward is a sum in the backward, and vice versa.

    Args:
        hidden: bytes of the hidden states of a microbatch, (b, s, D).
        gathers, sums: number in the forwards of a step. A block has two of each; with tables split
            on the vocabulary the embedding has one sum and the output one gather.
        more_gathers, more_sums: number in recomputed forwards.
        split: whether sequence parallelism is on (arXiv:2205.05198). Without, nothing is gathered.
    """
    if split:
        yield Traffic("tp", "activations", "all_gather", hidden, gathers + sums + more_gathers)
        yield Traffic("tp", "activations", "reduce_scatter", hidden, sums + gathers + more_sums)
    else:
        yield Traffic("tp", "activations", "all_reduce", hidden, sums + gathers + more_sums)


def of_router(rows: int, *, times: int, more: int, split: bool) -> Iterator[Traffic]:
    """Yield the choices of a router, which each tensor rank makes for its part of the sequence.

    Args:
        rows: chosen experts of a microbatch: b s k. Each is an int64, with a score in float32.
        times, more: number of forwards in a step, and of recomputed ones.
        split: whether sequence parallelism is on; without, only gradients of scores are summed.
    """
    if split:
        yield Traffic("tp", "activations", "all_gather", 4 * rows, times + more)
        yield Traffic("tp", "activations", "all_gather", 8 * rows, times + more)
    operation: Operation = "reduce_scatter" if split else "all_reduce"
    yield Traffic("tp", "activations", operation, 4 * rows, times)


def of_exchange(rows: int, row: int, experts: int, *, times: int, again: int) -> Iterator[Traffic]:
    """Yield the exchange of tokens between ranks with different experts (arXiv:2006.16668).

    Each sends what it receives if experts are chosen equally often; else it differs by rank, and
    only the sum over ranks is this.

    Args:
        rows: chosen experts of a microbatch, b s k, each with a row of `row` bytes.
        experts: number of experts; each rank tells the others how many rows it has for them.
        times, again: number of forwards in a step, each with a backward, and of recomputed ones,
            which remember the numbers of rows.
    """
    yield Traffic("ep", "numbers of rows", "all_to_all", 8 * experts, times)
    yield Traffic("ep", "rows", "all_to_all", rows * row, 4 * times + 2 * again)


def of_norms(size: int, *, sums: int) -> Iterator[Traffic]:
    """Yield the sums of norm gradients, of which each tensor rank has that of its tokens or heads.

    Args:
        size: bytes of the gradient, D elements.
        sums: number in a step: one per norm, or one per norm and microbatch if FSDP takes them.
    """
    yield Traffic("tp", "norms", "all_reduce", size, sums)


def of_loss(
    positions: int,
    outputs: int,
    *,
    summed: Sequence[int],
    ranks: int,
    compute: int,
    times: int,
    shared: bool,
) -> Iterator[Traffic]:
    """Yield the sums of a split loss over tensor ranks, or, without loss parallelism, the gather of
    all outputs.

    Args:
        positions: positions in a microbatch.
        outputs: outputs of each position, such as logits.
        summed: number of float32 elements in each sum over ranks (`Task.split_sums`).
        times: microbatches in a step.
        shared: whether loss parallelism is on.
    """
    if shared:
        for numbers in summed:
            yield Traffic("tp", "loss", "all_reduce", numbers * FP32, times)
    else:
        logits = positions * -(-outputs // ranks) * ranks * compute
        yield Traffic("tp", "logits", "all_gather", logits, times)


def of_keys_and_values(
    elements: int, *, ranks: int, compute: int, fetches: int, returns: int, ring: bool
) -> Iterator[Traffic]:
    """Yield context parallelism's exchange of keys and values, and of their gradients in fp32.

    Args:
        elements: number of elements of one rank's keys and values in a layer, (2, b, K, s, E).
        fetches: number in a step: for a layer's forward, backward and recomputed forward.
        returns: number in a step: for a layer's backward.
        ring: whether they are sent from one rank to the next (arXiv:2310.01889), instead of all at
            once (arXiv:2407.21783, section 3.3.2).
    """
    here, back = elements * compute, elements * FP32
    if ring:
        hops = ranks - 1
        yield Traffic("cp", "keys and values", "send", here, hops * fetches)
        yield Traffic("cp", "their gradients", "send", back, hops * returns)
    else:
        yield Traffic("cp", "keys and values", "all_gather", ranks * here, fetches)
        yield Traffic("cp", "their gradients", "reduce_scatter", ranks * back, returns)


def of_heads(
    head: int, *, ranks: int, heads: int, kv_heads: int, forwards: int, backwards: int
) -> Iterator[Traffic]:
    """Yield the exchange of parts of sequences for heads (arXiv:2309.14509), and of gradients.

    Args:
        head: bytes of a head of one rank's positions, (b, s, E).
        heads: number of query heads; the output has as many.
        kv_heads: number of key/value heads, which are repeated if they are fewer than the ranks.
        forwards, backwards: number in a step; recomputed forwards count.
    """
    inputs, times = heads + 2 * max(kv_heads, ranks), forwards + backwards
    yield Traffic("cp", "queries, keys and values", "all_to_all", inputs * head, times)
    yield Traffic("cp", "outputs of attention", "all_to_all", heads * head, times)


def of_stages(hidden: int, *, onwards: int, back: int) -> Iterator[Traffic]:
    """Yield a pipeline's hidden states forward and their gradients back (arXiv:1811.06965).

    Args:
        hidden: bytes of a microbatch's hidden states, or of this rank's part of their sequence.
        onwards, back: messages in a step: one for each microbatch and each border between a stage
            of this rank and one of another.
    """
    yield Traffic("pp", "hidden states", "send", hidden, onwards)
    yield Traffic("pp", "their gradients", "send", hidden, back)
