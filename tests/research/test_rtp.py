"""Weights that travel around a ring: what a rank has of them, and what it computes with them."""

import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests import layouts
from tests.layouts import FULL, case
from tests.parallel.test_collectives import sends_what_is_planned
from tests.plan import recorded
from tests.ranks import run_ranks
from tests.research.layouts import IN_PLACE, ROTATED
from tests.runs import each, train
from torchtitan.comm import CommunicationConfig
from torchtitan.losses import cross_entropy
from torchtitan.models.attention import SelfAttention
from torchtitan.models.output import LinearLoss
from torchtitan.parallel.compile import CompileConfig
from torchtitan.parallel.settings import Precision
from torchtitan.parallel.sharding import ShardingTarget
from torchtitan.research.rtp.ring import Neighbours
from torchtitan.research.rtp.rotated import PIECES, Ring

WIDTH, VOCABULARY = 24, 13
PIECE = 1024
"""Bytes that a test replaces at a time, where a real run has a megabyte; a large part has two."""


class Layer(nn.Module):
    """A linear by columns and one by rows, by themselves or travelling together."""

    def __init__(self):
        super().__init__()
        self.columns = nn.Linear(WIDTH, 40)
        self.rows = nn.Linear(40, WIDTH)
        self.gate = nn.Linear(WIDTH, 30, bias=False)
        self.back = nn.Linear(30, WIDTH, bias=False)
        self.feed_forward = nn.ModuleDict({"gate": self.gate, "back": self.back})
        self.feed_forward.forward = lambda x: self.back(F.silu(self.gate(x)))

    def forward(self, x):
        return self.feed_forward(x + self.rows(self.columns(x).tanh()))


class Heads(nn.Module):
    """Attention with two query heads for each key head."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(WIDTH, n, bias=False) for n in (WIDTH * 2, WIDTH, WIDTH)
        )
        self.o = nn.Linear(WIDTH * 2, WIDTH, bias=False)
        self.attend = SelfAttention()

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 6)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(self.attend(q, k, v, None).transpose(1, 2).flatten(2))


class Network(nn.Module):
    """Each kind of module that travels, between a table and a loss."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layer, self.heads = Layer(), Heads()
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.loss = LinearLoss()
        self.recomputes = False

    def forward(self, tokens, targets=None):
        x = self.table(tokens)
        if self.recomputes:
            x = checkpoint(lambda x: x + self.heads(self.layer(x)), x, use_reentrant=False)
        else:
            x = x + self.heads(self.layer(x))
        return self.output(x) if targets is None else self.loss(x, self.output.weight, targets)


ROWWISE = ("layer.rows", "layer.back", "layer.feed_forward.back", "heads.o")
PLAN = dict.fromkeys(ROWWISE, "rowwise")
PLAN |= dict.fromkeys(("layer.feed_forward", "heads"), "input_gather")


def network():
    torch.manual_seed(0)
    return Network()


class Watched(Neighbours):
    """Notes the most bytes of parts that have arrived or are about to, alive at a time."""

    def __init__(self, group, in_place):
        super().__init__(group, in_place, PIECE)
        self.alive = []
        self.owned = set()
        """Where the parts are stored that this rank owns."""
        self.most = 0

    def pass_on(self, sent, step):
        transfer = super().pass_on(sent, step)
        # Gradients are told from weights by their dtype; a piece is a view of what is replaced.
        weights = [t for t in (*sent, *transfer.arriving) if t.dtype == torch.float32]
        known = {id(ref()) for ref in self.alive}
        wholes = (t if t._base is None else t._base for t in weights)
        wholes = {id(t): t for t in wholes if id(t) not in known}
        self.alive += [weakref.ref(whole) for whole in wholes.values()]
        del weights, wholes
        alive = {
            t.untyped_storage().data_ptr(): t for ref in self.alive if (t := ref()) is not None
        }
        travelling = [t.nbytes for place, t in alive.items() if place not in self.owned]
        self.most = max(self.most, sum(travelling))
        return transfer


def rotated(chunk=0, heads=4, in_place=False):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    of = {"mesh": mesh, "tensor_mesh": mesh, "tensor_plan": PLAN, "device_type": "cpu"}
    of |= {"reshard": "default", "last_block": "", "ends": ((), ()), "cpu_offload": False}
    of |= {"precision": Precision(reduce=torch.float64), "compile": CompileConfig()}
    of |= {"communication": CommunicationConfig(), "heads": heads, "vocabulary_chunk": chunk}
    target = ShardingTarget(**of)
    model, ring = network(), Watched(mesh.get_group(), in_place)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    Ring(target, ring).apply(model, {})
    for name, parameter in model.named_parameters():
        split = parameter.placements[-1].dim
        parts = whole[name].chunk(ring.size, split)
        if ring.rank < len(parts):
            parameter.to_local().data.copy_(parts[ring.rank])
        ring.owned.add(parameter.to_local().untyped_storage().data_ptr())
    return model, ring


