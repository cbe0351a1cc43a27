"""A device as it is before a case, and the times of what is computed on it in turns."""

import gc
import statistics

import torch


def fresh(device):
    """Free what the case before has left, and forget what it compiled."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.empty_cache()
    device.reset_memory_peak()


def timed(act, device):
    """Seconds, the median of 20."""
    return statistics.median(in_turns({"": act}, device, 20)[0][""])


def in_turns(ways, device, rounds, given=()):
    """Call the functions in turns, in three rounds to warm up and in those that are timed.

    Returns:
        Seconds of each by round; and of its first call, what it returned and the GiB.
    """
    taken, first = {name: [] for name in ways}, {}
    for number in range(3 + rounds):
        for name in [*ways][:: 1 if number % 2 else -1]:
            if number == 0:
                torch.cuda.empty_cache()
                device.reset_memory_peak()
            begin = device.stamp()
            found = ways[name]()
            seconds = device.seconds(begin, device.stamp())
            for tensor in given:
                tensor.grad = None
            if number == 0:
                first[name] = found, device.memory_peak()
            if number >= 3:
                taken[name].append(seconds)
    return taken, first


def relative(taken, to):
    """Quartiles of milliseconds, and of what they are relative to one way in the same round."""
    return {
        name: {
            "ms": [1000 * s for s in statistics.quantiles(seconds, n=4)],
            "ratio": statistics.quantiles(
                (one / all for one, all in zip(seconds, taken[to], strict=True)), n=4
            ),
        }
        for name, seconds in taken.items()
    }
