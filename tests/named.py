"""Parameters as an optimizer sees them, of networks that have no spec."""

from torch import nn

from torchtitan.optim import name_parameters


def named(network):
    """Tables are embeddings, other matrices are matrices, and the rest are norms."""
    tables = {name for name, module in network.named_modules() if isinstance(module, nn.Embedding)}

    def role(name, ndim):
        if name.rpartition(".")[0] in tables:
            return "embedding"
        return "matrix" if ndim > 1 else "norm"

    return name_parameters([network], role)
