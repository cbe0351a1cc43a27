"""Loss on held-out data: of each data set, for each byte of text, the same on every layout."""

import json
import math
from contextlib import closing
from typing import NamedTuple

import pytest
import torch

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import rows, train, train_each, world_of
from torchtitan.build import build, open_validator
from torchtitan.logging import configure
from torchtitan.losses import IGNORED
from torchtitan.models.settings import TextConfig
from torchtitan.tasks.next_token import NextToken
from torchtitan.validate import Sums, ValidationConfig, together

NAMES = ("validation_loss", "validation_bits_per_byte", "validation_perplexity_per_byte")


def files(folder):
    """Two small data sets, of plain letters and of others."""
    texts = {"plain.txt": "How plain this is.\n" * 50, "other.txt": "Größe: 漢字 🙂\n" * 50}
    for name, text in texts.items():
        (folder / name).write_text(text)
    first, second = (str(folder / name) for name in texts)
    return first, second


def validated(folder, **sections):
    """The rows of the validations of a run on one rank."""
    train(tiny.job(folder, **sections))
    return validations(folder)


def validations(folder):
    return [row for row in rows(folder) if "validation_loss" in row]


LAYOUTS = {
    "fsdp": {},
    "tp": {"tensor_parallel_degree": 2},
    "pp": {"pipeline_parallel_degree": 2},
    "pp interleaved": {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "Interleaved1F1B",
    },
    "cp": {"context_parallel_degree": 2},
}
"""Of two ranks."""


def of_several(folder, name):
    """A recipe that validates on two data sets."""
    validation = {"enable": True, "steps": 2, "dataset": files(folder)}
    sections = {"validation": validation, "training": {"steps": 1}}
    return tiny.job(folder / name, **sections, parallelism=LAYOUTS.get(name, {}))


LENGTHS = [300, 1, 20, 90, 40]


def of_all(folder, name="", lengths=LENGTHS):
    """A recipe that validates on all of a data set, whose documents have these lengths."""
    file = folder / f"{len(lengths)}.jsonl"
    file.write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in lengths))
    validation = {"enable": True, "steps": -1, "dataset": str(file)}
    return tiny.job(validation=validation, parallelism=LAYOUTS.get(name, {}))


def of_another_shape(folder, name):
    """A recipe that validates on other batches than training's, of 2 times 32 tokens."""
    shape = {"unit": "local", "local_batch_size": 3, "seq_len": 32 if name.startswith("pp") else 16}
    validation = {"enable": True, "steps": 2, "dataset": files(folder)[0]} | shape
    sections = {"validation": validation, "training": {"steps": 1}}
    return tiny.job(folder / f"shape {name}", **sections, parallelism=LAYOUTS[name])


TRAINED_IN_ANOTHER_SHAPE = ("fsdp", "pp")


class Found(NamedTuple):
    """What a rank of two finds with each of the recipes above."""

    of_all: Sums
    of_another_shape: Sums


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """All layouts in turn on the same ranks: their folder, and what each rank found."""
    folder = tmp_path_factory.mktemp("two")
    kinds = (of_all, of_another_shape, of_several)
    jobs = {name: [kind(folder, name) for kind in kinds] for name in LAYOUTS}
    return folder, run_ranks(find_all, 2, jobs)


def find_all(jobs):
    found = {}
    for name, (whole, shape, several) in jobs.items():
        found[name] = Found(sums(whole), sums(shape))
        train_each([several, shape] if name in TRAINED_IN_ANOTHER_SHAPE else [several])
    return found


