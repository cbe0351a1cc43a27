"""Best-fit packing in the stream, the shares of padding and cut tokens, and unknown token ids."""

import itertools
import json
import threading
from collections import Counter

import numpy as np
import pytest
import torch

from tests.token_shards import drawn_documents, rows, saved, stream_of, token_streams, write_shards
from torchtitan.config import ConfigError, Context
from torchtitan.data.order import Document, Position
from torchtitan.data.settings import DataConfig
from torchtitan.data.stream import refuse_other
from torchtitan.data.tokenizer import ByteTokenizer
from torchtitan.device import Device
from torchtitan.losses import IGNORED
from torchtitan.models.llama3.settings import Llama3Config
from torchtitan.tasks import next_token
from torchtitan.tasks.next_token import NextToken, TokenBatch

BEST_FIT = {"packing": "best_fit", "num_workers": 0}


DOCUMENTS = [
    np.arange(7 * number, 7 * number + len(document)) % 258
    for number, document in enumerate(drawn_documents(100))
]


def config_of(folder):
    return DataConfig(dataset=str(write_shards(folder / "own", DOCUMENTS)), **BEST_FIT)


def pairs(batch):
    """Count the targets that follow, in a document, the token they are predicted from."""
    found = zip(batch.tokens.flatten().tolist(), batch.targets.flatten().tolist(), strict=True)
    return Counter(pair for pair in found if pair[1] == (pair[0] + 1) % 258)


def test_padding_and_tokens_that_another_row_predicts_are_no_targets(tmp_path):
    """The block has 3 documents, of 3, 5 and 11 tokens; rows are 8 tokens long."""
    folder = write_shards(tmp_path / "own", np.split(np.arange(19), [3, 8]), shards=1)
    config = DataConfig(dataset=str(folder), shuffle=False, **BEST_FIT)
    [stream] = token_streams(config, 1, seq_len=7, batch=3)
    batch = next(stream)
    assert isinstance(batch, TokenBatch)
    # The rest of the third document starts with token 15, which the row before it predicts.
    assert batch.tokens.tolist() == [
        [0, 1, 2, 3, 4, 5, 6],
        [8, 9, 10, 11, 12, 13, 14],
        [15, 16, 17, 18, 0, 0, 0],
    ]
    assert batch.targets.tolist() == [
        [1, 2, 3, 4, 5, 6, 7],
        [9, 10, 11, 12, 13, 14, 15],
        [16, 17, 18, *[IGNORED] * 4],
    ]
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1, 1, 1], [0] * 7, [0, 0, 0, 0, -1, -1, -1]]
    assert stream.take_shares() == {"data_padding_pct": (3, 21), "data_cut_pct": (4, 18)}
    assert stream.take_shares() == {}


def test_padding_is_cut_into_short_documents(tmp_path, monkeypatch):
    """One document as long as all padding would cost attention as such a document does."""
    monkeypatch.setattr(next_token, "PADDING", 2)
    folder = write_shards(tmp_path / "own", [np.arange(4)], shards=1)
    config = DataConfig(dataset=str(folder), shuffle=False, **BEST_FIT)
    [stream] = token_streams(config, 1, seq_len=10, batch=1)
    batch = next(stream)
    assert isinstance(batch, TokenBatch)
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 0, 0, -3, -3, -4, -4, -5, -5]]


def test_documents_stay_on_the_host():
    """Their boundaries are read there; all the rest moves."""
    documents = torch.zeros(1, 4, dtype=torch.int64)
    batch = TokenBatch(*(torch.ones(1, 4, dtype=torch.int64) for _ in range(3)), documents)
    moved = batch.to("meta")
    assert moved.tokens.is_meta
    assert moved.targets.is_meta
    assert moved.positions.is_meta
    assert moved.documents is documents

    class Pinning(Device):
        def pin(self, tensor):
            return tensor.to("meta")

    assert batch.pin(Pinning("cpu")).documents is documents


def test_a_rest_that_follows_another_document_is_not_predicted_from_it(tmp_path):
    """The rest of the second document, tokens 8 to 10, is in the row of the first."""
    folder = write_shards(tmp_path / "own", np.split(np.arange(11), [3]), shards=1)
    config = DataConfig(dataset=str(folder), shuffle=False, **BEST_FIT)
    [stream] = token_streams(config, 1, seq_len=5, batch=2)
    batch = next(stream)
    assert isinstance(batch, TokenBatch)
    assert batch.tokens.tolist() == [[0, 1, 2, 8, 9], [3, 4, 5, 6, 7]]
    assert batch.targets.tolist() == [[1, 2, IGNORED, 9, 10], [4, 5, 6, 7, 8]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 4])
