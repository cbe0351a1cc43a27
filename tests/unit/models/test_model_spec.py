"""A second decoder is one spec away: nothing but the facts of a spec is needed to train it."""

import dataclasses
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests import tiny
from tests.tables import table
from torchtitan.models import MODELS
from torchtitan.models.spec import MinShape, ModelSpec, build_empty, count_parameters, initialize


@dataclass(frozen=True)
class ToyArgs:
    vocab_size: int
    width: int
    depth: int


class Toy(nn.Module):
    """Mixes each token with the mean of those before it; shares no code with Llama."""

    def __init__(self, args, _seq_len):
        super().__init__()
        self.embed = nn.Embedding(args.vocab_size, args.width)
        self.stack = nn.ModuleList(nn.Linear(args.width, args.width) for _ in range(args.depth))
        self.head = nn.Linear(args.width, args.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        counts = torch.arange(1, x.shape[1] + 1)[:, None]
        for linear in self.stack:
            x = x + F.gelu(linear(x.cumsum(1) / counts))
        return self.head(x)


TOY = ModelSpec(
    name="toy",
    flavors={"small": ToyArgs(vocab_size=32, width=16, depth=2)},
    build=Toy,
    blocks=lambda model: {f"stack.{n}": block for n, block in model.stack.named_children()},
    init_std=lambda _args, _name: 0.3,
    before_blocks=("embed",),
    after_blocks=("head",),
    tensor_plan={},
    flops_per_unit=lambda args, _seq_len: 6 * (args.depth * 16 * 17 + 16 * 32),
    shrink=lambda args, needed: ToyArgs(needed.vocab_size, args.width, needed.n_layers),
)


@pytest.mark.parametrize(("name", "flavor"), [("llama3", "debugmodel"), ("toy", "small")])
def test_a_model_is_built_started_and_trained_from_its_spec_alone(name, flavor):
    spec, seq_len = {**MODELS, "toy": TOY}[name], 16
    args = spec.flavors[flavor]

    with torch.device("meta"):
        model = spec.build(args, seq_len)
    counts, blocks = count_parameters(model), spec.blocks(model)
    model = spec.build(args, seq_len)
    initialize(model.named_parameters(), lambda parameter: spec.init_std(args, parameter), seed=0)

    assert 0 < counts.embedding < counts.total
    assert sum(p.numel() for b in blocks.values() for p in b.parameters()) < counts.total
    assert 2 * counts.total < spec.flops_per_unit(args, seq_len) < 12 * counts.total

    tokens = torch.randint(
        args.vocab_size, (2, seq_len), generator=torch.Generator().manual_seed(0)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        logits = model(tokens)
        assert logits.shape == (2, seq_len, args.vocab_size)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(after < before for before, after in pairwise(losses))


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        *[("llama3", {}), ("llama3", {"norm": "none"}), ("qwen3", {}), ("qwen2", {})],
        *[("olmo2", {}), ("mixtral", {}), ("mistral", {}), ("gemma3", {})],
    ],
)
def test_operations_are_those_that_torch_counts(name, facts):
    """But for norms, which it does not count; a window has as many keys as it is long."""
    spec, seq_len = MODELS[name], 16
    for flavor in spec.flavors.values():
        args = dataclasses.replace(flavor, n_layers=1, **{"sliding_window": 0} | facts)
        model = build_empty(spec.build, args, seq_len)
        tokens = torch.zeros(2, seq_len, dtype=torch.int64, device="meta")
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(tokens).sum().backward()
        of_norms = 6 * sum(p.numel() for p in model.parameters() if p.ndim == 1)
        found = spec.flops_per_unit(args, seq_len)
        assert found - of_norms == counter.get_total_flops() / (2 * seq_len)
        windowed = spec.flops_per_unit(dataclasses.replace(args, sliding_window=4), seq_len)
        of_keys = 12 * args.n_layers * args.n_heads * args.head_size * (seq_len - 4)
        assert found - windowed == of_keys