@pytest.mark.costs("three validations on each of four layouts")
def test_several_data_sets_are_the_same_on_every_layout(two_ranks, tmp_path):
    folder, _ = two_ranks
    names = files(folder)
    train(of_several(folder, "one"))
    [one] = validations(folder / "one")
    of_each = {f"{key}/{name}" for key in NAMES for name in names}
    assert set(one) == {"step", "time", *NAMES, *of_each}
    # Each data set gave as many targets, so their mean is that over all targets.
    each = [one[f"validation_loss/{name}"] for name in names]
    assert one["validation_loss"] == pytest.approx(sum(each) / 2, rel=1e-6)
    assert each[0] != pytest.approx(each[1], rel=1e-3)
    for layout in LAYOUTS:
        [row] = validations(folder / layout)
        for key in one.keys() - {"time"}:
            assert row[key] == pytest.approx(one[key], rel=1e-5), (layout, key)


def test_one_data_set_has_no_row_of_its_own(tmp_path):
    name = files(tmp_path)[0]
    sections = {"training": {"steps": 1}}
    validation = {"enable": True, "steps": 1}
    [row] = validated(tmp_path / "a", **sections, validation=validation | {"dataset": name})
    assert set(row) == {"step", "time", *NAMES}
    [listed] = validated(tmp_path / "b", **sections, validation=validation | {"dataset": [name]})
    assert {key: row[key] for key in NAMES} == {key: listed[key] for key in NAMES}


def test_a_data_set_among_several_is_read_as_it_is_alone(tmp_path):
    names = files(tmp_path)
    sections = {"training": {"steps": 1}}
    validation = {"enable": True, "steps": 2}
    [both] = validated(tmp_path / "both", **sections, validation=validation | {"dataset": names})
    for number, name in enumerate(names):
        alone = validation | {"dataset": name}
        [row] = validated(tmp_path / str(number), **sections, validation=alone)
        for key in NAMES:
            assert both[f"{key}/{name}"] == row[key]


def measured(job, uniform):
    """What the validator finds of a model that is uniform over the first tokens of its vocabulary;
    how many targets there were, and how many of them bytes of text."""
    with world_of(job) as world:
        run = build(job, world)
        with closing(run.data):
            [part] = run.model.parts
            for parameter in part.parameters():
                parameter.detach().zero_()

            def logits(module, inputs, output):
                output = output.clone()
                output[..., uniform:] = -torch.inf
                return output

            hook = part.register_forward_hook(logits)
            validator = open_validator(run)
            found = validator.run()
            hook.remove()
        [stream] = validator.streams.values()
        stream.rewind()
        batches = [next(stream) for _ in range(job.validation.steps * validator.accumulation)]
        targets = torch.cat([batch.targets[batch.targets != IGNORED] for batch in batches])
        return found, len(targets), int((targets < 256).sum())


def test_a_model_that_is_uniform_over_bytes_has_eight_bits_a_byte(tmp_path):
    """No text ends within what is read, so that all targets are bytes."""
    (tmp_path / "long.txt").write_text("x" * 10_000)
    validation = {"enable": True, "steps": 1, "dataset": str(tmp_path / "long.txt")}
    data = {"add_bos": False}
    [(found, targets, text)] = run_ranks(
        measured, 1, tiny.job(tmp_path, validation=validation, data=data), 256
    )
    assert targets == text
    assert found["validation_loss"] == pytest.approx(math.log(256), rel=1e-6)
    assert found["validation_bits_per_byte"] == pytest.approx(8, rel=1e-6)
    assert found["validation_perplexity_per_byte"] == pytest.approx(256, rel=1e-5)


def test_special_tokens_have_a_loss_and_no_bytes(tmp_path):
    (tmp_path / "short.jsonl").write_text('{"text": "four"}\n' * 100)
    validation = {"enable": True, "steps": 1, "dataset": str(tmp_path / "short.jsonl")}
    [(found, targets, text)] = run_ranks(
        measured, 1, tiny.job(tmp_path, validation=validation), 258
    )
    assert 0.6 < text / targets < 0.7  # four of six tokens
    assert found["validation_loss"] == pytest.approx(math.log(258), rel=1e-6)
    bits = math.log2(258) * targets / text
    assert found["validation_bits_per_byte"] == pytest.approx(bits, rel=1e-6)


