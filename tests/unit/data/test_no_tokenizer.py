"""Stored tokens without a tokenizer: they train, and what needs text says that there is none."""

import json
import struct

import numpy as np
import pytest

from tests import tiny
from tests.runs import rows, train
from tests.token_shards import drawn_documents, saved, write_shards
from tests.token_shards import rows as samples
from torchtitan.build import open_task
from torchtitan.checkpoint.weights.extras import Extras
from torchtitan.config import ConfigError
from torchtitan.data.tokens.raw import RawFormat
from torchtitan.inputs import problems_of_stream
from torchtitan.tools.cli import main
from torchtitan.trainer import problems_of_task

END = 290
"""Beyond the ids of bytes."""
RAW = {"name": "raw", "suffix": ".bin", "end": END}


def recipe(folder, **sections):
    documents = [np.append(tokens, END) for tokens in drawn_documents(60)]
    file = folder / "train.bin"
    file.write_bytes(np.concatenate(documents).astype("<u2").tobytes())
    return tiny.job(data={"dataset": str(file), "format": RAW}, **sections)


def test_tokens_train_without_a_tokenizer(tmp_path, capsys):
    job = recipe(tmp_path)
    held_out = {"enable": True, "dataset": job.data.dataset, "steps": 1}
    run = {"dump_folder": tmp_path / "run", "validation": held_out}
    job = recipe(tmp_path, checkpoint={"enable": True, "interval": 3}, **run)
    assert not list(problems_of_task(job))
    train(job)
    [validated] = [row for row in rows(tmp_path / "run") if "validation_loss" in row]
    assert validated["validation_bits_per_byte"] is None
    assert main(["generate", str(tmp_path / "run"), "--prompt", "a"]) == 2
    assert "does not record its tokenizer" in capsys.readouterr().err
    state = json.loads((tmp_path / "run/checkpoint/step-3/train_state.json").read_text())
    assert Extras.of_recipe(state["recipe"]) == Extras(seq_len=32)


def test_text_beside_tokens_without_a_tokenizer_is_refused(tmp_path):
    [problem] = problems_of_task(recipe(tmp_path, validation={"enable": True}))
    assert "python_stdlib_validation is text" in problem.message


def test_tokens_of_a_small_vocabulary_need_no_bytes(tmp_path):
    job = recipe(tmp_path, model={"vocab_size": 295})
    assert open_task(job).vocab_size == 295
    of_bytes = write_shards(tmp_path / "shards", drawn_documents(9))
    job = tiny.job(data={"dataset": str(of_bytes)}, model={"vocab_size": 65})
    with pytest.raises(ConfigError, match="has 258 tokens, but the model's vocabulary only 65"):
        open_task(job)


def test_a_run_whose_tokens_were_taken_for_bytes_goes_on(tmp_path):
    job = recipe(tmp_path)

    def stream():
        part = {"local_batch_size": 4, "accumulation": 1, "rank": 0, "ranks": 1}
        return open_task(job).open_stream(job.data, seed=0, seq_len=16, **part)

    before, after = stream(), stream()
    samples([before], 2)
    state = saved([before])
    state["identity"] |= {"tokenizer": "bytes", "bos": 256, "eos": 257}
    after.load_state_dict(state)
    assert samples([after], 1) == samples([before], 1)


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")]
)
def test_the_header_of_llm_c_is_no_tokens(magic, version, dtype, tmp_path):
    tokens = np.array([END, 1, 2, END, 3], dtype)
    header = struct.pack("<3i", magic, version, len(tokens)).ljust(1024, b"\0")
    (tmp_path / "a.bin").write_bytes(header + tokens.tobytes())
    job = tiny.job(data={"dataset": str(tmp_path / "a.bin"), "format": RAW})
    itemsize = tokens.itemsize
    [table] = RawFormat(suffix=".bin", end=END).tables(tmp_path, open_task(job).tokenizer)
    assert (table.dtype, table.lengths.tolist()) == (tokens.dtype.name, [1, 3, 1])
    assert table.starts[0] == 1024
    for damaged in (header[:40], header + tokens.tobytes()[:-itemsize]):
        (tmp_path / "a.bin").write_bytes(damaged)
        with pytest.raises(ConfigError, match="and its header is that of 5 "):
            list(RawFormat(suffix=".bin", end=END).tables(tmp_path, open_task(job).tokenizer))


def test_an_end_beyond_the_vocabulary_is_refused_before_the_run(tmp_path):
    job = recipe(tmp_path, model={"vocab_size": END})
    [problem] = problems_of_stream(job, 1, is_new=True)
    assert f"data.format.end: got {END}; the model's vocabulary has {END}" in problem.message


def test_an_end_must_be_known(tmp_path):
    job = recipe(tmp_path)
    with pytest.raises(ConfigError, match=r"set data\.format\.name .* `end` to the token"):
        list(RawFormat(suffix=".bin").tables(tmp_path, open_task(job).tokenizer))
