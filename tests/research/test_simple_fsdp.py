"""SimpleFSDP is FSDP2: the same parts of the same gradients, from graphs that hold what is sent."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import flop_counter

from tests import layouts, tiny
from tests.fusion import WITHOUT_CODE
from tests.layouts import RESHARD, ROWWISE, case
from tests.orders import noted
from tests.parallel.test_compile import forget, logged
from tests.ranks import run_ranks
from tests.recipes.test_migrate import translations
from tests.research.layouts import SIMPLE
from tests.runs import each, train
from tests.tiers import tiers
from torchtitan.checks import load_job
from torchtitan.device import Device
from torchtitan.optim.parameters import local
from torchtitan.parallel import FSDP2, CompileConfig, Precision, compile
from torchtitan.research.common import gathered
from torchtitan.research.simple_fsdp import bucketing
from torchtitan.research.simple_fsdp.bucketing import BucketingPlan, Tally
from torchtitan.tools.verify.measure import training
from torchtitan.torch_private.compiler import compilations
from torchtitan.torch_private.dtensor import local_extent
from torchtitan.torch_private.graphs import grouped_heads_counted


class Piece(NamedTuple):
    """What a rank has of a parameter: where it lies, and of which values its gradient is."""

    placements: str
    extent: Any
    dtype: torch.dtype
    gradient: Tensor


def pieces(job):
    """Train; the losses, the parameters of this rank after the first step, and what was logged."""
    forget()
    losses, found, lines = [], dict[str, Piece](), list[str]()
    for run, row in training(job, Device("cpu"), uneven=True):
        losses.append(row["loss"])
        if found:
            continue
        lines = logged(run.model.sharding.confirm)
        for name, p in run.model.parts[0].named_parameters():
            found[name] = Piece(
                str(p.placements), local_extent(p), p.grad.dtype, local(p.grad).clone()
            )
    return losses, found, lines


def assert_same(*cases):
    """Gradients and losses of both ways are the same; what SimpleFSDP logged of the last case."""
    jobs = []
    for layout, _, sections in cases:
        eager = {k: keys for k, keys in sections.items() if k not in ("compile", "sharding")}
        simple = sections | {"sharding": sections.get("sharding", {}) | SIMPLE}
        jobs += [layouts.job(layout, "SGD", **keys) for keys in (eager, simple)]
    results = run_ranks(each, cases[0][0].ranks, pieces, jobs)
    for rank in results:
        for (_, tolerance, sections), one, other in zip(cases, rank[::2], rank[1::2], strict=True):
            (losses, expected, _), (found_losses, found, _) = one, other
            assert found_losses == pytest.approx(losses, rel=tolerance), sections
            assert found.keys() == expected.keys()
            for name, piece in found.items():
                assert piece[:3] == expected[name][:3], (sections, name)
                largest = expected[name].gradient.abs().max() if piece.gradient.numel() else 1.0
                off = (piece.gradient - expected[name].gradient).abs() / largest
                assert not off.numel() or off.max() <= tolerance, (sections, name, off.max())
    return results[0][-1][2]


SHORT = {"training": {"steps": 2}}
MIXED = {"training": {"steps": 2, "mixed_precision_param": "bfloat16"}}
TIED = {**SHORT, "model": {"flavor": "tied"}}
FSDP, TP, FSDP_X_TP = case(shard=2), case(tp=2), case(shard=2, tp=2)


@pytest.mark.gate
@pytest.mark.costs("eight runs")
def test_gradients_are_those_of_fsdp2():
    """In mixed precision too; and of tied weights, and of converted linears, which read the whole
    weight.
    """
    converted = case(shard=2, convert=ROWWISE)
    assert_same(
        *((FSDP, 1e-6, SHORT), (FSDP, 2e-2, MIXED), (FSDP, 1e-6, TIED), (converted, 1e-6, SHORT))
    )


OTHERS = {
    "HSDP": (case(replicate=2, shard=2), 1e-6, SHORT),
    "FSDP x TP": (FSDP_X_TP, 1e-6, SHORT),
    "TP, mixed precision": (TP, 2e-2, MIXED),
    "copies and TP": (case(replicate=2, tp=2), 1e-6, SHORT),
    "FSDP x TP, mixed precision": (FSDP_X_TP, 2e-2, MIXED),
}


@pytest.mark.costs("four ranks, and tensor parallelism")
@pytest.mark.parametrize("name", tiers(OTHERS, [], list(OTHERS)[3:]))
def test_gradients_are_those_of_fsdp2_on_other_layouts(name):
    assert_same(OTHERS[name])


def saved_and_loaded(folder):
    """Train under FSDP2 and save; load under SimpleFSDP and train on; load under FSDP2 again."""
    found, small = [], {"n_layers": 1}
    for steps, simple in ((1, {}), (1, SIMPLE), (2, SIMPLE), (2, {})):
        layout = case(shard=2, tp=2, sharding=simple)
        found.append(train(layouts.saving(layout, "AdamW", folder, steps, 1, model=small)))
    return found


@pytest.mark.gate
def test_checkpoints_of_one_load_in_the_other(tmp_path):
    results = run_ranks(saved_and_loaded, 4, str(tmp_path))
    for saved, loaded, saved_again, loaded_again in results:
        assert all(torch.equal(loaded[name], weight) for name, weight in saved.items())
        assert all(torch.equal(loaded_again[name], weight) for name, weight in saved_again.items())
        assert not all(torch.equal(saved[name], weight) for name, weight in saved_again.items())


# Compiled.


class Small(nn.Module):
    """Two blocks and what stands around them, of matrices alone: there is no kernel to compile."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        pairs = ([nn.Linear(6, 6, bias=False) for _ in range(2)] for _ in range(2))
        blocks = (nn.Sequential(*pair) for pair in pairs)
        self.blocks = nn.ModuleDict(dict(zip("ab", blocks, strict=True)))
        self.last = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks.values():
            x = block(x)
        return self.last(x)


