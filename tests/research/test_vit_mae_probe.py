"""The linear probe: its regression, what it prints, and what it refuses."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.vision import train as train_and_probe
from tests import small_weights, tiny
from tests.ranks import run_ranks
from tests.research.test_vit_mae_pictures import MODEL
from tests.runs import train
from tests.test_docs import ROOT
from torchtitan.research.vit_mae.images.open_images import open_view
from torchtitan.research.vit_mae.probe import HELD_OUT, ORDER_SEED, PENALTY, data_of, fit

pytestmark = pytest.mark.usefixtures("small")


def test_the_regression_is_the_minimum_of_what_it_says():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=draw, dtype=torch.float64) * 3 + 5
    labels = (x[:, 0] > 5).long() + 2 * (x[:, 1] > 5).long()
    predict = fit(x, labels, 4)
    assert (predict(x).argmax(1) == labels).double().mean() > 0.9
    # The same with features that are scaled and moved: they are standardized.
    assert torch.allclose(fit(x * 7 - 1, labels, 4)(x * 7 - 1), predict(x), atol=1e-4)
    z = (x - x.mean(0)) / x.std(0, correction=0)
    weight = torch.linalg.lstsq(torch.cat((z, torch.ones(200, 1)), 1), predict(x)).solution
    weight.requires_grad_()
    logits = torch.cat((z, torch.ones(200, 1)), 1) @ weight
    loss = torch.nn.functional.cross_entropy(logits, labels)
    loss = loss + PENALTY / 2 * weight[:-1].square().sum()
    loss.backward()
    assert weight.grad.abs().max() < 1e-5, "no weight can be changed for the better"


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A run of one step on scenes, and where it is."""
    folder = tmp_path_factory.mktemp("run")
    sections = {"training": {"steps": 1}, "checkpoint": {"enable": True}}
    run_ranks(train, 1, tiny.job(folder, model=MODEL, data={"dataset": "scenes"}, **sections))
    return folder


@pytest.mark.slow
def test_a_trained_encoder_tells_more_than_a_new_one(tmp_path):
    """Two thirds of the debug recipe's steps; benchmarks/vision.py has all of them, three times."""
    few = ("--training.steps=400", "--lr_scheduler.warmup_steps=40", "--validation.freq=400")
    found = train_and_probe(0, tmp_path, *few)
    assert found.losses[-1] < 0.45, "0.413 and 0.433 from two seeds, and near 1 when new"
    assert found.trained > found.random + 0.3


def test_the_page_tells_so_of_the_whole_recipe():
    page = (ROOT / "benchmarks/results/vision.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert [
        row for row in rows[1:5] if row not in (ROOT / "torchtitan/research/vit_mae.md").read_text()
    ] == []
    # The lowest of several seeds, and the highest.
    spans = [re.findall(r"\d\.\d+", row.split("|")[2]) for row in rows[1:5]]
    *_, new, trained = ([float(number) for number in span] for span in spans)
    assert trained[1] > new[2] + 0.3


def test_what_a_probe_finds_is_printed(untrained, says):
    words = [str(untrained), "--tasks", "linear_probe", "--limit", "60", "--json"]
    found = json.loads(says("evaluate", *words))["linear_probe"]
    assert (found["images"], found["classes"]) == (60, 8)
    assert 5 < found["held_out"] < 20, "about every fifth"
    for key in ("accuracy", "random_encoder"):
        assert found[key] * found["held_out"] == pytest.approx(
            round(found[key] * found["held_out"])
        )
        assert 0 <= found[key] <= 1
    # Of the same images, by their classes alone.
    view = open_view(data_of({}, "scenes", None), size=MODEL["image_size"], bands=3)
    chosen = np.random.default_rng(ORDER_SEED).permutation(len(view))[:60]
    held_out = chosen % HELD_OUT == HELD_OUT - 1
    labels = np.array([view.images.label(number) for number in chosen.tolist()])
    frequent = np.bincount(labels[~held_out]).argmax()
    assert found["most_frequent"] == pytest.approx((labels[held_out] == frequent).mean())
    lines = says("evaluate", *words[:-1], "--batch-size", "7").splitlines()
    assert f"accuracy        {found['accuracy']:.4f}  of {found['held_out']} held-out" in lines[0]


def test_probes_that_cannot_be_are_refused_in_words(untrained, tmp_path, says):
    (tmp_path / "loose").mkdir()
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / "loose/a.png")
    text = small_weights.saved(tmp_path / "text", recipe={"model.tokenizer_path": None})
    of_loose = ["--dataset", "image_folder", "--dataset-path", str(tmp_path / "loose")]
    probe = [str(untrained), "--tasks", "linear_probe"]
    for words, message in (
        ([*probe[:2], "linear_probe,x"], "--tasks: got linear_probe,x"),
        ([*probe, "--limit", "1"], "needs training images of at least two classes"),
        ([*probe, *of_loose], "have no classes, which a probe n"),
        ([*probe, "--dataset", "sceness"], "scenes"),
        ([*probe, "--dataset", "synthetic"], "has no images"),
        ([str(text), *probe[1:]], "linear_probe needs an image model, and "),
    ):
        assert message in says("evaluate", *words, status=2)
