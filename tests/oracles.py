"""Other people's code for Llama, to compare ours with: transformers' and Meta's own."""

import importlib
import sys
import types
from contextlib import contextmanager

import pytest
from torch import nn


@contextmanager
def code_of_meta():
    """Meta's `llama_models.llama3.model`.

    It needs fairscale only for layers that are, on one rank, a plain linear and a plain embedding;
    those stand in for it here.
    """

    class Plain(nn.Linear):
        def __init__(self, inputs, outputs, bias=True, **_):
            super().__init__(inputs, outputs, bias=bias)

    class PlainEmbedding(nn.Embedding):
        def __init__(self, rows, dim, **_):
            super().__init__(rows, dim)

    contents = {
        **{key: {} for key in ("fairscale", "fairscale.nn", "fairscale.nn.model_parallel")},
        "fairscale.nn.model_parallel.initialize": {"get_model_parallel_world_size": lambda: 1},
        "fairscale.nn.model_parallel.layers": {
            "ColumnParallelLinear": Plain,
            "RowParallelLinear": Plain,
            "VocabParallelEmbedding": PlainEmbedding,
        },
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, attributes in contents.items():
            module = types.ModuleType(name)
            vars(module).update(attributes)
            patch.setitem(sys.modules, name, module)
        yield importlib.import_module("llama_models.llama3.model")