UNITS = (("first",), ("blocks.a",), ("blocks.b",), ("last",))


def made(freed, merging, megabytes, overlaps=False, backend="inductor"):
    """Gradients of this rank's share of a loss over a graph, and what stood in the graph."""
    forget()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    model = Small()
    plan = BucketingPlan(
        (mesh.get_group().group_name,), UNITS, freed, merging, megabytes, overlaps, "h100"
    )
    config = CompileConfig(enable=True, granularity="model", backend=backend)
    gathered.apply(model, mesh, mesh, Precision())
    compile.apply([model], config, plan.options())
    x = torch.randn(2, 4, 6)[mesh.get_local_rank()]
    model(x).square().sum().backward()
    gradients = [p.grad.full_tensor() for p in model.parameters()]
    return gradients, bucketing.tallies(), sum(one.hits for one in compilations().values())


def expected_gradients():
    torch.manual_seed(0)
    model = Small()
    model(torch.randn(2, 4, 6)).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of compiled graphs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "graphs"))
    return tmp_path / "graphs"


@pytest.mark.slow
def test_graphs_free_and_merge_what_they_are_told(cache):
    """The backward needs all six matrices but the first, since nobody asks for the input's."""
    # Those that may take graphs from the cache are compiled to the end.
    freed = ("blocks.a",)
    cases = {
        "kept": (((), "none", 1, False, WITHOUT_CODE), (6, 6, 6, 6)),
        "all freed": ((("",), "none", 1, False, WITHOUT_CODE), (6 + 5, 6 + 5, 6, 6)),
        "a block freed, each merged": ((freed, "block", 1), (6 + 2, 4 + 1, 6, 4)),
        "the same, from the cache": ((freed, "block", 1), (6 + 2, 4 + 1, 6, 4)),
        "a block freed, two merged": ((freed, "size", 300 / 2**20), (6 + 2, 3 + 1, 6, 3)),
    }
    settings = [setting for setting, _ in cases.values()]
    for ranks in run_ranks(each, 2, lambda setting: made(*setting), settings):
        for name, (gradients, tallies, hits) in zip(cases, ranks, strict=True):
            for found, expected in zip(gradients, expected_gradients(), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            gathers, scatters = tallies["all-gathers"], tallies["reduce-scatters"]
            numbers = (gathers.before, gathers.after, scatters.before, scatters.after)
            assert numbers == cases[name][1], name
            assert scatters.bytes == 6 * 6 * 6 * 4
            # Ranks with the same graph may find each other's, but never one made otherwise.
            assert hits or "from the cache" not in name


def moved(merging):
    """The orders of the small network's graphs, as they are merged and moved for CUDA."""
    with noted() as orders:
        gradients, tallies, _ = made(("",), merging, 1, True, WITHOUT_CODE)
    for found, expected in zip(gradients, expected_gradients(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for kind, tally in tallies.items():
        assert tally.after == sum(len(graph.get(kind, ())) for graph in orders["after"])
    return orders


@pytest.mark.gate
def test_gathers_are_issued_before_the_products_of_the_block_before():
    """By the passes for CUDA, on graphs for a CPU; blocks have 1, 2, 2 and 1 products.

    The scheduler orders by estimates that all ranks have. Of matrices this small, messages take
    longer than all products: one gather, one reduction.
    """
    (orders, one), (_, other) = run_ranks(each, 2, moved, ["block", "auto"])
    forward, backward = (graph["all-gathers"] for graph in orders["before"])
    assert forward == [0, 1, 2, 3, 4, 5]  # each matrix by itself
    # The gradients of each matrix take two; the first one's needs no weights.
    assert backward == [1, 3, 5, 7, 9]
    forward, backward = (graph["all-gathers"] for graph in orders["after"])
    assert forward == [0, 0, 1, 3]
    assert backward == [0, 1, 3]

    assert one == other
    forward, backward = one["after"]
    assert forward == {"all-gathers": [0]}
    assert backward["all-gathers"] == [0]
    assert len(backward["reduce-scatters"]) == 1


WHOLE = {"enable": True, "granularity": "model", "components": ["model"]}


@pytest.mark.slow  # what is merged is counted, and gradients compared, on a smaller network daily
def test_compiled_model_has_the_gradients_of_fsdp2(cache):
    """Of 21 parameters the first of two blocks has 9, which are gathered again."""
    lines = assert_same(
        (FSDP, 1e-6, {**SHORT, "sharding": {"bucketing": "block"}, "compile": WHOLE})
    )
    assert [line for line in lines if line.startswith("simple_fsdp")] == [
        "simple_fsdp: all-gathers 30 -> 5 (0.2 MB), reduce-scatters 21 -> 4 (0.2 MB)"
    ]


# Said, or refused.


def test_what_an_eager_run_keeps_is_said():
    (note,) = tiny.problems(tiny.job(sharding=SIMPLE), severity="note")
    assert note.path == "sharding.name"
    assert note.message.startswith("without compile.enable")
    never = tiny.job(sharding=SIMPLE, parallelism={RESHARD: "never"})
    assert not tiny.problems(never, severity="note")
    assert not tiny.problems(tiny.job(), severity="note")


def test_merging_nothing_is_an_error(monkeypatch):
    monkeypatch.setattr(bucketing, "tallies", lambda: {"all-gathers": Tally(9, 9, 10**6)})
    assert logged(lambda: bucketing.confirm("none")) == ["simple_fsdp: all-gathers 9 -> 9 (1.0 MB)"]
    with pytest.raises(RuntimeError, match="did not take effect: all-gathers 9 -> 9"):
        bucketing.confirm("block")
    monkeypatch.setattr(bucketing, "tallies", lambda: {"all-gathers": Tally(9, 4, 10**6)})
    (line,) = logged(lambda: bucketing.confirm("auto", "h200"))
    assert line.endswith("(1.0 MB), in the order that estimates for h200 give (sharding.hardware)")
    monkeypatch.setattr(bucketing, "tallies", dict)
    assert logged(lambda: bucketing.confirm("block")) == ["simple_fsdp: one rank, no collectives"]


def test_settings_of_simple_fsdp_load_under_their_old_names(tmp_path):
    """Also as a run wrote them all out, with another choice."""
    text = '[parallelism]\ndata_parallel_impl = "{}"\nsimple_fsdp_bucketing = "none"\n'
    text += "simple_fsdp_bucket_mb = 20\n"
    path = tmp_path / "old.toml"
    path.write_text(text.format("simple_fsdp"))
    recipe = load_job(path, [], 4, "cpu")
    sharding = {"name": "simple_fsdp", "bucketing": "none", "bucket_mb": 20, "hardware": "h100"}
    assert recipe.config.sharding.model_dump() == sharding
    assert [line.split(": ")[2] for line in translations(recipe)] == [
        *("is now sharding.name", "is now sharding.bucketing", "is now sharding.bucket_mb")
    ]
    path.write_text(text.format("fsdp2"))
    recipe = load_job(path, [], 4, "cpu")
    assert recipe.config.sharding == FSDP2()
    assert recipe.notices[2].endswith(
        '20 is dropped; it only has an effect with parallelism.data_parallel_impl = "simple_fsdp"'
    )


def test_the_scheduler_counts_heads_that_share_keys(monkeypatch):
    """With torch 2.11, whose formulas refuse them."""
    ops, count = torch.ops.aten, flop_counter.flop_registry
    q, k, whole = (torch.empty(2, heads, 8, 4, device="meta") for heads in (6, 2, 6))
    forward = count[ops._scaled_dot_product_flash_attention]
    backward = count[ops._scaled_dot_product_flash_attention_backward]
    expected = forward(whole, whole, whole, out_val=q), backward(q, *3 * [whole], out_val=q)
    for name in ("sdpa_flop_count", "sdpa_backward_flop_count"):
        real = getattr(flop_counter, name)

        def strict(*shapes, real=real):
            assert len({shape[1] for shape in shapes}) == 1, "shapes are incompatible"
            return int(real(*shapes))

        monkeypatch.setattr(flop_counter, name, strict)
    with grouped_heads_counted():
        assert (forward(q, k, k, out_val=q), backward(q, q, k, k, out_val=q)) == expected
    with pytest.raises(AssertionError, match="incompatible"):
        forward(q, k, k, out_val=q)
