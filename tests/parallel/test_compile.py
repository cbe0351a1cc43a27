"""A compiled run is the same run as an eager one on one rank, in as few graphs as there can be."""

import itertools
from functools import cache, partial

import pytest
import torch
from torch import nn

from tests import layouts, tiny
from tests.layouts import case
from tests.ranks import run_ranks
from tests.runs import listening, trace, train
from tests.tiers import tiers
from torchtitan.logging import logger
from torchtitan.parallel import CompileConfig, compile
from torchtitan.torch_private.compiler import compiler_counts, keeps_nodes_of_functions


@pytest.fixture(autouse=True, scope="module")
def compiler():
    """Imported once for all ranks, which are forked."""
    import torch._functorch.aot_autograd
    import torch._inductor.compile_fx  # noqa: F401


def logged(act):
    logger.handlers, logger.propagate = [], False
    said = listening()
    act()
    return said


def reported(config, blocks):
    return logged(partial(compile.report, config, blocks, has_loss=True))


def forget():
    """Nothing was compiled yet; the process that this one was forked from may have."""
    from torch._dynamo.utils import clear_compilation_metrics, counters

    torch.compiler.reset()
    clear_compilation_metrics()
    counters.clear()


BLOCKS = tiny.FLAVORS["deep"].n_layers


def line_of(graphs, rest="", again="0 recompilations"):
    """What is said of a run whose model and loss are so many graphs."""
    what = f"{graphs} graphs of {BLOCKS} blocks and the loss{rest}"
    return f"compile: {what}, 0 graph breaks, {again}"


def recipe(layout, **settings):
    model, training = {"flavor": "deep"}, {"steps": 2}
    return layouts.job(layout, "SGD", model=model, training=training, compile=settings)


def compiled(job):
    forget()
    return trace(job, uneven=True), reported(job.compile, BLOCKS)


@cache
def reference(**model):
    return run_ranks(trace, 1, recipe(layouts.ONE.of(**model)), True)[0]


def compare(found, expected):
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    for name, part in found.weights[-1].items():
        whole = part.of(expected.weights[-1][name])
        torch.testing.assert_close(part.local, whole, rtol=0, atol=1e-5, msg=name)


BUDGET = {"mode": "memory_budget", "memory_budget": 0.3}
FULL, SECOND, OPERATORS = layouts.FULL, layouts.SECOND, layouts.OPERATORS
NO_SEQUENCE, NO_LOSS = layouts.NO_SEQUENCE, layouts.NO_LOSS

# A layout, and how many graphs it takes.
CASES = {
    "FSDP 2, every second block recomputed": (case(shard=2, recompute=SECOND), 3),
    "TP 2, operators recomputed": (case(tp=2, recompute=OPERATORS), 2),
    "TP 2, neither sequence nor loss, within a budget": (
        case(tp=2, recompute=BUDGET, **NO_SEQUENCE, **NO_LOSS),
        2,
    ),
    "FSDP 2 x TP 2": (case(shard=2, tp=2), 2),
    "CP 2, full recomputation": (case(cp=2, recompute=FULL), 2),
    # Of the loss two: what is done with a chunk of logits, forward and backward.
    "TP 2, loss in chunks": (case(tp=2, chunk=60), 3),
}


@pytest.mark.gate
@pytest.mark.parametrize("recompute", [{}, OPERATORS], ids=["", "operators recomputed"])
def test_muon_is_compiled_with_the_rest(recompute):
    muon_is_compiled_with_the_rest(recompute)


def muon_is_compiled_with_the_rest(recompute, **more):
    optimizer = {"name": "Muon", "lr": 1e-3, "ns_dtype": "float32", "adamw": {"eps": 1e-6}}

    def made(layout, **settings):
        sections = {"training": {"steps": 2}, "compile": settings}
        deep = {"flavor": "deep"}
        return tiny.job(**layout.recipe(model=deep, optimizer=optimizer | more, **sections))

    (expected,) = run_ranks(trace, 1, made(layouts.ONE), True)
    layout = case(shard=2, recompute=recompute)
    for found, (line, *warned) in run_ranks(
        compiled, 2, made(layout, enable=True, backend="aot_eager")
    ):
        compare(found, expected)
        assert line == line_of(6, " and the update")
        assert not warned


