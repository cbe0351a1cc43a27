"""Stages of training: sizes of steps that change, as if the run was resumed with others."""

import json
from itertools import pairwise

import pytest
import torch

from tests import tiny
from tests.layouts import LAYOUTS
from tests.layouts import job as of_layout
from tests.ranks import run_ranks
from tests.runs import are_the_runs_of_one_rank, losses, rows, train_each
from tests.token_shards import drawn_documents, write_shards
from torchtitan.checks import load_job
from torchtitan.data import DataConfig
from torchtitan.data.settings import SourceConfig, StageConfig
from torchtitan.data.tokens.amounts import Amounts, Consumed, Progress
from torchtitan.parallel import Degrees
from torchtitan.plan.plan import plan
from torchtitan.plan.plan_report import plan_json, plan_text
from torchtitan.provenance import to_toml
from torchtitan.tools.ledger import read_consumption, replay

STEPS = 6
STAGES = (
    {"from_step": 2, "global_batch_size": 16, "local_batch_size": 4},
    {"from_tokens": 2 * 8 * 32 + 2 * 16 * 32, "global_batch_size": 8, "seq_len": 64},
)
"""After 2 and after 4 steps."""
SIZES = [(8, 32)] * 2 + [(16, 32)] * 2 + [(8, 64)] * 2


def recipe(layout, folder="unused", steps=STEPS, stages=STAGES, **sections):
    training = {"steps": steps, "stages": stages}
    schedule = {"lr_scheduler": {"total_steps": STEPS}}
    sections = {"training": training, "job": {"dump_folder": str(folder)}} | schedule | sections
    return of_layout(LAYOUTS[layout], "SGD", **sections)


def test_numbers_of_tokens_are_converted_to_steps():
    stages = recipe("FSDP 2").stages(Degrees(dp_shard=2))
    assert [(s.start, s.tokens) for s in stages] == [(0, 0), (2, 512), (4, 1536)]
    assert [s.job.training.seq_len for s in stages] == [32, 32, 64]
    assert [s.job.accumulation(Degrees(dp_shard=2)) for s in stages] == [2, 2, 1]
    later = [{"from_tokens": 257, "global_batch_size": 4}]
    assert recipe("FSDP 2", stages=later).stages(Degrees(dp_shard=2))[1].start == 2
    of_run = {"steps": STEPS, "sizes": recipe("FSDP 2").step_sizes(Degrees(dp_shard=2))}
    source = SourceConfig(path="unread", weight=1)
    data = DataConfig(
        sources=(source,), stages=[StageConfig(from_step=n, weights=[1]) for n in (2, 3)]
    )
    amounts = Amounts(data, [source], [None], seq_len=32, **of_run)
    assert [amounts.samples(0, n) for n in (2, 3, 4, 6)] == [16, 32, 48, 80]
    long = Amounts(data, [source], [None], seq_len=4096, **of_run)  # both began in one sample
    assert (
        len(long.plan(Progress(samples=1, next=1, steps=5, tokens=2048), [Consumed(1, 2048)])) == 3
    )


GATE = [pytest.param(name, marks=pytest.mark.gate) for name in ("PP 2, 1F1B", "CP 2")]


@pytest.mark.costs("DTensor derives its shardings in every process")
@pytest.mark.parametrize("layout", ["FSDP 2", *GATE])
def test_the_stages_of_a_layout_are_those_of_one_rank(layout):
    """A pipeline has other microbatches in each."""
    model = {"model": {"flavor": "deep" if LAYOUTS[layout].pp > 1 else "flat"}}
    alone = [recipe("one rank, accumulating 8", **model)]
    are_the_runs_of_one_rank(LAYOUTS[layout], [recipe(layout, **model)], alone)


def mixed(folder):
    """Two sources of tokens, packed both ways."""
    sources = []
    for number, weight in enumerate((0.7, 0.3)):
        path = write_shards(folder / f"source{number}", drawn_documents(300, number))
        sources.append({"path": str(path), "weight": weight, "repeat": True})
    return {"sources": sources, "packing": "best_fit"}


SAVED = {"checkpoint": {"enable": True, "interval": 1, "keep_latest_k": 0}}


