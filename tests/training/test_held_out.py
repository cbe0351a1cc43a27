"""Documents that a run holds out: never trained on, the same on every layout, after a stop too."""

import functools
import json

import pytest

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import losses, rows, train, train_each, world_of
from torchtitan.build import Observer, build, open_validator
from torchtitan.trainer import Trainer, choose

DOCUMENTS = {chr(0x4E00 + number) for number in range(60)}
"""One character each, which no other has."""


def recipe(folder, steps=6, **sections):
    """Several epochs of the documents in a file of JSON Lines."""
    file = folder.parent / "documents.jsonl"
    lines = [json.dumps({"text": each * 8}, ensure_ascii=False) for each in sorted(DOCUMENTS)]
    file.write_text("\n".join(lines))
    defaults = {
        "data": {"dataset": str(file), "validation_fraction": 0.2},
        "training": {"steps": steps},
        "lr_scheduler": {"total_steps": 6},
        "checkpoint": {"enable": True, "interval": 3},
        "validation": {"enable": True, "freq": 3, "steps": -1},
    }
    return tiny.job(folder, **tiny.merged(defaults, sections))


def texts(batch, found):
    """Add the documents of a batch."""
    for row in batch.tokens.tolist():
        text = bytes(token for token in row if token < 256).decode(errors="ignore")
        found.update(DOCUMENTS.intersection(text))
    return batch


def documents_of(job):
    """The documents that this rank trains on, and those that it validates on."""
    trained = set()
    validated = set()
    with world_of(job) as world:
        start = world.broadcast_object(choose(job) if world.rank == 0 else None)
        run = build(job, world, Observer(on_microbatch=functools.partial(texts, found=trained)))
        Trainer(run).train(start)
        run.batches.close()
        (opened,) = open_validator(build(job, world)).open_streams.values()
        for batch in opened():
            texts(batch, validated)
            if not world.sum(batch.count(), over="data"):
                break
    return trained, validated


def test_no_rank_trains_on_what_is_held_out(tmp_path):
    seen = {}
    for ranks in (1, 2):
        job = recipe(tmp_path / str(ranks), training={"steps": 8})
        found = run_ranks(documents_of, ranks, job)
        trained, validated = (set.union(*part) for part in zip(*found, strict=True))
        assert trained | validated == DOCUMENTS
        assert not trained & validated
        seen[ranks] = trained, validated
    assert seen[1] == seen[2]
    assert 5 <= len(seen[1][1]) <= 20


def test_it_is_the_same_run_on_two_ranks_and_after_a_stop(tmp_path):
    run_ranks(train_each, 1, [recipe(tmp_path / "whole"), recipe(tmp_path / "halves", steps=3)])
    run_ranks(train_each, 2, [recipe(tmp_path / "halves"), recipe(tmp_path / "two")])
    whole = losses(tmp_path / "whole"), validations(tmp_path / "whole")
    assert list(whole[1]) == [3, 6]
    for folder in (tmp_path / "halves", tmp_path / "two"):
        assert losses(folder) == pytest.approx(whole[0], rel=1e-5)
        assert validations(folder) == pytest.approx(whole[1], rel=1e-5)


def validations(folder):
    found = rows(folder)
    return {row["step"]: row["validation_loss"] for row in found if "validation_loss" in row}


def test_a_resumed_run_holds_out_the_same(tmp_path):
    run_ranks(train, 1, recipe(tmp_path / "run", steps=3))
    other = recipe(tmp_path / "run", data={"validation_fraction": 0.3})
    with pytest.raises(AssertionError, match=r"validation_fraction was 0.2 and is 0.3"):
        run_ranks(train, 1, other)
    none = recipe(tmp_path / "run", data={"validation_fraction": None}, validation={"steps": 1})
    with pytest.raises(AssertionError, match=r"validation_fraction was 0.2 and is None"):
        run_ranks(train, 1, none)
