"""A compiled run is the same run as an eager one on one rank, in as few graphs as there can be."""

import logging
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import layouts, tiny
from tests.layouts import Case, case
from tests.ranks import run_ranks
from tests.runs import Trace, trace
from torchtitan.job import JobConfig
from torchtitan.logging import logger
from torchtitan.parallel import CompileConfig, compile

# Of the compiler's own doings; a user does not see them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
]


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def reported(config: CompileConfig, blocks: int) -> list[str]:
    handler = Lines()
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    compile.report(config, blocks, has_loss=True)
    return handler.lines


def forget() -> None:
    """Nothing was compiled yet; the process that this one was forked from may have."""
    from torch._dynamo.utils import clear_compilation_metrics, counters

    torch.compiler.reset()
    clear_compilation_metrics()
    counters.clear()


BLOCKS = tiny.FLAVORS["deep"].n_layers


def recipe(layout: Case, **settings: Any) -> JobConfig:
    model, training = {"flavor": "deep"}, {"steps": 2}
    return layouts.job(layout, "SGD", model=model, training=training, compile=settings)


def compiled(job: JobConfig) -> tuple[Trace, list[str]]:
    forget()
    return trace(job, uneven=True), reported(job.compile, BLOCKS)


@cache
def reference() -> Trace:
    return run_ranks(trace, 1, recipe(layouts.ONE), True)[0]


def compare(found: Trace, expected: Trace) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    for name, part in found.weights[-1].items():
        whole = part.of(expected.weights[-1][name])
        torch.testing.assert_close(part.local, whole, rtol=0, atol=1e-5, msg=name)


BUDGET = {"mode": "memory_budget", "memory_budget": 0.3}
FULL, SECOND, OPERATORS = layouts.FULL, layouts.SECOND, layouts.OPERATORS
NO_SEQUENCE, NO_LOSS = layouts.NO_SEQUENCE, layouts.NO_LOSS

# A layout, and how many graphs it takes.
CASES: dict[str, tuple[Case, int]] = {
    "FSDP 2, every second block recomputed": (case(shard=2, recompute=SECOND), 3),
    "TP 2, operators recomputed": (case(tp=2, recompute=OPERATORS), 2),
    "TP 2, neither sequence nor loss, within a budget": (
        case(tp=2, recompute=BUDGET, **NO_SEQUENCE, **NO_LOSS),
        2,
    ),
    "FSDP 2 x TP 2": (case(shard=2, tp=2), 2),
    "CP 2, full recomputation": (case(cp=2, recompute=FULL), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_same_run(name: str) -> None:
    layout, graphs = CASES[name]
    job = recipe(layout, enable=True, backend="aot_eager")
    for found, lines in run_ranks(compiled, layout.ranks, job):
        compare(found, reference())
        assert lines == [
            f"compile: {graphs} graphs of {BLOCKS} blocks and the loss, 0 graph breaks, "
            "0 recompilations"
        ]


def test_stages_share_no_loss() -> None:
    job = recipe(case(2), enable=True, backend="aot_eager")
    graphs = []
    for found, (line,) in run_ranks(compiled, 2, job):
        compare(found, reference())
        graphs.append(line.removeprefix("compile: ").partition(" of ")[0])
    assert graphs == ["1 graph", "2 graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [{}, OPERATORS])
def test_inductor_is_the_same_run(recompute: dict[str, Any]) -> None:
    job = recipe(case(shard=2, tp=2, recompute=recompute), enable=True)
    for found, (line,) in run_ranks(compiled, 4, job):
        compare(found, reference())
        assert line.startswith(f"compile: 2 graphs of {BLOCKS} blocks and the loss, 0 graph breaks")


class Broken(nn.Module):
    """A block that no graph can hold as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()


def break_and_report(fullgraph: bool) -> list[str]:
    forget()
    config = CompileConfig(enable=True, backend="eager", fullgraph=fullgraph)
    block = Broken()
    compile.apply([block], config)
    block(torch.ones(2))
    block(torch.ones(2, dtype=torch.float64))  # the graphs were for another dtype
    return reported(config, 1)


def test_breaks_and_recompilations_are_counted_and_shown() -> None:
    ((first, *others),) = run_ranks(break_and_report, 1, False)
    assert first == ("compile: 4 graphs of 1 block and the loss, 2 graph breaks, 2 recompilations")
    breaks, *again = others
    assert breaks.startswith("compile: graph break, 2 times: ")
    assert "graph_break()" in breaks
    assert len(again) == 2
    for line in again:
        assert line.startswith("compile: recompiled, since a guard failed: ")
        assert "dtype mismatch" in line


def test_a_break_is_refused_unless_it_is_allowed() -> None:
    with pytest.raises(AssertionError, match=r"torch\._dynamo\.exc\.Unsupported"):
        run_ranks(break_and_report, 1, True)


def lines_of(configs: list[CompileConfig]) -> list[list[str]]:
    forget()
    return [reported(config, 3) for config in configs]


def test_the_line_names_what_was_to_be_compiled() -> None:
    named = {
        "3 blocks and the loss": CompileConfig(enable=True),
        "3 blocks": CompileConfig(enable=True, components=("model",)),
        "the loss": CompileConfig(enable=True, components=("loss",)),
    }
    (lines,) = run_ranks(lines_of, 1, [*named.values(), CompileConfig()])
    expected = [
        [f"compile: 0 graphs of {words}, 0 graph breaks, 0 recompilations"] for words in named
    ]
    assert lines == [*expected, []]