def test_rows_do_not_depend_on_ranks_and_workers(tmp_path, ranks, workers):
    config = config_of(tmp_path)
    [whole] = token_streams(config, 1)
    config = config.model_copy(update={"num_workers": workers})
    parts = token_streams(config, ranks)
    for _ in range(8):
        expected = next(whole)
        found = [next(part) for part in parts]
        assert expected.inputs.tolist() == list(
            itertools.chain(*(batch.inputs.tolist() for batch in found))
        )
    shares = [part.take_shares() for part in parts]
    assert {
        name: tuple(map(sum, zip(*(share[name] for share in shares), strict=True)))
        for name in shares[0]
    } == whole.take_shares()


@pytest.mark.parametrize("seq_lens", [(16, 16), (16, 40), (16, 9, 30)])
def test_a_run_with_other_sequence_lengths_predicts_every_token_once(tmp_path, seq_lens):
    """The state is that of a checkpoint, and the steps end inside of the only block."""
    config = config_of(tmp_path)
    found, state = Counter(), None
    for number, seq_len in enumerate(seq_lens):
        [stream] = token_streams(config, 1, seq_len=seq_len, batch=1)
        if state:
            stream.load_state_dict(state)
        is_last = number == len(seq_lens) - 1
        while saved([stream])["sources"][0]["position"][0] == 0:
            found += pairs(next(stream))
            if not is_last and stream.samples % 20 == 0:
                break
        state = json.loads(json.dumps(saved([stream])))
    assert found == Counter(
        (int(a), int(b)) for document in DOCUMENTS for a, b in itertools.pairwise(document)
    )


def test_joined_rows_do_not_resume_a_packed_run(tmp_path):
    config = config_of(tmp_path)
    [packed] = token_streams(config, 1)
    next(packed)
    [joined] = token_streams(config.model_copy(update={"packing": "join"}), 1)
    with pytest.raises(ConfigError, match="packing was 'best_fit' and is 'join'"):
        joined.load_state_dict(saved([packed]))