def samples(rank):
    generator = torch.Generator().manual_seed(1 + rank)
    tokens, targets = torch.randint(VOCABULARY, (2, 2, 5), generator=generator)
    targets[0, rank] = -100
    return tokens, targets


def loss_of(model, rank, in_model=False):
    tokens, targets = samples(rank)
    return model(tokens, targets) if in_model else cross_entropy(model(tokens), targets)


def computed(how):
    """On each rank the loss of its own samples, evaluated and trained, and all gradients whole."""
    in_model = bool(how.get("chunk"))
    model, ring = rotated(**{key: how[key] for key in how if key != "recomputes"})
    model.recomputes = how.get("recomputes", False)
    with torch.no_grad():
        before = loss_of(model, ring.rank, in_model)
    loss = loss_of(model, ring.rank, in_model)
    loss.backward()
    named = model.named_parameters()
    return before.item(), loss.item(), {n: p.grad.full_tensor() for n, p in named}


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, [{}]),
        (2, [{"recomputes": True, "chunk": 3}]),
        (3, [{"in_place": True, "chunk": 4}]),
        (4, [{}, {"heads": 2, "recomputes": True, "in_place": True}]),
    ],
    ids=[1, 2, 3, 4],
)
def test_gradients_are_those_of_one_rank(ranks, settings):
    """Also where parts are uneven, and where heads do not come out even."""
    model = network()
    losses = [loss_of(model, rank) for rank in range(ranks)]
    torch.stack(losses).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for rank, of_rank in enumerate(run_ranks(each, ranks, computed, settings)):
        for how, (before, loss, found) in zip(settings, of_rank, strict=True):
            assert before == loss == pytest.approx(losses[rank].item(), rel=1e-5), how
            for name, gradient in expected.items():
                where = f"{how}: {name}"
                torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=where)


def most_alive(setting):
    """Bytes of parts of others, in a forward and the backward of it."""
    in_place, recomputes = setting
    model, ring = rotated(in_place=in_place)
    model.recomputes = recomputes
    loss_of(model, ring.rank).backward()
    return ring.most


def test_a_rank_has_three_parts_of_a_layer_at_most():
    """Its own, one that it computes with, and one that arrives; or of that a piece."""
    ranks, layer = 4, sum(weight.nbytes for weight in network().heads.parameters())
    part, settings = layer // ranks, list(itertools.product([False, True], repeat=2))
    for found in run_ranks(each, ranks, most_alive, settings):
        most = [2 * part + PIECE if in_place else 3 * part for in_place, _ in settings]
        assert [part + alive for alive in found] == most


def resumed(folder):
    """The weights of a whole run, of its halves, and of its end as FSDP2 loads it."""
    found = []
    plain = {"name": "fsdp2"}
    for name, steps, sharding in (
        *(("whole", 2, ROTATED), ("halves", 1, ROTATED), ("halves", 2, IN_PLACE)),
        *(("halves", 2, plain), ("back", 1, plain), ("back", 2, ROTATED)),
    ):
        recipe = layouts.saving(
            case(shard=2, recompute=FULL, chunk=50, sharding=sharding),
            *("AdamW", f"{folder}/{name}", steps, 1),
            lr_scheduler={"total_steps": 2},
            validation={"enable": True, "freq": 1, "steps": 1},
        )
        found.append(train(recipe))
    return found


@pytest.mark.gate
def test_a_run_resumes_to_the_bit_and_as_fsdp2(tmp_path):
    """With an evaluation after each step; in place, which sends the same numbers."""
    for whole, _, resumed_run, loaded, _, back in run_ranks(resumed, 2, str(tmp_path)):
        for name, weight in whole.items():
            assert torch.equal(weight, resumed_run[name]), name
            assert torch.equal(weight, loaded[name]), name
            torch.testing.assert_close(weight, back[name], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_what_is_replaced_in_place_is_sent_in_pieces(monkeypatch):
    assert PIECES["cuda"] == 32 * 2**20
    monkeypatch.setitem(PIECES, "cpu", 3000)
    monkeypatch.setattr(recorded, "RECORDINGS", {})  # those of other pieces
    layout = case(shard=2, chunk=100, sharding=IN_PLACE)
    sends_what_is_planned(layout, monkeypatch)
