"""Samples are what the full network would give, however they are computed."""

import json
import logging
from unittest.mock import Mock

import pytest
import torch

from tests import small_weights, tiny
from tests.checkpoint.test_folder import flip
from tests.ranks import run_ranks
from tests.runs import train
from tests.small_weights import SEQ_LEN
from torchtitan.config import ConfigError
from torchtitan.convert import CONVERTERS
from torchtitan.convert.settings import ConversionTarget
from torchtitan.models.attention import SelfAttention, causal_attention
from torchtitan.tools import cli, generate
from torchtitan.tools import generate as generating
from torchtitan.tools.inference import InferenceModel, ModelLocation, find_model

pytestmark = pytest.mark.usefixtures("small")

GREEDY = generate.Sampling(temperature=0)
ROUNDED = {"name": "low_precision_attention", "rotation": "qkv"}
FLAGS = [f"--convert.0.{key}={value}" for key, value in ROUNDED.items()]
PROMPTS = [[256, *b"a long prompt, of many tokens"], [256], [256, *b"short"]]
RECIPE = {"model.tokenizer_path": None}


def checkpoint(folder, flavor="plain"):
    return small_weights.saved(folder / "ours", flavor, RECIPE)


def stored_of(path):
    """Nothing ends a text, so that all samples are as long as wanted."""
    return find_model(ModelLocation(path))._replace(ends=frozenset())


def rows(prompts):
    return [generate.Row(prompt, generate.generator_of(0, n)) for n, prompt in enumerate(prompts)]


def continued(model, prompts, how=GREEDY):
    asked = rows(prompts)
    generate.continue_rows(model, asked, 12, how)
    return asked


