"""The largest logits of attention, by a dense computation in float64; what a limit does to them."""

import itertools

import pytest
import torch

from tests import tiny
from tests.dense import document_mask
from tests.ranks import run_ranks
from tests.runs import train
from torchtitan.build import build, resume_policy
from torchtitan.checks import load_job
from torchtitan.config import RecipeError
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.attention import SelfAttention, causal_attention
from torchtitan.optim import AdamW, Muon, name_parameters
from torchtitan.parallel import Launch, open_world
from torchtitan.parallel.context_pieces import Cut
from torchtitan.research import qk_clip
from torchtitan.research.qk_clip import QKClip, attentions, largest_logits

BATCH, HEADS, LENGTH, DIM = 3, 4, 24, 6


def inputs(groups):
    """Queries, keys, and documents of other lengths in each sequence."""
    torch.manual_seed(groups)
    q, k = torch.randn(BATCH, HEADS, LENGTH, DIM), torch.randn(BATCH, groups, LENGTH, DIM)
    # The largest of all is one that no query sees: of the last key, and of another document.
    k[:, :, -1] *= 50
    return q, k, torch.randint(0, 2, (BATCH, LENGTH)).cumsum(1)


def dense(q, k, documents, window=0):
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.mT / DIM**0.5
    one = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    seen = document_mask(one if documents is None else documents, window)[:, None]
    return scores.masked_fill(~seen, -torch.inf).amax((0, 2, 3))


@pytest.mark.parametrize("tile", [1, 500, 2**24])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_they_are_those_of_all_scores(tile, groups, monkeypatch):
    monkeypatch.setattr(qk_clip, "TILE", tile)
    q, k, documents = inputs(groups)
    for of, window in itertools.product((None, documents), (0, 3)):
        found = largest_logits(q, k, of, "", "allgather", "headtail", window)
        torch.testing.assert_close(found.double(), dense(q, k, of, window), rtol=1e-6, atol=0)
    rounded = q.bfloat16(), k.bfloat16()
    found = largest_logits(*rounded, documents, "", "allgather", "headtail")
    torch.testing.assert_close(found.double(), dense(*rounded, documents), rtol=1e-6, atol=0)


WAYS = [
    *itertools.product(["allgather", "ring"], ["headtail", "none"], [False, True], [0]),
    *itertools.product(["ring"], ["documents"], [True], [0, 5]),
    ("allgather", "headtail", False, 5),
]


def of_parts():
    """In each way, what this rank of two finds with its part of the sequence."""
    q, k, documents = inputs(2)
    group = torch.distributed.group.WORLD
    rank, found = group.rank(), []
    for rotation, balancing, has_documents, window in WAYS:
        at = [row.positions(rank) for row in Cut(2, balancing).rows(documents, window)]
        mine = [torch.stack([x[:, p] for x, p in zip(w, at, strict=True)]) for w in (q, k)]
        of = documents if has_documents else None
        found.append(largest_logits(*mine, of, group.group_name, rotation, balancing, window))
    return found


def test_ranks_that_share_a_sequence_find_them_together():
    q, k, documents = inputs(2)
    for (*_, has_documents, window), *found in zip(WAYS, *run_ranks(of_parts, 2), strict=True):
        expected = dense(q, k, documents if has_documents else None, window)
        torch.testing.assert_close(torch.maximum(*found).double(), expected, rtol=1e-6, atol=0)
        assert not torch.equal(*found)


@pytest.mark.parametrize("shared", [True, False], ids=["shared keys", "keys of their own"])
def test_a_head_is_scaled_down_to_the_limit_and_no_other(shared):
    job = tiny.job(model={"n_heads": HEADS, "n_kv_heads": 2 if shared else HEADS})
    spec, args = MODELS["tiny"], job.model_args()
    torch.manual_seed(0)
    model = spec.build(args, LENGTH)
    tokens = torch.randint(0, args.vocab_size, (BATCH, LENGTH))

    def logits():
        """Of each head of each layer, (layers, heads)."""
        found = []

        def core(q, k, v, documents, window, *_):
            found.append(largest_logits(q, k, documents, "", "allgather", "headtail"))
            return torch.zeros_like(q)  # so that what comes after does not depend on them

        for _, module in attentions(model):
            module.core = core
        with torch.no_grad():
            model(tokens)
        return torch.stack(found)

    model.init_buffers()
    before = logits()
    limit = before.median().item()
    places = {f"layers.{n}.attention": slice(HEADS * n, HEADS * (n + 1)) for n in range(2)}
    parameters = name_parameters([model], spec.role, lambda name: spec.heads(args, name))
    keys = {name: p.clone() for name, p in model.named_parameters() if ".wk." in name}
    clip = QKClip(limit, parameters, ("wq", "wk"), places)
    clip.apply(before.flatten())
    torch.testing.assert_close(logits(), before.clamp(max=limit), rtol=1e-5, atol=0)
    for name, key in keys.items():
        assert torch.equal(model.get_parameter(name), key) == shared