@pytest.mark.parametrize(
    "name", tiers(CASES, ["FSDP 2, every second block recomputed"], ["FSDP 2 x TP 2"])
)
def test_it_is_the_same_run(name):
    is_the_same_run(*CASES[name])


def is_the_same_run(layout, graphs, has_two_kinds=False):
    """If blocks are of two kinds, the second is compiled after a look at the graph of the first."""
    job = recipe(layout, enable=True, backend="aot_eager")
    for found, lines in run_ranks(compiled, layout.ranks, job):
        compare(found, reference(**layout.model))
        line, *reasons = lines
        assert line == line_of(
            graphs, again="1 recompilation" if has_two_kinds else "0 recompilations"
        )
        assert len(reasons) == has_two_kinds


MASKS = {
    "documents": {"attn_mask_type": "block_causal"},
    "a window": {"sliding_window": 7},
    "documents, a window": {"attn_mask_type": "block_causal", "sliding_window": 7},
}


RECOMPUTATIONS = {"none": {}, "full": FULL, "operators": OPERATORS}


@pytest.mark.parametrize(
    ("mask", "recomputation"),
    tiers(
        [("documents, a window", "none"), *itertools.product(MASKS, ("full", "operators"))],
        [("documents, a window", "none"), ("documents", "operators")],
    ),
)
def test_documents_and_windows_are_in_the_graph(mask, recomputation):
    """Batches with other documents need no other graphs."""
    model = {"flavor": "deep", **MASKS[mask]}
    training = {"steps": 3, "seq_len": 64}
    make = partial(layouts.job, optimizer="SGD", model=model, training=training)
    (expected,) = run_ranks(trace, 1, make(layouts.ONE), True)
    settings = {"enable": True, "backend": "aot_eager"}
    layout = case(batch=8, recompute=RECOMPUTATIONS[recomputation])
    job = make(layout, compile=settings)
    ((found, (line,)),) = run_ranks(compiled, 1, job)
    compare(found, expected)
    assert line == line_of(2)


def test_stages_share_no_loss():
    job = recipe(case(2), enable=True, backend="aot_eager")
    graphs = []
    for found, (line,) in run_ranks(compiled, 2, job):
        compare(found, reference())
        graphs.append(line.removeprefix("compile: ").partition(" of ")[0])
    assert graphs == ["1 graph", "2 graphs"]


@pytest.mark.skipif(not keeps_nodes_of_functions(), reason="it is refused")
def test_a_loss_in_chunks_is_compiled_where_backwards_are_split():
    layout = layouts.schedule("ZBVZeroBubble", chunk=100)
    job = recipe(layout, enable=True, components=["loss"], backend="aot_eager")
    for found, _ in run_ranks(compiled, 2, job):
        compare(found, reference())


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [{}, OPERATORS])
def test_inductor_is_the_same_run(recompute):
    job = recipe(case(shard=2, tp=2, recompute=recompute), enable=True)
    for found, (line,) in run_ranks(compiled, 4, job):
        compare(found, reference())
        assert line.startswith(f"compile: 2 graphs of {BLOCKS} blocks and the loss, ")
        assert line.endswith(" from the cache, 0 graph breaks, 0 recompilations")


class Broken(nn.Module):
    """A block that no graph can hold as a whole."""

    def forward(self, x):
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()


def break_and_report(fullgraph):
    forget()
    config = CompileConfig(enable=True, backend="eager", fullgraph=fullgraph)
    block = Broken()
    compile.apply([block], config)
    block(torch.ones(2))
    block(torch.ones(2, dtype=torch.float64))  # the graphs were for another dtype
    return reported(config, 1)


def test_breaks_and_recompilations_are_counted_and_shown():
    ((first, *others),) = run_ranks(break_and_report, 1, False)
    assert first == ("compile: 4 graphs of 1 block and the loss, 2 graph breaks, 2 recompilations")
    breaks, *again = others
    assert breaks.startswith("compile: graph break, 2 times: ")
    assert "graph_break()" in breaks
    assert len(again) == 2
    for line in again:
        assert line.startswith("compile: recompiled because a guard failed: ")
        assert "dtype mismatch" in line