def without_cache(model, prompt, count):
    """The likeliest tokens, each by a forward over all before it."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model.logits(torch.tensor([tokens]))[0, -1, : model.vocabulary]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("at_a_time", [512, 7])
@pytest.mark.parametrize("flavor", ["plain", "both", "window"])
def test_cache_changes_nothing(flavor, at_a_time, tmp_path, monkeypatch):
    monkeypatch.setattr(generating, "PREFILL_CHUNK", at_a_time)
    model = InferenceModel(stored_of(checkpoint(tmp_path, flavor)), 64, torch.float32)
    whole = [model.logits(torch.tensor([prompt]))[0, -1] for prompt in PROMPTS]
    with generate.cached(model.network, 64) as cache:
        torch.testing.assert_close(
            generate.read(model, cache, PROMPTS), torch.stack(whole), atol=1e-5, rtol=0
        )
    found = continued(model, PROMPTS)
    for prompt, row in zip(PROMPTS, found, strict=True):
        assert row.tokens == without_cache(model, prompt, 12)
        assert row.ended == "length"


def test_each_new_token_costs_one_position_and_has_the_logits_of_the_whole(tmp_path):
    model = InferenceModel(stored_of(checkpoint(tmp_path)), 64, torch.float32)
    seen = []
    sizes = []

    def note(module, inputs, output):
        sizes.append(inputs[0].shape[1])
        seen.append(output[:, -1])

    hook = model.network.register_forward_hook(note)
    [row] = continued(model, PROMPTS[:1])
    hook.remove()
    assert sizes == [len(PROMPTS[0]), *[1] * 11]
    whole = model.logits(torch.tensor([[*row.prompt, *row.tokens[:-1]]]))[0]
    torch.testing.assert_close(torch.cat(seen), whole[-12:], atol=1e-5, rtol=0)
    cores = [m.core for m in model.network.modules() if isinstance(m, SelfAttention)]
    assert cores == [causal_attention] * 3  # and the cache is gone


def test_a_row_knows_nothing_of_the_others(tmp_path):
    how = generate.Sampling(temperature=0.9, top_k=40, top_p=0.9)
    model = InferenceModel(stored_of(checkpoint(tmp_path)), 64, torch.float32)
    together = [row.tokens for row in continued(model, PROMPTS, how)]
    for number, prompt in enumerate(PROMPTS):
        alone = generate.Row(prompt, generate.generator_of(0, number))
        generate.continue_rows(model, [alone], 12, how)
        assert alone.tokens == together[number]


def test_an_end_ends_its_row_alone(tmp_path):
    stored = stored_of(checkpoint(tmp_path))
    model = InferenceModel(stored, 64, torch.float32)
    first, *others = (row.tokens for row in continued(model, PROMPTS))
    end = next(token for token in first if all(token not in other for other in others))
    model.stored = stored._replace(ends=frozenset({end}))
    ended, *rest = continued(model, PROMPTS)
    assert (ended.tokens, ended.ended) == (first[: first.index(end)], "end of text")
    assert [row.tokens for row in rest] == others


@pytest.mark.filterwarnings("default")  # what transformers deprecates is not our concern
@pytest.mark.parametrize("flavor", ["plain", "scaled", "tied", "window"])
def test_likeliest_tokens_are_those_of_transformers(flavor, tmp_path):
    from transformers import AutoModelForCausalLM

    path = checkpoint(tmp_path, flavor)
    folder = small_weights.run(path, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    model = InferenceModel(stored_of(path), 64, torch.float32)
    model.vocabulary = 300  # they draw from all of it
    for prompt, row in zip(PROMPTS, continued(model, PROMPTS), strict=True):
        expected = theirs.generate(torch.tensor([prompt]), **settings)[0]
        assert row.tokens == expected[len(prompt) :].tolist()


# --- choosing ---


def drawn(logits, how, count=4000):
    """How often each token is chosen."""
    numbers = torch.rand(count, generator=generate.generator_of(1))
    chosen = generate.choose(torch.tensor(logits).expand(count, -1), numbers, how)
    return torch.bincount(chosen, minlength=len(logits)) / count


def test_tokens_are_drawn_by_their_probability():
    logits = [1.0, 3.0, 2.0, -1.0]
    for temperature in (0.5, 1.0, 2.0):
        expected = (torch.tensor(logits) / temperature).softmax(-1)
        found = drawn(logits, generate.Sampling(temperature))
        torch.testing.assert_close(found, expected, atol=0.03, rtol=0)


def test_what_is_kept_of_the_likeliest():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    cases = {
        generate.Sampling(top_k=2): [0.625, 0.375, 0, 0],
        generate.Sampling(top_k=9): [0.5, 0.3, 0.15, 0.05],
        generate.Sampling(top_p=0.7): [0.625, 0.375, 0, 0],
        generate.Sampling(top_p=0.81): [0.5263, 0.3158, 0.1579, 0],
        generate.Sampling(top_p=0.01): [1, 0, 0, 0],
        generate.Sampling(top_p=0): [1, 0, 0, 0],
        generate.Sampling(top_k=3, top_p=0.6): [0.625, 0.375, 0, 0],
        generate.Sampling(temperature=0): [1, 0, 0, 0],
    }
    for how, expected in cases.items():
        found, wanted = drawn(logits, how), torch.tensor(expected, dtype=torch.float32)
        torch.testing.assert_close(found, wanted, atol=0.03, rtol=0)
        assert torch.equal(found > 0, wanted > 0), how


def test_the_largest_number_still_picks_a_token_that_is_kept():
    logits = torch.randn(1, 1000, generator=generate.generator_of(0))
    almost = torch.tensor([1 - 2**-24])
    kept = logits[0].topk(5).indices
    assert generate.choose(logits, almost, generate.Sampling(top_k=5))[0] == kept[-1]


# --- the command ---


def results(capfd, *words):
    assert cli.main(["generate", *words, "--json"]) == 0
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_command_on_a_run_and_on_the_same_weights_elsewhere(tmp_path, capfd):
    job = tiny.job(tmp_path / "run", checkpoint={"enable": True}, training={"steps": 1})
    run_ranks(train, 2, job)
    capfd.readouterr()
    words = ["--prompt", "def f(", "--prompt", "é", "--tokens", "5", "--samples", "2"]
    run = str(tmp_path / "run")
    found = results(capfd, run, *words)
    assert [(one["prompt"], one["sample"]) for one in found] == [
        *(("def f(", 1), ("def f(", 2)),
        *(("é", 1), ("é", 2)),
    ]
    assert len({str(one["tokens"]) for one in found}) == 4
    step = str(tmp_path / "run/checkpoint/step-1")
    assert results(capfd, step, *words, "--batch-size", "1") == found
    assert results(capfd, run, *words, "--seed", "1") != found

    hf = str(small_weights.run(tmp_path / "run", tmp_path / "hf"))
    assert results(capfd, hf, *words) == found
    meta = str(small_weights.run(tmp_path / "run", tmp_path / "meta", target_format="meta"))
    given = ["--model", "tiny", "--flavor", "tiny", *words]
    assert cli.main(["generate", meta, *given]) == 2
    said = capfd.readouterr().err
    assert "contains no tokenizer\n  name one with --tokenizer (a file, a folder, or bytes" in said
    assert results(capfd, meta, "--tokenizer", "bytes", *given) == found


def test_tokenizer_beside_weights_and_prompts_in_a_file(tmp_path, capfd):
    tokenizer = tmp_path / "tokenizer.json"
    words = ["--vocab-size", "300", "--documents", "20", "--output", str(tokenizer)]
    assert cli.main(["tokenizer", "train", *words]) == 0
    recipe = {"model.tokenizer_path": str(tokenizer), "data.add_bos": True}
    path = small_weights.saved(tmp_path / "ours", recipe=recipe)
    hf = small_weights.run(path, tmp_path / "hf")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(\n\n  import os\n")
    capfd.readouterr()
    words = ["--prompts-file", str(prompts), "--tokens", "6", "--temperature", "0"]
    found = results(capfd, str(hf), *words)
    assert [one["prompt"] for one in found] == ["def f(", "  import os"]
    assert results(capfd, str(path), *words) == found
    tokenizer.unlink()
    assert results(capfd, str(hf), *words) == found  # it has its own


def test_text_that_grows_is_the_text_that_is_printed_at_once(tmp_path, capfd):
    words = [str(checkpoint(tmp_path)), "--prompt", "a", "--prompt", "b", "--tokens", "20"]
    assert cli.main(["generate", *words, "--batch-size", "1"]) == 0
    grown = capfd.readouterr()
    assert cli.main(["generate", *words]) == 0
    assert capfd.readouterr().out == grown.out
    first, second = grown.out.split("=== prompt 2\n")
    assert first.startswith("=== prompt 1\na")
    assert second.startswith("b")
    [one] = results(capfd, *words[:3], "--tokens", "20")
    assert first == f"=== prompt 1\na{one['continuation']}\n\n"
    assert cli.main(["generate", *words[:3], "--tokens", "20"]) == 0
    assert capfd.readouterr().out == f"a{one['continuation']}\n\n"
    assert "tokens/s" in grown.err


def test_longer_than_in_training_is_said(tmp_path, capfd):
    path = checkpoint(tmp_path)
    [found] = results(capfd, str(path), "--tokens", str(SEQ_LEN), "--temperature", "0")
    assert len(found["tokens"]) == SEQ_LEN
    model = InferenceModel(find_model(ModelLocation(path)), SEQ_LEN + 1, torch.float32)
    assert found["tokens"] == without_cache(model, [256], SEQ_LEN)
    cli.main(["generate", str(path), "--tokens", str(SEQ_LEN)])
    told = capfd.readouterr().err
    assert "the model was trained on sequences of 96 tokens, but these have up to 97" in told


def test_mistakes(tmp_path, says):
    path = checkpoint(tmp_path)
    lost = small_weights.saved(tmp_path / "lost", recipe={"model.tokenizer_path": "gone.json"})
    unsaid = small_weights.saved(tmp_path / "unsaid")
    cases = {
        (str(tmp_path / "nowhere"),): "nowhere: there is no such folder",
        (str(lost),): "no tokenizer at gone.json: there is no such file or folder; "
        "or set another with --tokenizer",
        (str(unsaid),): f"{unsaid}: it does not record its tokenizer\n  set it with --tokenizer",
        (str(path), "--prompts-file", "none.txt"): "file: got none.txt; there is no such file",
        (str(path), "--prompts-file", *map(str, path.glob("*.safetensors"))): "not UTF-8 text (",
        (str(path), "--imports", "not_there"): (
            "--imports: got not_there; it cannot be imported: No module named 'not_there'"
        ),
    }
    for words, message in cases.items():
        assert message in says("generate", *words, status=2)
    for words in (["--top-p", "1.5"], ["--temperature", "-1"], ["--tokens", "0"]):
        assert cli.main(["generate", str(path), *words]) == 2


def test_a_weight_that_is_not_what_was_saved_is_refused(tmp_path, says):
    path = checkpoint(tmp_path)
    [file] = path.glob("*.safetensors")
    flip(file, -8)
    assert "differs from what was saved" in says("generate", path, status=2)


# --- converters ---


def converted_checkpoint(folder, *converters):
    recipe = dict(RECIPE)
    for number, converter in enumerate(converters):
        recipe |= {f"convert.{number}.{key}": value for key, value in converter.items()}
    return small_weights.saved(folder / "ours", recipe=recipe)


def expected(rounded):
    """Logits of the network that a run would train."""
    network = small_weights.network()
    if rounded:
        config = CONVERTERS[ROUNDED["name"]].model_validate(ROUNDED)
        assert config.convert(network, ConversionTarget(False, False)).changed
    with torch.no_grad():
        return network(torch.tensor([PROMPTS[0]]))


@pytest.mark.parametrize(
    ("recorded", "chosen"), [([ROUNDED], None), ([], [ROUNDED]), ([ROUNDED], []), ([], None)]
)
def test_model_is_converted(recorded, chosen, tmp_path):
    path = converted_checkpoint(tmp_path, *recorded)
    rounded = bool(recorded if chosen is None else chosen)
    convert = chosen and tuple(CONVERTERS[each["name"]].model_validate(each) for each in chosen)
    place = ModelLocation(path, convert=() if chosen == [] else convert)
    model = InferenceModel(find_model(place), SEQ_LEN, torch.float32)
    logits = model.logits(torch.tensor([PROMPTS[0]]))
    row = generate.Row(PROMPTS[0], generate.generator_of(0, 0))
    generate.continue_rows(model, [row], 8, generate.Sampling(temperature=0))
    tokens = list(PROMPTS[0])
    for _ in range(8):
        tokens.append(int(model.logits(torch.tensor([tokens]))[0, -1, :258].argmax()))
    torch.testing.assert_close(logits, expected(rounded), atol=1e-4, rtol=0)
    assert (logits - expected(not rounded)).abs().max() > 1e-2
    assert row.tokens == tokens[len(PROMPTS[0]) :], "keys are rounded once, as without the cache"


def test_converters_for_training_are_left_out_in_words(tmp_path, caplog):
    path = converted_checkpoint(tmp_path, {"name": "float8", "recipe": "rowwise"}, ROUNDED)
    with caplog.at_level(logging.WARNING):
        stored = find_model(ModelLocation(path))
    assert [each.name for each in stored.convert] == ["low_precision_attention"]
    assert "the recipe's converter float8 is not applied: it serves training" in caplog.text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--convert.0.name=float8"], "--convert.0.name: got float8; it serves training"),
        ([*FLAGS, "--convert.0.scale=head"], "of a token depends on the texts"),
        ([*FLAGS, "--convert.0.filter_fqns", "layers"], "leaves all attention of small as it is"),
        ([*FLAGS, "--convert.0.rotate=qk"], "--convert.0.rotate: unknown key of low_precision"),
        ([*FLAGS, "--no-convert"], "--no-convert: --convert.0.name=low_precision_attention asks"),
    ],
)
def test_other_converters_are_refused(flags, message, tmp_path, capsys):
    assert cli.main(["generate", str(converted_checkpoint(tmp_path)), *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_flags_replace_those_of_the_recipe(tmp_path, monkeypatch):
    path, stop = converted_checkpoint(tmp_path, ROUNDED), Mock(side_effect=ConfigError("seen"))
    monkeypatch.setattr(generating, "InferenceModel", stop)
    for flags in ([], [FLAGS[0], "--convert.0.dtype", "int8"], ["--no-convert"]):
        assert cli.main(["generate", str(path), *flags]) == 2
    (recorded,), (chosen,), none = (call.args[0].convert for call in stop.call_args_list)
    assert (recorded.rotation, chosen.rotation, chosen.dtype) == ("qkv", "none", "int8")
    assert none == ()
