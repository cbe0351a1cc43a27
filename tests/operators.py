"""Counts the operators that torch runs."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """As a context, counts what is computed within it, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.counts[str(function)] += 1
        return function(*arguments, **(named or {}))
