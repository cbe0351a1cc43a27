"""Loss on held-out data: of each data set, for each byte of text, the same on every layout."""

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import rows, train
from torchtitan.device import Device
from torchtitan.features import open_validator
from torchtitan.job import JobConfig
from torchtitan.logging import configure
from torchtitan.losses import IGNORED
from torchtitan.models.settings import TextConfig
from torchtitan.parallel import Launch, open_world
from torchtitan.parts import Parts
from torchtitan.tasks.next_token import NextToken
from torchtitan.validate import Sums, ValidationConfig, together

NAMES = ("validation_loss", "validation_bits_per_byte", "validation_perplexity_per_byte")


def files(folder: Path) -> tuple[str, str]:
    """Two small data sets, of plain letters and of others."""
    texts = {"plain.txt": "How plain this is.\n" * 50, "other.txt": "Größe: 漢字 🙂\n" * 50}
    for name, text in texts.items():
        (folder / name).write_text(text)
    first, second = (str(folder / name) for name in texts)
    return first, second


def validated(folder: Path, ranks: int, **sections: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the validations of a run."""
    run_ranks(train, ranks, tiny.job(folder, **sections))
    return [row for row in rows(folder) if "validation_loss" in row]


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {}),
    "tp": (2, {"tensor_parallel_degree": 2}),
    "pp": (2, {"pipeline_parallel_degree": 2}),
    "cp": (2, {"context_parallel_degree": 2}),
}


def test_several_data_sets_are_the_same_on_every_layout(tmp_path: Path) -> None:
    names = files(tmp_path)
    validation = {"enable": True, "steps": 2, "dataset": names}
    sections: dict[str, dict[str, Any]] = {"validation": validation, "training": {"steps": 1}}
    [one] = validated(tmp_path / "one", 1, **sections)
    assert set(one) == {"step", "time", *NAMES} | {
        f"{key}/{name}" for key in NAMES for name in names
    }
    # Each data set gave as many targets, so their mean is that over all targets.
    each = [one[f"validation_loss/{name}"] for name in names]
    assert one["validation_loss"] == pytest.approx(sum(each) / 2, rel=1e-6)
    assert each[0] != pytest.approx(each[1], rel=1e-3)
    for layout, (ranks, parallelism) in LAYOUTS.items():
        [row] = validated(tmp_path / layout, ranks, **sections, parallelism=parallelism)
        for key in one.keys() - {"time"}:
            assert row[key] == pytest.approx(one[key], rel=1e-5), (layout, key)


def test_one_data_set_has_no_row_of_its_own(tmp_path: Path) -> None:
    name = files(tmp_path)[0]
    sections = {"training": {"steps": 1}}
    validation = {"enable": True, "steps": 1}
    [row] = validated(tmp_path / "a", 1, **sections, validation=validation | {"dataset": name})
    assert set(row) == {"step", "time", *NAMES}
    [listed] = validated(tmp_path / "b", 1, **sections, validation=validation | {"dataset": [name]})
    assert {key: row[key] for key in NAMES} == {key: listed[key] for key in NAMES}


def test_a_data_set_among_several_is_read_as_it_is_alone(tmp_path: Path) -> None:
    names = files(tmp_path)
    sections = {"training": {"steps": 1}}
    validation = {"enable": True, "steps": 2}
    [both] = validated(tmp_path / "both", 1, **sections, validation=validation | {"dataset": names})
    for number, name in enumerate(names):
        alone = validation | {"dataset": name}
        [row] = validated(tmp_path / str(number), 1, **sections, validation=alone)
        for key in NAMES:
            assert both[f"{key}/{name}"] == row[key]


def measured(job: JobConfig, uniform: int) -> tuple[dict[str, Any], int, int]:
    """What the validator finds of a model that is uniform over the first tokens of its vocabulary;
    how many targets there were, and how many of them bytes of text."""
    with open_world(job.degrees(Launch.read().size), job.comm, Device("cpu")) as world:
        run = Parts(job, world)
        with closing(run.data):
            [part] = run.model.parts
            for parameter in part.parameters():
                parameter.detach().zero_()

            def logits(
                module: torch.nn.Module, inputs: object, output: torch.Tensor
            ) -> torch.Tensor:
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


def test_a_model_that_is_uniform_over_bytes_has_eight_bits_a_byte(tmp_path: Path) -> None:
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


def test_special_tokens_have_a_loss_and_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_text('{"text": "four"}\n' * 100)
    validation = {"enable": True, "steps": 1, "dataset": str(tmp_path / "short.jsonl")}
    [(found, targets, text)] = run_ranks(
        measured, 1, tiny.job(tmp_path, validation=validation), 258
    )
    assert 0.6 < text / targets < 0.7  # four of six tokens
    assert found["validation_loss"] == pytest.approx(math.log(258), rel=1e-6)
    bits = math.log2(258) * targets / text
    assert found["validation_bits_per_byte"] == pytest.approx(bits, rel=1e-6)


def test_bytes_that_are_not_known_are_null_and_said_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import tokenizers

    configure()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["?", "<s>", "</s>"], vocab_size=100)
    tokenizer.normalizer = tokenizers.normalizers.NFKC()
    tokenizer.train_from_iterator(["any letters of a text"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    [row] = validated(
        tmp_path / "run",
        1,
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


def test_sums_over_data_sets_weigh_their_targets() -> None:
    task = NextToken(TextConfig(), tiny.ARGS)
    found = together([Sums(30.0, 10, (40,)), Sums(10.0, 30, (20,))])
    assert found == Sums(40.0, 40, (60,))
    assert found.values(task)["validation_loss"] == 1.0
    unknown = together([Sums(1.0, 1, ()), Sums(1.0, 1, ())]).values(task)
    assert unknown["validation_bits_per_byte"] is None
    special = Sums(1.0, 1, (0,)).values(task)  # special tokens alone
    assert special["validation_bits_per_byte"] is None
    assert Sums(1e6, 1, (1,)).values(task)["validation_perplexity_per_byte"] == math.inf


def sums(job: JobConfig) -> tuple[Sums, Sums]:
    """What two validations in a row find of the one data set."""
    with open_world(job.degrees(Launch.read().size), job.comm, Device("cpu")) as world:
        run = Parts(job, world)
        with closing(run.data):
            validator = open_validator(run)
            [name] = validator.open_streams
            return validator._measure(name), validator._measure(name)


@pytest.mark.parametrize(
    ("lengths", "layouts"),
    [([5], ["fsdp"]), ([300, 1, 20, 90, 40], [*LAYOUTS]), ([3] * 40, ["fsdp"])],
)
def test_all_of_a_data_set_is_read_once(
    lengths: list[int], layouts: list[str], tmp_path: Path
) -> None:
    """Every byte of every document, on any number of ranks, whatever lanes have none left."""
    lines = [json.dumps({"text": "x" * length}) + "\n" for length in lengths]
    (tmp_path / "held.jsonl").write_text("".join(lines))
    validation = {"enable": True, "steps": -1, "dataset": str(tmp_path / "held.jsonl")}
    lanes = 8  # one for each sequence of the global batch
    for ranks, parallelism in ((1, {}), *(LAYOUTS[name] for name in layouts)):
        job = tiny.job(validation=validation, parallelism=parallelism)
        for first, second in run_ranks(sums, ranks, job):
            assert first == second
            assert first.measured == (sum(lengths),)
            # Each document has a BOS and an EOS, and the first token of a lane is no target.
            assert first.units == sum(lengths) + 2 * len(lengths) - min(lanes, len(lengths))


@pytest.mark.parametrize(
    ("parallelism", "length", "data_ranks"),
    [
        ({}, 16, 2),
        ({"tensor_parallel_degree": 2}, 16, 1),
        ({"context_parallel_degree": 2}, 16, 1),
        ({"pipeline_parallel_degree": 2}, 32, 1),
    ],
)
def test_steps_of_each_rank_have_their_own_shape(
    parallelism: dict[str, Any], length: int, data_ranks: int, tmp_path: Path
) -> None:
    """Where training has batches of 2 times 32 tokens."""
    shape = {"unit": "local", "local_batch_size": 3, "seq_len": length}
    validation = {"enable": True, "steps": 2, "dataset": files(tmp_path)[0]} | shape
    job = tiny.job(tmp_path / "run", validation=validation, parallelism=parallelism)
    assert not tiny.problems(job, ranks=2)
    found = [first for first, _ in run_ranks(sums, 2, job)]
    assert found[0] == found[1]
    assert found[0].units == 2 * 3 * length * data_ranks
    run_ranks(train, 2, job)
    assert [row["step"] for row in rows(tmp_path / "run") if "validation_loss" in row] == [5]


def test_a_step_of_all_ranks_is_a_global_batch(tmp_path: Path) -> None:
    validation = {"enable": True, "steps": 3, "dataset": files(tmp_path)[0]}
    for ranks in (1, 2):
        for first, _ in run_ranks(sums, ranks, tiny.job(validation=validation)):
            assert first.units == 3 * 8 * 32


def test_names_are_one_or_several() -> None:
    assert ValidationConfig(dataset="a").datasets == ("a",)
    assert ValidationConfig(dataset=("a", "b")).datasets == ("a", "b")