def test_a_source_that_is_read_in_part_has_enough_rows(tmp_path):
    """An epoch has at least as many rows as the run counts, for any sequence length."""
    config = config_of(tmp_path)
    source = {"path": config.dataset, "weight": 1}
    config = DataConfig.model_validate({"sources": [source], **BEST_FIT})
    tokens = sum(map(len, DOCUMENTS))
    steps = tokens // 17 // 4
    [stream] = token_streams(config, 1, steps=steps)
    for _ in range(steps):
        next(stream)
    [stream] = token_streams(config, 1, steps=steps)
    for _ in range(steps // 2):
        next(stream)
    left = (tokens - steps // 2 * 4 * 17) // 6 // 4
    [shorter] = token_streams(config, 1, seq_len=5, steps=steps // 2 + left)
    shorter.load_state_dict(saved([stream]))
    for _ in range(left):
        next(shorter)
    [shorter] = token_streams(config, 1, seq_len=5, steps=steps // 2 + left + 1)
    with pytest.raises(ConfigError, match="set repeat = true"):
        shorter.load_state_dict(saved([stream]))


@pytest.mark.parametrize("dataset", ["python_stdlib", "synthetic"])
def test_text_is_not_packed_while_training(dataset):
    config = DataConfig(dataset=dataset, packing="best_fit")
    [problem] = config.problems(Context())
    assert problem.path == "packing"
    assert "torchtitan data tokenize" in problem.message


def test_text_files_are_not_packed_while_training(tmp_path):
    (tmp_path / "text.txt").write_text("a document\n")
    config = DataConfig(dataset=str(tmp_path / "text.txt"), packing="best_fit")
    task = NextToken(Llama3Config(), type("Args", (), {"vocab_size": 258}))
    part = {"local_batch_size": 1, "accumulation": 1, "rank": 0, "ranks": 1}
    with pytest.raises(ConfigError, match="tokenize it first"):
        task.open_stream(config, seed=0, seq_len=8, **part)


def test_tokens_have_no_part_that_is_held_out(tmp_path):
    config = config_of(tmp_path).model_copy(update={"validation_fraction": 0.1})
    with pytest.raises(ConfigError, match=r"data\.validation_fraction: tokens have no held-out"):
        NextToken.check_files(config.model_copy(update={"packing": "join"}))


def test_the_unigram_baseline_ends_with_the_documents_and_counts_no_padding(tmp_path):
    """They are fewer than the tokens that it takes from a larger source."""
    config = config_of(tmp_path).model_copy(update={"report_unigram_loss": True})
    task = NextToken(Llama3Config(), type("Args", (), {"vocab_size": 258}))
    words = task.reference(config, 0, lambda: token_streams(config, 1, seq_len=59, once=True)[0])
    # The first document of a row starts without a target.
    [stream] = token_streams(config, 1, seq_len=59, once=True)
    targets = np.concatenate([next(stream).targets.flatten() for _ in range(15)])
    shares = np.bincount(targets[targets != IGNORED]) / np.sum(targets != IGNORED)
    loss = -sum(share * np.log(share) for share in shares if share)
    assert words == f"a unigram model of this text has loss {loss:.3f}"
    assert (next(stream).targets == IGNORED).all()


def test_validation_joins_its_text():
    assert DataConfig(packing="best_fit").held_out().packing == "join"


class Arrays:
    """Source of documents that are tokens."""

    def __init__(self, *contents):
        self.identity = {}
        self._contents = contents

    def epoch(self, position):
        return position.round

    def advice(self, lanes):
        return None

    def read(self, starts, lanes):
        endless = itertools.cycle(enumerate(self._contents))
        documents = (Document(Position(0, n), np.array(each)) for n, each in endless)
        return dict.fromkeys(starts, documents)


def arrays_stream(*contents, workers=0, device=None):
    part = {"local_batch_size": 1, "accumulation": 1, "rank": 0, "ranks": 1, "device": device}
    config = DataConfig(num_workers=workers)
    source = Arrays(*contents)
    return stream_of(config, source, ByteTokenizer(), seq_len=8, **part)


@pytest.mark.parametrize("token", [258, -1, 2**32 + 5])
def test_a_token_outside_of_the_vocabulary_is_found_before_the_model_sees_it(token):
    stream = arrays_stream([1, 2, 3], [4, 257, token, 5])
    with pytest.raises(
        ConfigError, match=rf"document 1 of round 0 has the token {token} at 2, .* of 258"
    ):
        next(stream)


def test_shares_of_joined_text():
    """Documents are 6 tokens with BOS and EOS, and samples have 8 inputs.

    They start at tokens 0, 8, 16, 24: the second at the third token of a document, so 4 of its
    inputs do not see where that starts, and so on.
    """
    stream = arrays_stream([1, 2, 3, 4])
    for cut in (0, 4, 2, 0):
        next(stream)
        assert stream.take_shares() == {"data_cut_pct": (cut, 8)}


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_pinned_by_the_thread_that_collates_them(workers):
    threads = {}

    class Pinning(Device):
        def pin(self, tensor):
            threads[tensor.data_ptr()] = threading.get_ident()
            return tensor

    stream = arrays_stream([1, 2, 3, 4], workers=workers, device=Pinning("cpu"))
    batch = next(stream)
    stream.close()
    pinned = {threads[tensor.data_ptr()] for tensor in (batch.tokens, batch.targets)}
    assert len(pinned) == 1
    assert (pinned == {threading.get_ident()}) == (workers == 0)


@pytest.mark.parametrize(("ranks", "batch"), [(4, 4), (2, 6)])
def test_a_packed_mixture_resumes_exactly_on_other_ranks(tmp_path, ranks, batch):
    sources = [
        {"path": str(write_shards(tmp_path / name, drawn_documents(40, seed))), "weight": 1}
        for seed, name in enumerate("ab")
    ]
    stages = [{"from_step": 5, "weights": [1, 3]}]
    repeating = [source | {"repeat": True} for source in sources]
    config = DataConfig.model_validate({"sources": repeating, "stages": stages, **BEST_FIT})
    whole = rows(token_streams(config, 1), 30)
    for steps in (4, 5, 13):
        before = token_streams(config, 2)
        assert rows(before, steps) == whole[: 4 * steps]
        state = json.loads(json.dumps(saved(before)))
        # A stage that has started is where it was, whatever the batch.
        after = token_streams(config, ranks, batch=batch if steps > 5 else 4)
        for stream in after:
            stream.load_state_dict(state)
        count = 6 if steps > 5 else 8
        found = rows(after, count)
        assert found == whole[4 * steps : 4 * steps + len(found)]


def test_a_run_does_not_resume_where_documents_end_otherwise():
    """The file of a tokenizer stays the same if another token is declared."""
    now = {"tokenizer": "huggingface:1", "bos": None, "eos": 270}
    refuse_other(now, now)
    refuse_other({"tokenizer": "huggingface:1"}, now)  # a checkpoint of before they were recorded
    with pytest.raises(ConfigError, match="different data: eos was 272 and is 270"):
        refuse_other({**now, "eos": 272}, now)
