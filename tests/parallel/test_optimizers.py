"""What an optimizer stores, and when it steps, changes nothing about a run on several ranks."""

import itertools
from contextlib import closing
from functools import cache

import pytest
import torch

from tests import tiny
from tests.layouts import ONE, case
from tests.ranks import run_ranks
from tests.runs import compare, trace
from tests.tiers import tiers
from torchtitan.build import build
from torchtitan.device import Device
from torchtitan.optim.parameters import local
from torchtitan.parallel import Launch, open_world
from torchtitan.trainer import Trainer

# Parts that fall to each of four ranks are large enough for codes.
SQUARE = {"flavor": "square"}


def job(layout, max_norm=0.3, **optimizer):
    settings = {"name": "AdamW", "lr": 1e-3} | optimizer
    training = {"max_norm": max_norm}
    return tiny.job(**layout.recipe(model=SQUARE, training=training, optimizer=settings))


def traces(jobs):
    torch.compiler.set_stance("force_eager")
    return [trace(job, True) for job in jobs]


RULES = (
    # Rounding is a tenth of the smallest gradients, which weigh as much as others in Adam's update.
    {"eps": 1e-6},
    # Nothing is clipped, so with a higher rate rounding itself grows.
    {"name": "SGD", "lr": 0.2, "momentum": 0.9},
)
IN_BACKWARD = {
    "one rank": ONE,
    "FSDP 2": case(shard=2, batch=4),
    "HSDP 2 x 2, full recomputation": case(replicate=2, shard=2, recompute={"mode": "full"}),
    "TP 2": case(tp=2, batch=8),
    "FSDP 2 x TP 2": case(shard=2, tp=2, batch=4),
}
"""One microbatch in a step."""


@cache
def unclipped(**model):
    jobs = [job(ONE.of(**model), 0, **optimizer) for optimizer in RULES]
    (found,) = run_ranks(traces, 1, jobs)
    return found


@pytest.mark.parametrize(
    "name", tiers(IN_BACKWARD, ["one rank", "FSDP 2", "TP 2"], list(IN_BACKWARD)[-1:])
)
def test_steps_in_the_backward(name):
    is_updated_in_the_backward(IN_BACKWARD[name])


def is_updated_in_the_backward(layout, allowed=1e-5):
    pairs = itertools.product((True, False), RULES)
    jobs = [job(layout, 0, **rule, early_step_in_backward=early) for early, rule in pairs]
    expected = unclipped(**layout.model)
    for number, rank in enumerate(run_ranks(traces, layout.ranks, jobs)):
        for found, late, one in zip(rank[:2], rank[2:], expected, strict=True):
            compare(found, one, f"rank {number}", allowed)
            # On the same layout, when an update is made changes no bit of it.
            assert found.losses == late.losses
            assert found.grad_norms == late.grad_norms
            weights = found.weights[-1].items()
            assert all(torch.equal(w.local, late.weights[-1][name].local) for name, w in weights)


def alive(job):
    """Train; the bytes of gradients that this rank has whenever one is complete, and of all."""
    found = [0]
    with open_world(job.degrees(Launch.read().size), job.comm, Device("cpu")) as world:
        run = build(job, world)
        everything = [p for part in run.model.parts for p in part.parameters()]

        def count(_):
            grads = (p.grad for p in everything if p.grad is not None)
            found[0] = max(found[0], sum(local(grad).nbytes for grad in grads))

        for parameter in everything:
            hooks = parameter._post_accumulate_grad_hooks
            ours = dict(hooks or {})
            parameter.register_post_accumulate_grad_hook(count)
            for key, hook in ours.items():  # to be called after it
                del parameter._post_accumulate_grad_hooks[key]
                parameter._post_accumulate_grad_hooks[key] = hook
        with closing(run.batches), run.meter:
            Trainer(run).step()
        return [found[0], sum(local(p).nbytes for p in everything)]


def test_few_gradients_are_alive_at_a_time_under_fsdp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a meter writes there
    for early, least, most in ((False, 0.9, 1.0), (True, 0.0, 0.4)):
        made = job(case(shard=2, batch=4), 0, early_step_in_backward=early)
        for largest, whole in run_ranks(alive, 2, made):
            assert least * whole <= largest <= most * whole