@pytest.mark.parametrize("kind", ["text", pytest.param("tokens", marks=pytest.mark.gate)])
def test_a_resume_in_and_at_a_stage_is_exact(kind, tmp_path):
    """On the same ranks to the bit, and the ledger has each sample once."""
    data = {"data": mixed(tmp_path) if kind == "tokens" else {}} | SAVED
    stops = [("whole", 6), ("halves", 1), ("halves", 4), ("halves", 6)]
    alone = "one rank, accumulating 8"
    jobs = [recipe(alone, tmp_path / name, steps, **data) for name, steps in stops]
    whole, *_, halves = run_ranks(train_each, 1, jobs)[0]
    assert all(torch.equal(halves[key], weight) for key, weight in whole.items())
    assert state_of(tmp_path / "halves")["data"] == state_of(tmp_path / "whole")["data"]
    counts = [row["samples"] for row in rows(tmp_path / "whole") if "samples" in row]
    read = [after - before for before, after in pairwise([0, *counts])]
    assert read == [batch for batch, _ in SIZES]
    ledger = read_consumption(tmp_path / "halves")
    assert ledger.problems == []
    assert ledger.tokens == sum(batch * length for batch, length in SIZES)
    (tmp_path / "halves/recipe.toml").write_text(to_toml(jobs[-1]))
    assert replay(tmp_path / "halves", ledger)[1] == []


@pytest.mark.gate
def test_another_layout_goes_on_in_a_stage(tmp_path):
    """With the same samples: text in lanes, and tokens."""
    alone = "one rank, accumulating 8"
    kinds = {"text": {}, "tokens": mixed(tmp_path)}
    made = {name: [] for name in ("before", "after", "whole")}
    for kind, data in kinds.items():
        place, keys = tmp_path / kind, {"data": data, **SAVED}
        made["before"].append(recipe("FSDP 2", place / "halves", 3, **keys))
        made["after"].append(recipe(alone, place / "halves", **keys))
        made["whole"].append(recipe(alone, place / "whole", **keys))
    run_ranks(train_each, 2, made["before"])
    run_ranks(train_each, 1, made["after"] + made["whole"])
    for kind in kinds:
        halves, whole = (tmp_path / kind / name for name in ("halves", "whole"))
        assert state_of(halves)["data"] == state_of(whole)["data"], kind
        assert losses(halves) == pytest.approx(losses(whole), rel=1e-5), kind


def test_check_and_plan_name_the_stages(tmp_path, says):
    path = tmp_path / "staged.toml"
    path.write_text(to_toml(recipe("FSDP 2")))
    said = says("check", path, "--world-size", "2", "--job.imports", "tests.tiny")
    assert "256 tokens per step, 2,560 in 6 steps" in said
    assert "from step 3 on 16 sequences of 32: 4 at a time x 2 accumulated x 2 data" in said
    assert "512 tokens before; a rank has activations of 128 tokens, not of 64" in said
    assert "from step 5 on 8 sequences of 64: 4 at a time x 1 accumulated x 2 data" in said
    planned = plan(load_job(str(path), [], 2, "cpu").config, 2, device_type="cpu")
    assert planned.job.training.seq_len == 64
    # A pipeline keeps the activations of few of the sequences, unless all forwards come first.
    later = {"from_step": 1, "seq_len": 64, "local_batch_size": 2}
    for schedule, longest in {"1F1B": 64, "GPipe": 32}.items():
        pipeline = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule}
        sizes = {"local_batch_size": 8, "stages": [later]}
        job = tiny.job(training=sizes, parallelism=pipeline)
        assert job.largest_stage(job.degrees(2)).job.training.seq_len == longest
    found = plan_json(planned)
    assert [each["is_planned"] for each in found["stages"]] == [False, False, True]
    assert found["budget"]["tokens"] == 2560
    rows_of_plan = [line.split() for line in plan_text(found)]
    assert ["4", "*", "1,536", "8", "64", "4", "1"] in rows_of_plan


def state_of(folder, step=STEPS):
    return json.loads((folder / f"checkpoint/step-{step}/train_state.json").read_text())