@pytest.mark.parametrize(("name", "ndim", "role"), table(__file__, "roles.txt"))
def test_roles_of_parameters_follow_from_the_spec(name, ndim, role):
    spec = dataclasses.replace(MODELS["llama3"], roles={"layers.*.router.*": "router"})
    assert spec.role(name, int(ndim)) == role
    without_plan = dataclasses.replace(spec, tensor_plan={})
    in_norm = name == "layers.3.ffn_norm.bias"  # which nothing else says
    assert without_plan.role(name, int(ndim)) == ("bias" if in_norm else role)


def test_every_model_is_registered_under_its_own_name():
    assert [spec.name for spec in MODELS.values()] == list(MODELS)


@pytest.mark.parametrize("name", [name for name, spec in MODELS.items() if spec.tensor_plan])
def test_every_pattern_of_a_tensor_plan_matches_a_module(name):
    spec = MODELS[name]
    for args in spec.flavors.values():
        few = dataclasses.replace(args, n_layers=1 + getattr(args, "dense_layers", 0))
        assert spec.unmatched(build_empty(spec.build, few, 1)) == []


def test_a_tensor_plan_of_other_modules_is_refused(monkeypatch):
    plan = MODELS["llama3"].tensor_plan | {"layers.*.attention.wz": "colwise"}
    plan["nrm"] = plan.pop("norm")
    nameless = dataclasses.replace(MODELS["llama3"].formats["hf"], name={}.__getitem__)
    misspelt = dataclasses.replace(
        MODELS["llama3"], name="odd", tensor_plan=plan, formats={"hf": nameless}
    )
    monkeypatch.setitem(MODELS, "odd", misspelt)
    model = {"name": "odd", "flavor": "debugmodel"}
    assert not tiny.problems(tiny.job(model=model))
    found = tiny.problems(tiny.job(model=model, parallelism={"tensor_parallel_degree": 2}))
    assert [each.message for each in found if each.path == "model.name"] == [
        'in its tensor_plan, "layers.*.attention.wz" matches no module; '
        "did you mean layers.*.attention.wv?; correct the plan of odd",
        'in its tensor_plan, "nrm" matches no module; did you mean norm?; correct the plan of odd',
        'in its tensor_plan, "norm" has weights, but no role; correct the plan of odd',
    ]
    saves = {"enable": True, "last_save_in_hf": True}
    (found,) = tiny.problems(tiny.job(model=model, checkpoint=saves))
    assert found.message == "odd has no name for tok_embeddings.weight in this format"


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize(
    ("name", "flavor"),
    [
        *((name, flavor) for name in ("llama3", "qwen3") for flavor in MODELS[name].flavors),
        *[("qwen2", "72B"), ("olmo2", "13B"), ("gemma3", "1B"), ("gemma3", "27B")],
    ],
)
def test_a_shrunk_decoder_has_the_structure_of_the_large_one(name, flavor, tp):
    spec = MODELS[name]
    large = spec.flavors[flavor]
    tp = min(tp, large.n_kv_heads)
    small = spec.shrink(large, MinShape(n_layers=3, tensor_ranks=tp, vocab_size=320))
    assert (small.n_layers, small.vocab_size) == (3, 320)
    assert small.n_heads % small.n_kv_heads == small.n_kv_heads % tp == small.ffn_dim % tp == 0
    assert small.n_heads // small.n_kv_heads == min(large.n_heads // large.n_kv_heads, 4)
    assert small.ffn_dim / small.dim == pytest.approx(large.ffn_dim / large.dim, rel=0.25)
    for fact in ("tied", "rope_scaling", "head_norms", "sliding_window"):
        assert getattr(small, fact) == getattr(large, fact)
    assert (small.head_dim is None) == (large.head_dim is None)
    wider = [each.n_heads * each.head_size / each.dim for each in (small, large)]
    assert wider[0] == pytest.approx(wider[1], rel=0.2)
    assert (wider[0] == 1) == (wider[1] == 1)
    assert count_parameters(build_empty(spec.build, small, 16)).total < 3e6
