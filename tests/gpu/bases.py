"""Time in which GaLore finds the basis of a gradient, next to functions of torch."""

from typing import NamedTuple

import torch

from torchtitan.optim.parameters import NamedParameter
from torchtitan.research.galore.low_rank import Method, Projection, find_bases

ITERATIONS, OVERSAMPLING = 2, 8


class Refresh(NamedTuple):
    seconds: list[float]
    energy: float
    """Part of the squares of the gradient that its projection has."""


def decaying(rows, columns, device):
    """Return a gradient (rows, columns), float32: noise, and directions that decay slowly."""
    torch.manual_seed(0)
    least = min(rows, columns)
    left, right = torch.randn(rows, least), torch.randn(least, columns)
    scales = torch.arange(1, least + 1) ** -0.7
    return ((left * scales) @ right).to(device)


def methods(rank):
    """Return functions from a gradient (rows, columns) to a basis (columns, rank)."""
    columns = rank + OVERSAMPLING

    def ours(method):
        def find(gradient):
            parameter = torch.nn.Parameter(torch.empty_like(gradient))
            parameter.grad = gradient
            named = NamedParameter(parameter, "weight", "matrix")
            (basis,) = find_bases([Projection(named, rank, 1)], ["0"], method)
            return basis

        return find

    def randomized(dtype):
        return Method(False, ITERATIONS, OVERSAMPLING, dtype)

    def theirs(gradient):
        return torch.svd_lowrank(gradient, q=columns, niter=ITERATIONS)[2][:, :rank]

    return {
        "randomized, float32": ours(randomized(torch.float32)),
        "torch.svd_lowrank, float32": theirs,
        "randomized, float64": ours(randomized(torch.float64)),
        "torch.svd_lowrank, float64": lambda x: theirs(x.double()).to(x.dtype),
        "exact, float64": ours(Method(exact=True)),
        "torch.linalg.svd, float32": lambda x: torch.linalg.svd(x, full_matrices=False)[2][:rank].T,
    }


def refresh_times(rows, columns, rank, device, rounds):
    gradient = decaying(rows, columns, device.torch_device)
    found = {}
    for number in range(rounds + 1):
        for name, find in methods(rank).items():
            begin = device.stamp()
            basis = find(gradient)
            seconds = device.seconds(begin, device.stamp())
            if number == 0:  # warms up
                energy = (gradient @ basis).square().sum() / gradient.square().sum()
                found[name] = Refresh([], energy.item())
            else:
                found[name].seconds.append(seconds)
    return found