def cores(clip, average=None):
    """What attends in a run, and what the optimizer leaves to be done after an update."""
    job = tiny.job(optimizer={"name": "Muon", "qk_clip": clip, "average": average})
    with open_world(job.degrees(Launch.read().size), job.comm, Device("cpu")) as world:
        run = build(job, world)
        found = {m.core for p in run.model.parts for _, m in attentions(p)}
        run.batches.close()
        after = [call.__qualname__ for call in run.optimizers.after_update]
        return {core is causal_attention for core in found}, after


def test_without_a_limit_there_is_nothing():
    assert run_ranks(cores, 1, 0.0) == [({True}, [])]
    assert run_ranks(cores, 1, 1.0) == [({False}, ["LogitLimit.apply"])]
    assert run_ranks(cores, 1, 1.0, 0.5)[0][1] == ["LogitLimit.apply", "WeightAverage.step"]
    assert SelfAttention().core is causal_attention


def test_only_a_recipe_that_has_the_key_has_the_class():
    plain = tiny.job(optimizer={"name": "Muon"})
    assert type(plain.optimizer) is Muon
    off = tiny.job(optimizer={"name": "Muon", "qk_clip": 0.0})
    assert off.optimizer.features == ()
    assert off.flat() == plain.flat()
    on = load_job(None, ["--optimizer.name=Muon", "--optimizer.qk_clip=2"], 1, "cpu").config
    assert on.optimizer.features == ("qk_clip",)
    assert on.optimizer.title == "Muon"
    assert on.flat()["optimizer.qk_clip"] == 2


def test_another_optimizer_does_not_have_the_key(tmp_path):
    with pytest.raises(RecipeError, match=r"unknown key of AdamW; .*; Muon has qk_clip"):
        load_job(None, ["--optimizer.qk_clip=2"], 1, "cpu")
    with pytest.raises(RecipeError, match=r"unknown key of Muon; .*; did you mean .*qk_clip"):
        load_job(None, ["--optimizer.name=Muon", "--optimizer.qk_clp=2"], 1, "cpu")
    (tmp_path / "muon.toml").write_text("[optimizer]\nname = 'Muon'\nqk_clip = 3.0\n")
    (tmp_path / "more.toml").write_text("extends = 'muon.toml'\n[optimizer]\nlr = 1e-3\n")
    more = load_job(tmp_path / "more.toml", (), 1, "cpu").config
    assert more.flat()["optimizer.qk_clip"] == 3
    found = load_job(tmp_path / "more.toml", ["--optimizer.name=AdamW"], 1, "cpu")
    assert type(found.config.optimizer) is AdamW
    assert any("optimizer.name: AdamW has no qk_clip; 3.0 of " in line for line in found.notices)


def test_a_run_of_muon_from_before_resumes_without_a_notice(tmp_path, monkeypatch):
    """Its checkpoint records a limit of 0."""
    sections = {"optimizer": {"name": "Muon"}, "checkpoint": {"enable": True, "interval": 1}}
    small = tiny.job(tmp_path, training={"steps": 2}, **sections)
    flat = JobConfig.in_effect
    with monkeypatch.context() as patched:
        patched.setattr(JobConfig, "in_effect", lambda job: flat(job) | {"optimizer.qk_clip": 0.0})
        run_ranks(train, 1, small)
    longer = tiny.job(tmp_path, training={"steps": 3}, **sections)
    told = resume_policy(longer).start().changes
    assert [line.partition(":")[0] for line in told] == ["training.steps"]