def test_bytes_that_are_not_known_are_null_and_said_so(tmp_path, capfd):
    import tokenizers

    configure()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["?", "<s>", "</s>"], vocab_size=100)
    tokenizer.normalizer = tokenizers.normalizers.NFKC()
    tokenizer.train_from_iterator(["any letters of a text"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    [row] = validated(
        tmp_path / "run",
        model={"tokenizer_path": str(tmp_path / "tokenizer.json")},
        validation={"enable": True, "steps": 1, "dataset": files(tmp_path)},
        training={"steps": 1},
    )
    assert row["validation_loss"] > 0
    assert [row[key] for key in NAMES[1:]] == [None, None]
    assert [row[f"{key}/{tmp_path}/plain.txt"] for key in NAMES[1:]] == [None, None]
    told = capfd.readouterr().err
    assert told.count("validation: bits and perplexity per byte are null") == 1
    assert "it normalizes the text first (NFKC)" in told


def test_sums_over_data_sets_weigh_their_targets():
    task = NextToken(TextConfig(), tiny.ARGS)
    found = together([Sums(30.0, 10, (40,)), Sums(10.0, 30, (20,))])
    assert found == Sums(40.0, 40, (60,))
    assert found.values(task)["validation_loss"] == 1.0
    unknown = together([Sums(1.0, 1, ()), Sums(1.0, 1, ())]).values(task)
    assert unknown["validation_bits_per_byte"] is None
    special = Sums(1.0, 1, (0,)).values(task)  # special tokens alone
    assert special["validation_bits_per_byte"] is None
    assert Sums(1e6, 1, (1,)).values(task)["validation_perplexity_per_byte"] == math.inf


def sums(job):
    """What two validations in a row both find of the one data set."""
    with world_of(job) as world:
        run = build(job, world)
        with closing(run.data):
            validator = open_validator(run)
            [name] = validator.open_streams
            first, second = validator._measure(name), validator._measure(name)
            assert first == second
            return first


def read_once(found, lengths=LENGTHS):
    """Whether that was every byte of every document, whatever lanes have none left."""
    lanes = 8  # one for each sequence of the global batch
    # Each document has a BOS and an EOS, and the first token of a lane is no target.
    units = sum(lengths) + 2 * len(lengths) - min(lanes, len(lengths))
    return (found.measured, found.units) == ((sum(lengths),), units)


def test_all_of_a_data_set_is_read_once_on_every_layout(two_ranks, tmp_path):
    assert read_once(sums(of_all(tmp_path)))
    for rank in two_ranks[1]:
        assert all(read_once(rank[name].of_all) for name in LAYOUTS)


@pytest.mark.parametrize("lengths", [[5], [3] * 40])
def test_all_of_few_and_of_many_documents_is_read_once(lengths, tmp_path):
    job = of_all(tmp_path, lengths=lengths)
    for ranks in (1, 2):
        assert all(read_once(found, lengths) for found in run_ranks(sums, ranks, job))


def test_steps_of_each_rank_have_their_own_shape(two_ranks):
    folder, (one, other) = two_ranks
    for name in LAYOUTS:
        assert not tiny.problems(of_another_shape(folder, name), ranks=2)
        found = one[name].of_another_shape
        assert found == other[name].of_another_shape
        length, data_ranks = 32 if name.startswith("pp") else 16, 2 if name == "fsdp" else 1
        assert found.units == 2 * 3 * length * data_ranks, name
    for name in TRAINED_IN_ANOTHER_SHAPE:
        assert [row["step"] for row in validations(folder / f"shape {name}")] == [1], name


def test_a_step_of_all_ranks_is_a_global_batch(tmp_path):
    validation = {"enable": True, "steps": 3, "dataset": files(tmp_path)[0]}
    for ranks in (1, 2):
        for found in run_ranks(sums, ranks, tiny.job(validation=validation)):
            assert found.units == 3 * 8 * 32


def test_names_are_one_or_several():
    assert ValidationConfig(dataset="a").datasets == ("a",)
    assert ValidationConfig(dataset=("a", "b")).datasets == ("a", "b")
