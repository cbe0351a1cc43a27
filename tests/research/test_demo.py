"""Replicas that agree on a part of their momentum."""

import itertools
import math
import shutil
from typing import NamedTuple
from unittest.mock import Mock, patch

import numpy as np
import pytest
import scipy.fft
import torch
import torch.distributed as dist
from torch import Tensor

from tests import layouts
from tests.layouts import AFTERWARDS, case
from tests.ranks import run_ranks
from tests.runs import each, parts, traced, train
from tests.tables import data
from tests.tiers import tiers
from torchtitan.comm import Unit
from torchtitan.logging import logger
from torchtitan.parallel.replication import open_replicas
from torchtitan.research import demo
from torchtitan.research.common.draws import mixed, normal
from torchtitan.research.demo import Demo, Random, Slicing, Striding, Tiles

SHAPES = {"w": torch.Size([12, 40]), "b": torch.Size([30]), "none": torch.Size([0, 8])}
UNIT = Unit("", SHAPES, torch.device("cpu"))
NAMES = ["demo", "random", "striding", "slicing"]


@pytest.mark.parametrize("shape", [(12, 40), (30,), (7, 11), (64, 64), (6, 4, 10)])
def test_the_transform_is_that_of_scipy_and_is_undone(shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    tiles = Tiles(tensor.shape, 10)
    found = tiles.transform(tensor)
    assert found.shape == (tiles.count, tiles.size)
    assert torch.allclose(tiles.invert(found), tensor, atol=1e-5)
    flat = tensor.reshape(tiles.rows, tiles.columns)
    if shape == (7, 11):  # 11 in two tiles of 6
        assert (tiles.height, tiles.width, tiles.padding) == (7, 6, (0, 1))
    flat = flat[: tiles.height, : tiles.width]
    expected = scipy.fft.dctn(flat.double().numpy(), norm="ortho")
    assert np.allclose(found[0].numpy(), expected.ravel(), atol=1e-5)


@pytest.mark.parametrize(("size", "side"), [(40, 10), (64, 8), (7, 7), (11, 6), (12, 6)])
def test_a_tile_is_the_largest_divisor_or_nearly(size, side):
    assert Tiles(torch.Size([size, size]), {64: 8}.get(size, 10)).height == side


@pytest.mark.parametrize("shape", [(4097, 4099), (151, 4096), (32_003, 4096), (4097, 9), (67, 67)])
def test_of_prime_dims_no_more_than_a_fourth_is_sent(shape):
    tiles, config = Tiles(torch.Size(shape), 64), Demo()
    sent = tiles.count * min(config.top_k, tiles.size) * 6
    assert sent <= math.prod(shape) * 4 / 4


class Agreed(NamedTuple):
    gradients: list[dict[str, Tensor]]
    momentum: dict[str, Tensor]


def drawn(call, rank):
    generator = torch.Generator().manual_seed(100 * call + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def agreed(config, calls):
    """What replicas agree on in each call."""
    group = dist.group.WORLD
    way = config.open(UNIT, group)
    gradients = [drawn(call, dist.get_rank()) for call in range(calls)]
    for of_call in gradients:
        way(of_call)
    return Agreed(gradients, dict(way.momentum))


def test_what_is_sent_and_what_is_kept_is_all_that_there_was():
    """With a decay of (nearly) 1: the momentum of all replicas, and the sum of what they agreed on,
    are the sum of all gradients. `demo` gives each coefficient the weight of all replicas, so there
    the identity is that of a single replica.
    """
    calls, one = 5, [Demo(chunk=10, top_k=4, sign=False)]
    two = [kind(rate=0.2, sign=False) for kind in (Random, Striding, Slicing)]
    for ranks, settings in ((1, one), (2, two)):
        configs = [config.model_copy(update={"decay": 1.0}) for config in settings]
        for config, *results in zip(
            configs, *run_ranks(each, ranks, agreed, configs, calls), strict=True
        ):
            for name in ("w", "b"):
                given = sum(drawn(call, r)[name] for call in range(calls) for r in range(ranks))
                kept = sum(found.momentum[name] for found in results)
                sent = sum(gradients[name] for gradients in results[0].gradients)
                assert torch.allclose(kept + sent, given, atol=1e-4), config.name
                assert float(sent.abs().max()) > 0, config.name
                assert float(kept.abs().max()) > 0, config.name


@pytest.mark.parametrize(("size", "sent"), [(67, 268), (32, 128), (64, 192)])
def test_no_message_is_longer_than_the_tensor(size, sent, monkeypatch):
    given, gather = torch.arange(1.0, size + 1), Mock(side_effect=lambda message, _: message[None])
    monkeypatch.setattr(demo, "all_gather", gather)
    unit, found = Unit("", {"v": given.shape}, torch.device("cpu")), given.clone()
    way = Demo(sign=False).open(unit, Mock(size=lambda: 1))
    way({"v": found})
    assert len(gather.call_args.args[0]) == sent
    assert torch.allclose(found + way.momentum["v"], given, atol=1e-3)
    assert torch.equal(found, given) == (sent == 4 * size)


def test_all_coefficients_are_sign_sgd_on_the_exact_mean():
    for (found,) in run_ranks(each, 2, agreed, [Demo(chunk=10, top_k=100)], 3):
        for call, gradients in enumerate(found.gradients):
            for name in ("w", "b"):
                exact = sum(drawn(call, rank)[name] for rank in range(2))
                clear = exact.abs() > 1e-4
                assert torch.equal(gradients[name][clear], exact.sign()[clear])
        assert all(float(found.momentum[name].abs().max()) < 1e-4 for name in ("w", "b"))


def test_a_coefficient_is_the_mean_over_those_who_sent_it():
    """Two replicas of one tile of two numbers; each sends its larger coefficient."""

    def pair(first, second):
        return Tiles(torch.Size([2]), 2).invert(torch.tensor([[first, second]]))

    pairs = [[pair(3.0, 1.0), other] for other in (pair(1.0, 5.0), pair(7.0, 1.0))]
    one, other = run_ranks(each, 2, alone, pairs)[0]
    assert torch.allclose(one, 2 * pair(3.0, 5.0), atol=1e-5)
    assert torch.allclose(other, 2 * pair((3.0 + 7.0) / 2, 0.0), atol=1e-5)


def alone(pair):
    """What replicas agree on, of which each has one of a pair."""
    group, own = dist.group.WORLD, {"b": pair[dist.get_rank()].clone()}
    unit = Unit("", {"b": torch.Size([2])}, torch.device("cpu"))
    Demo(chunk=2, top_k=1, sign=False).open(unit, group)(own)
    return own["b"]


@pytest.mark.parametrize("kind", [Random, Striding, Slicing])
def test_every_number_has_its_turn(kind):
    config = kind(rate=0.1)
    seen = torch.zeros(57)
    for step in range(60):
        places = config.places(57, step, "w", torch.device("cpu"))
        assert len(places) == len(places.unique()) == config.count(57) == 6
        seen[places] += 1
    assert seen.min() > 0


def test_random_numbers_are_drawn_alike_of_all_parts():
    """As often as each other, and neither by the step nor by the name in the same places."""
    config, cpu = Random(rate=0.1), torch.device("cpu")
    drawn = torch.stack([config.places(100_000, step, "w", cpu) for step in range(20)])
    parts = drawn - torch.arange(0, 100_000, 10)
    assert (parts.flatten().bincount() - 20_000).abs().max() < 600, "four standard deviations"
    pairs = (parts[:-1] * 10 + parts[1:]).flatten().bincount(minlength=100)
    assert (pairs - 1900).abs().max() < 220, "five of them"
    assert (config.places(100_000, 0, "w", cpu) == drawn[0]).all()
    other = config.places(100_000, 0, "v", cpu)
    assert 800 < (other == drawn[0]).sum() < 1200


def test_random_integers_are_those_of_splitmix():
    """The first of the generator's authors, of seed 1234567, without their two highest bits."""
    found = mixed(torch.arange(3), 1234567).tolist()
    published = (6457827717110365317, 3203168211198807973, 9817491932198370423)
    assert found == [number % 2**62 for number in published]
    assert mixed(torch.arange(10**5), 2**64 - 1).min() >= 0


def test_normal_numbers_are_normal_and_of_their_name():
    cpu = torch.device("cpu")
    drawn = normal(300, 200, "w/0", cpu)
    assert abs(drawn.mean()) < 5 / 60_000**0.5
    assert abs(drawn.square().mean() - 1) < 5 * (2 / 60_000) ** 0.5
    assert abs(drawn.pow(4).mean() - 3) < 5 * (96 / 60_000) ** 0.5
    assert drawn.equal(normal(300, 200, "w/0", cpu))
    assert abs((drawn * normal(300, 200, "w/1", cpu)).mean()) < 5 / 60_000**0.5
    assert abs((drawn[:, 1:] * drawn[:, :-1]).mean()) < 5 / 60_000**0.5


def spoiled(setting):
    every, swapped = setting
    group, model = dist.group.WORLD, torch.nn.Linear(4, 4)
    model.weight.data = torch.arange(16.0).view(4, 4)
    torch.nn.init.ones_(model.bias)
    config = Demo(chunk=4, top_k=1, sign=False, verify_steps=3, every=every)
    technique = open_replicas(config, [model], group, torch.device("cpu"))
    try:
        for update in range(8):
            technique.before_pass()
            if update == 4:
                technique.agree = lambda moved: None  # each keeps what it has
                if not swapped:
                    model.weight.data[0, 0] += 1e-6 * dist.get_rank()
                elif dist.get_rank():
                    model.weight.data = model.weight.data.flip(0)
            technique.after_update()
    except RuntimeError as error:
        return f"{update}: {error}"
    return "nothing"


def test_replicas_that_differ_are_found():
    """In a value, or in nothing but the order of rows; by the check that follows."""
    at = {1: 5, 2: 7}
    settings = list(itertools.product(at, [False, True]))
    for rank in run_ranks(each, 2, spoiled, settings):
        for (every, _), found in zip(settings, rank, strict=True):
            expected = f"{at[every]}: communication.replicas: the weights of replicas differ"
            assert found.startswith(expected)


LAYOUTS = {name: case(**given) for name, given in data(__file__).items()}


def job(layout, ways, steps=4, **training):
    """By SGD, of a model with no more blocks than stages need."""
    few = {"model": {"n_layers": 1}} if layout.pp == 1 else {}
    training = {"steps": steps, **training}
    return layouts.job(layout, "SGD", communication=ways, training=training, **few)


def copy_of(layout):
    """A rank that has what the first has, in another replica."""
    return layout.ranks // 2 if layout.pp == 1 else 1


@pytest.mark.parametrize("name", tiers(LAYOUTS, ["HSDP 2 x 2"], gate=["DDP 2"]))
def test_replicas_have_the_same_weights_to_the_bit(name):
    layout = LAYOUTS[name]
    names = NAMES if name == "DDP 2" else ["demo"]
    jobs = [
        job(layout, {"replicas": {"name": way, "verify_steps": 1}}, 3, max_norm=0.0)
        for way in names
    ]
    slow = jobs[0].optimizer.model_copy(update={"lr": 1e-3})
    jobs = [one.model_copy(update={"optimizer": slow}) for one in jobs]
    for way, found in zip(names, traced(layout, jobs), strict=True):
        assert found[0].losses[-1] != found[0].losses[0]
        for weight, part in found[0].weights[-1].items():
            other = found[copy_of(layout)].weights[-1][weight]
            assert torch.equal(part.local, other.local), f"{way}: {weight}"


EVERYTHING = {"replicas": {"name": "slicing", "rate": 1.0, "sign": False}}
NEVER = {"replicas": {"name": "none"}}
LOCAL = {"replicas": {"name": "all_reduce", "every": 2}}


def test_all_of_the_momentum_is_the_run_of_all_reduce():
    """With nothing kept and no sign."""
    layout = LAYOUTS["HSDP 2 x 2"]
    jobs = [job(layout, ways, 3) for ways in (EVERYTHING, AFTERWARDS)]
    (found, *_), (expected, *_) = traced(layout, jobs)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)


@pytest.mark.parametrize("name", tiers(LAYOUTS, ["HSDP 2 x 2"], gate=["DDP 2 x PP 2"]))
def test_replicas_that_run_apart_meet_in_the_mean_of_their_weights(name):
    layout = LAYOUTS[name]
    never, local = traced(layout, [job(layout, NEVER, 2), job(layout, LOCAL)], uneven=True)
    other = copy_of(layout)
    for weight, found in local[0].weights[1].items():
        mine, theirs = (never[rank].weights[1][weight].local for rank in (0, other))
        assert not torch.equal(mine, theirs)
        assert torch.allclose(found.local, (mine + theirs) / 2, atol=1e-6)
        for step in (1, 3):
            both = (local[rank].weights[step][weight].local for rank in (0, other))
            assert torch.equal(*both)
        assert not torch.equal(found.local, local[other].weights[2][weight].local)
    assert never[0].losses == never[other].losses
    assert never[0].grad_norms == never[other].grad_norms


def test_each_replica_trains_on_the_mean_of_its_own_targets():
    """One update apart from each other, with SGD, is the update by the mean of their gradients;
    where both have as many targets, that is the mean over all. Each clips its own gradient."""
    layout = case(replicate=2, batch=4)
    ways = ({"replicas": {"name": "all_reduce"}}, NEVER)
    jobs = [job(layout, way, 1, max_norm=0.0) for way in ways]
    jobs += [job(layout, NEVER, 1, max_norm=most) for most in (0.1, 0.2)]
    together, alone_, *clipped = traced(layout, jobs)
    for pair in zip(*clipped, strict=True):
        few, more = ([part.local.flatten() for part in one.weights[0].values()] for one in pair)
        apart = (torch.cat(few) - torch.cat(more)).norm().item()
        assert apart == pytest.approx(0.1 * jobs[-1].optimizer.lr, rel=1e-3)
    for weight, found in together[0].weights[0].items():
        both = [alone_[rank].weights[0][weight].local for rank in range(2)]
        assert torch.allclose((both[0] + both[1]) / 2, found.local, atol=1e-6)
    assert together[0].losses == pytest.approx(alone_[0].losses, rel=1e-6)


def resumed(folder, layout, ways):
    """What this rank has of the weights after three steps, and the warnings on the way."""
    sections = {"communication": ways, "model": {"n_layers": 1}}
    sections["checkpoint"] = {"async_mode": "disabled"}
    with patch.object(logger, "warning") as warned:
        found = train(layouts.saving(layout, "AdamW", folder, 3, 3, **sections), parts)
    return found, [str(call.args[0]) for call in warned.call_args_list]


def test_replicas_that_ran_apart_resume_on_other_layouts(tmp_path):
    """Each where it was, with as many replicas; else all with the weights of the first."""
    two = case(replicate=2, batch=4)
    at_once = [found for found, _ in run_ranks(resumed, 2, str(tmp_path / "b"), two, LOCAL)]
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    split = run_ranks(resumed, 4, str(tmp_path / "b"), case(replicate=2, shard=2), LOCAL)
    for rank, (found, said) in enumerate(split):
        for name, part in found.items():
            assert torch.equal(part.local, part.of(at_once[rank // 2][name]))
        assert ["starts from scratch" in line for line in said] == [True]
    ((first, said),) = run_ranks(resumed, 1, str(tmp_path / "c"), case(batch=8), {})
    for name, part in first.items():
        assert torch.equal(part.local, at_once[0][name].local)
    assert ["starts with those of the first" in " ".join(line.split()) for line in said] == [True]