def test_a_break_is_refused_unless_it_is_allowed():
    with pytest.raises(AssertionError, match=r"torch\._dynamo\.exc\.Unsupported"):
        run_ranks(break_and_report, 1, True)


def lines_of(configs):
    forget()
    return [reported(config, 3) for config in configs]


def test_the_line_names_what_was_to_be_compiled():
    named = {
        "3 blocks and the loss": CompileConfig(enable=True),
        "3 blocks": CompileConfig(enable=True, components=("model",)),
        "the loss": CompileConfig(enable=True, components=("loss",)),
    }
    (lines,) = run_ranks(lines_of, 1, [*named.values(), CompileConfig()])
    rest = "0 from the cache, 0 graph breaks, 0 recompilations"
    expected = [[f"compile: 0 graphs of {words}, {rest}"] for words in named]
    assert lines == [*expected, []]


def watched(steps, config):
    """What is said after each step of a block; in the fourth its input has another dtype."""
    forget()
    block = Broken()
    compile.apply([block], config)
    monitor, said = compile.CompileMonitor(config, 1, has_loss=False), []
    for step in range(1, steps + 1):
        block(torch.ones(2, dtype=torch.float64 if step == 4 else torch.float32))
        said.append(logged(partial(monitor.after_step, step + 100, is_last=step == steps)))
    return said


def test_a_report_after_two_steps_and_a_warning_whenever_it_compiles_again():
    config = CompileConfig(enable=True, backend="eager", fullgraph=False, components=("model",))
    ((first, second, third, fourth, fifth),) = run_ranks(watched, 1, 5, config)
    assert first == third == fifth == []
    assert second[0] == "compile: 2 graphs of 1 block, 1 graph break, 0 recompilations"
    assert len(fourth) == 2  # what is before the break, and after it
    for line in fourth:
        assert line.startswith("compile: step 104: recompiled because a guard failed: ")
        assert "dtype mismatch" in line
    ((only,),) = run_ranks(watched, 1, 1, config)
    assert only[0] == second[0]
    assert run_ranks(watched, 1, 2, CompileConfig()) == [[[], []]]


def graphs_for_lengths(config):
    forget()
    function = compile.compiled(torch.sin, config)
    for length in (4, 5, 6):
        function(torch.ones(length))
    return int(compiler_counts()["stats"]["unique_graphs"])


def test_shapes_are_never_dynamic():
    config = CompileConfig(enable=True, backend="eager")
    assert run_ranks(graphs_for_lengths, 1, config) == [3]


def said_while_training(job):
    forget()
    return [line for line in logged(partial(train, job)) if line.startswith("compile: ")]


def test_a_run_says_what_was_compiled_and_when_again(tmp_path):
    job = tiny.job(
        tmp_path,
        training={"steps": 3, "global_batch_size": -1},
        compile={"enable": True, "backend": "aot_eager"},
        validation={"enable": True, "freq": 3, "steps": 1},
    )
    ((report, *again),) = run_ranks(said_while_training, 1, job)
    graphs = "2 graphs of 2 blocks and the loss"
    assert report == f"compile: {graphs}, 0 graph breaks, 0 recompilations"
    assert len(again) == 2  # validation has no gradients: the block and the loss
    for line in again:
        assert line.startswith("compile: step 3: recompiled because a guard failed: ")
        assert "grad_mode" in line


@pytest.mark.slow
def test_graphs_are_kept_for_the_next_process(tmp_path):
    job = recipe(layouts.ONE, enable=True, cache_folder=str(tmp_path))
    ((cold, (said,)),) = run_ranks(compiled, 1, job)
    assert said == line_of(2, ", 0 from the cache")
    ((warm, (said,)),) = run_ranks(compiled, 1, job)
    assert said == line_of(2, ", 2 from the cache")
    assert warm.losses == cold.losses
    assert warm.grad_norms == cold.grad_norms
