"""Formulas of what fixed techniques send in an optimizer step, as functions of numbers.

Those of parameters are in `torchtitan.parallel.work`, for the ways to shard.
"""

from collections.abc import Iterator, Sequence

from torchtitan.parallel.work import Traffic

FP32 = 4
"""Bytes."""


def of_stream(
    hidden: int, *, gathers: int, sums: int, more_gathers: int, more_sums: int, split: bool
) -> Iterator[Traffic]:
    """Tensor parallelism: the activations between the matrices (arXiv:1909.08053).

    What the forward gathers the backward sums, and the other way round.

    Args:
        hidden: bytes of the hidden states of a microbatch, (b, s, D).
        gathers, sums: in the forwards of a step. A block has two of each; with tables split on the
            vocabulary the embedding has one sum and the output one gather.
        more_gathers, more_sums: in what of the forwards is recomputed.
        split: with sequence parallelism (arXiv:2205.05198). Without, nothing is gathered.
    """
    if split:
        yield Traffic("tp", "activations", "all_gather", hidden, gathers + sums + more_gathers)
        yield Traffic("tp", "activations", "reduce_scatter", hidden, sums + gathers + more_sums)
    else:
        yield Traffic("tp", "activations", "all_reduce", hidden, sums + gathers + more_sums)


def of_norms(size: int, *, sums: int) -> Iterator[Traffic]:
    """Tensor parallelism: with sequence parallelism each rank has a norm's gradient of its tokens.

    Args:
        size: bytes of the gradient, D elements.
        sums: in a step: one for each norm, or one for each norm and microbatch if FSDP takes them.
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
    """Tensor parallelism: what a split loss adds up over ranks, or, without loss parallelism, all
    outputs of a position.

    Args:
        positions: of a microbatch.
        outputs: logits, say, of each.
        summed: how many float32 numbers each sum over ranks has (`Task.split_sums`).
        times: microbatches in a step.
        shared: with loss parallelism.
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
    """Context parallelism: keys and values come, and their gradients go back in fp32.

    Args:
        elements: of one rank's keys and values in a layer, (2, b, K, s, E).
        fetches: in a step: a layer's forward and backward, and its forward recomputed.
        returns: in a step: a layer's backward.
        ring: from one rank to the next (arXiv:2310.01889), instead of all at once
            (arXiv:2407.21783, section 3.3.2).
    """
    here, back = elements * compute, elements * FP32
    if ring:
        hops = ranks - 1
        yield Traffic("cp", "keys and values", "send", here, hops * fetches)
        yield Traffic("cp", "their gradients", "send", back, hops * returns)
    else:
        yield Traffic("cp", "keys and values", "all_gather", ranks * here, fetches)
        yield Traffic("cp", "their gradients", "reduce_scatter", ranks * back, returns)


def of_keys(size: int, *, ranks: int, fetches: int, ring: bool) -> Iterator[Traffic]:
    """Context parallelism: keys come once more, for the largest logits of attention.

    Args:
        size: bytes of one rank's keys in a layer.
        fetches: in a step: a layer's forward, and its forward recomputed.
        ring: from one rank to the next, instead of all at once.
    """
    if ring:
        yield Traffic("cp", "keys", "send", size, (ranks - 1) * fetches)
    else:
        yield Traffic("cp", "keys", "all_gather", ranks * size, fetches)


def of_stages(hidden: int, *, onwards: int, back: int) -> Iterator[Traffic]:
    """Pipeline parallelism: hidden states onwards, their gradients back (arXiv:1811.06965).

    Args:
        hidden: bytes of a microbatch's hidden states, or of this rank's part of their sequence.
        onwards, back: messages in a step: one for each microbatch and each border between a stage
            of this rank and one of another.
    """
    yield Traffic("pp", "hidden states", "send", hidden, onwards)
    yield Traffic("pp", "their gradients", "send", hidden, back)
