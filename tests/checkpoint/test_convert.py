"""Weights to other formats and back, and what others make of them."""

import ctypes
import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.checkpoint.test_folder import flip
from tests.checkpoint.test_folder import run as trained
from tests.oracles import code_of_meta
from tests.ranks import run_ranks
from tests.runs import train
from tests.small_weights import (
    ARGS,
    FLAVORS,
    IN_META,
    SEQ_LEN,
    SPEC,
    content,
    network,
    run,
    same,
    saved,
    tokens,
    weights,
)
from torchtitan.checkpoint.folder import read_state
from torchtitan.checkpoint.manifest import read_manifest
from torchtitan.checkpoint.storage import write_tensors
from torchtitan.checkpoint.weights import hugging_face_files, opening
from torchtitan.checkpoint.weights.conversion import ConvertOptions, convert, parse_size
from torchtitan.checkpoint.weights.extras import Extras
from torchtitan.checkpoint.weights.foreign import ForeignWeights
from torchtitan.checkpoint.weights.network import Network, in_recipe
from torchtitan.checkpoint.weights.opening import Verified
from torchtitan.checks import load_job
from torchtitan.config import ConfigError
from torchtitan.data import leading_tokens, load_tokenizer, train_bpe, train_tokenizer
from torchtitan.data.tokenizer import ByteTokenizer
from torchtitan.models import MODELS
from torchtitan.models.settings import TextConfig
from torchtitan.tools.cli import main
from torchtitan.tools.inference import ModelLocation, find_model
from torchtitan.trainer import choose

pytestmark = pytest.mark.usefixtures("small")


# --- there and back ---


@pytest.mark.parametrize(
    ("other", "flavor"),
    [*(("hf", each) for each in FLAVORS), *(("meta", each) for each in IN_META)],
)
def test_there_and_back_is_the_same_to_the_bit(other, flavor, tmp_path):
    source = saved(tmp_path / "ours", flavor)
    size = {"max_shard_size": "60KB"} if other == "hf" else {}
    away = run(source, tmp_path / "away", target_format=other, **size)
    back = run(away, tmp_path / "back", flavor=flavor, model="small", max_shard_size="60KB")
    assert same(content(back), weights(flavor))
    assert len(list(back.glob("*.safetensors"))) > 1
    assert read_manifest(back).model_only


def test_from_one_to_the_other_needs_no_flavor(tmp_path, monkeypatch):
    source = saved(tmp_path / "ours", "plain")
    monkeypatch.setitem(MODELS._entries, "small", dataclasses.replace(SPEC, flavors={}))
    monkeypatch.setattr(opening, "of_recipe", lambda *_: Network(SPEC, ARGS))
    away = run(source, tmp_path / "hf", target_format="hf")
    meta = run(away, tmp_path / "meta", target_format="meta")
    again = run(meta, tmp_path / "again", target_format="hf")
    assert same(load_file(again / "model.safetensors"), load_file(away / "model.safetensors"))


def test_files_are_of_the_size_asked_for_and_the_index_names_each_tensor(tmp_path):
    folder = run(saved(tmp_path / "ours"), tmp_path / "hf", max_shard_size="80KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    assert next(iter(files)) == f"model-00001-of-{len(files):05}.safetensors"
    assert index["weight_map"] == {name: file for file in files for name in files[file]}
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in files.values()]
    assert sum(sizes) == index["metadata"]["total_size"]
    assert max(sizes) <= 80_000
    assert len(files) <= sum(sizes) / 60_000


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_have_the_mode_of_the_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        run(saved(tmp_path / "ours"), tmp_path / "hf")
    finally:
        os.umask(before)
    files = list((tmp_path / "hf").iterdir())
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}


def test_dtype_is_that_asked_for(tmp_path):
    folder = run(saved(tmp_path / "ours"), tmp_path / "hf", dtype="bfloat16")
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    back = run(folder, tmp_path / "back")
    rounded = {name: tensor.bfloat16() for name, tensor in weights().items()}
    assert same(content(back), rounded)
    widened = content(run(folder, tmp_path / "wide", target_format="ours", dtype="float32"))
    assert same(widened, {name: tensor.float() for name, tensor in rounded.items()})


# --- what others make of it ---


@pytest.mark.filterwarnings("default")  # what transformers deprecates is not our concern
@pytest.mark.parametrize("flavor", FLAVORS)
def test_transformers_loads_it_and_gives_the_same_logits(flavor, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = run(saved(tmp_path / "ours", flavor), tmp_path / "hf", max_shard_size="60KB")
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        logits, expected = theirs(tokens()).logits, network(flavor)(tokens())
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("flavor", FLAVORS)
def test_what_transformers_saves_is_read(flavor, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    about = SPEC.formats["hf"].config(FLAVORS[flavor], SEQ_LEN) | {"initializer_range": 0.1}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**about)).eval()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    assert "rope_parameters" in (tmp_path / "hf/config.json").read_text()
    ours = network(flavor)
    read = content(run(tmp_path / "hf", tmp_path / "ours"))
    ours.load_state_dict({name.removeprefix("model."): t for name, t in read.items()})
    with torch.no_grad():
        logits, expected = ours(tokens()), theirs(tokens()).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("flavor", ["plain", "tied"])
def test_metas_code_loads_it_and_gives_the_same_logits(flavor, tmp_path):
    folder = run(saved(tmp_path / "ours", flavor), tmp_path / "meta", target_format="meta")
    params = json.loads((folder / "params.json").read_text())
    with code_of_meta() as meta:
        args = meta.ModelArgs(max_batch_size=2, max_seq_len=SEQ_LEN, **params)
        theirs = meta.Transformer(args)
    theirs.load_state_dict(torch.load(folder / "consolidated.00.pth"), strict=True)
    with torch.no_grad():
        logits, expected = theirs(tokens(), start_pos=0), network(flavor)(tokens())
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("default")
def test_tokenizer_goes_along_and_says_where_a_text_ends(tmp_path):
    from transformers import AutoTokenizer, GenerationConfig

    home = tmp_path / "tokenizer"
    home.mkdir()
    (tmp_path / "notes.txt").write_text("a text of some words, and of other words too\n" * 50)
    train_tokenizer(
        str(tmp_path / "notes.txt"), None, vocab_size=300, output=str(home / "tokenizer.json")
    )
    source = saved(tmp_path / "ours", recipe={"model.tokenizer_path": str(home)})
    folder = run(source, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "of some other words\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    own = Extras.of_recipe({"model.tokenizer_path": str(home)})
    generation = GenerationConfig.from_pretrained(folder)
    assert own.eos == tokenizer.eos_token_id == generation.eos_token_id
    # And all the way round, by what a checkpoint of ours says of itself.
    again = run(run(folder, tmp_path / "back"), tmp_path / "again")
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in again.iterdir()}
    assert all((folder / name).read_bytes() == (again / name).read_bytes() for name in names)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("declared", [None, True, False])
def test_an_exported_tokenizer_starts_texts_as_training_did(declared, add_bos, tmp_path):
    from transformers import AutoTokenizer

    home = tmp_path / "tokenizer"
    train_bpe(["a text of some words\n" * 9], 300, home / "tokenizer.json")
    if declared is not None:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": declared}
        config |= {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
        (home / "tokenizer_config.json").write_text(json.dumps(config))
    recipe = {"model.tokenizer_path": str(home), "data.add_bos": add_bos}
    Extras.of_recipe(recipe).copy_tokenizer(tmp_path)
    own = load_tokenizer(str(home))
    expected = [*leading_tokens(own, add_bos, None), *own.encode("some words")]
    assert AutoTokenizer.from_pretrained(tmp_path)("some words")["input_ids"] == expected
    adds = declared is not False if add_bos is None else add_bos
    assert (expected[0] == own.bos) == adds


def test_the_tokenizer_of_the_run_is_exported_by_any_name(tmp_path):
    """And no other one that happens to be next to it."""
    home = tmp_path / "tokenizers"
    train_bpe(["a text of some words\n" * 9], 300, home / "code.json")
    train_bpe(["quite another one\n" * 9], 280, home / "tokenizer.json")
    (home / "special_tokens_map.json").write_text("{}")
    source = saved(tmp_path / "ours", recipe={"model.tokenizer_path": str(home / "code.json")})
    folder = run(source, tmp_path / "hf")
    assert (folder / "tokenizer.json").read_bytes() == (home / "code.json").read_bytes()
    assert not (folder / "special_tokens_map.json").exists()


def test_a_format_without_the_tokenizer_says_so(tmp_path, caplog):
    path = tmp_path / "code.json"
    train_bpe(["a text of some words\n" * 9], 300, path)
    source = saved(tmp_path / "ours", recipe={"model.tokenizer_path": str(path)})
    run(source, tmp_path / "meta", target_format="meta")
    assert f"without their tokenizer, {path}: this format has tokenizer.model" in caplog.text


def test_weights_of_bytes_say_so_in_every_copy(tmp_path):
    source = saved(tmp_path / "ours", recipe={"model.tokenizer_path": None})
    folder = run(source, tmp_path / "hf")
    for path in (
        folder,
        run(folder, tmp_path / "back"),
        run(folder, tmp_path / "again", target_format="hf"),
    ):
        assert isinstance(find_model(ModelLocation(path)).tokenizer, ByteTokenizer)


# --- what cannot be ---


def refused(capsys, *words):
    """What the command says of a conversion that cannot be, and leaves nothing of."""
    destination = Path(str(words[1]))
    before = list(destination.parent.iterdir())
    assert main(["checkpoint", "convert", *map(str, words)]) == 2
    assert list(destination.parent.iterdir()) == before
    return capsys.readouterr().err.removeprefix("error: ")


def test_command_converts_and_says_so(tmp_path, capsys):
    source, folder = saved(tmp_path / "ours/step-7"), tmp_path / "new/hf"
    words = ["checkpoint", "convert", str(source.parent), str(folder)]
    assert main([*words, "--to", "hf", "--dtype", "float16", "--max-shard-size", "1MB"]) == 0
    count = sum(p.numel() for p in network().parameters())
    assert f"{folder}: {count:,} parameters in the format hf" in capsys.readouterr().err
    assert {path.name for path in folder.parent.iterdir()} == {"hf"}


def test_command_refuses_what_cannot_be(tmp_path, capsys):
    ours, new = saved(tmp_path / "ours"), tmp_path / "new"
    assert refused(capsys, ours, ours) == f"{ours}: already exists; nothing was written\n"
    nowhere, empty = tmp_path / "nowhere", tmp_path / "empty"
    empty.mkdir()
    assert refused(capsys, nowhere, new) == f"{nowhere}: there is no such folder\n"
    assert "found no weights; looked for manifest.json" in refused(capsys, empty, new)
    (empty / "params.json").touch()
    (empty / "model.safetensors").touch()
    both = f"{empty}: it contains hf and meta\n  choose one with --from"
    assert both in refused(capsys, empty, new)
    assert "--model: got smal" not in refused(capsys, empty, new, "--from", "hf")
    said = refused(capsys, empty, new, "--from", "hf", "--model", "smal")
    assert said.startswith('--model: got "smal"\n  did you mean small?\n  allowed: llama3, ')
    said = refused(capsys, ours, new, "--flavor", "plane")
    assert said == (
        f'{ours}: flavor: got "plane"\n  did you mean plain?\n'
        "  allowed: plain, tied, scaled, both, window\n"
    )
    said = refused(capsys, ours, new, "--max-shard-size", "big")
    assert said == "--max-shard-size: got big\n  wanted a size such as 5GB or 512MiB\n"
    said = refused(capsys, ours, new, "--to", "meta", "--max-shard-size", "5GB")
    assert (
        said == "--max-shard-size: not supported with Meta's format, which is written as one file\n"
    )
    said = refused(capsys, ours, new, "--imports", "no_such_module")
    assert said.startswith("--imports: got no_such_module; it cannot be imported")


def test_models_from_outside_are_imported(tmp_path, monkeypatch):
    folder = run(saved(tmp_path / "ours", recipe={"job.imports": ["own"]}), tmp_path / "hf")
    module = "from tests.small_weights import MODELS, SPEC\nMODELS['small'] = SPEC\n"
    for name in ("small_outside", "own"):
        (tmp_path / f"{name}.py").write_text(module)
    monkeypatch.delitem(MODELS._entries, "small")
    monkeypatch.syspath_prepend(tmp_path)
    words = ["checkpoint", "convert", str(folder), str(tmp_path / "new"), "--model", "small"]
    assert main(words) == 2
    assert main([*words, "--imports", "small_outside"]) == 0
    assert same(content(tmp_path / "new"), weights())
    monkeypatch.delitem(MODELS._entries, "small")
    assert main([*words[:2], str(tmp_path / "ours"), str(tmp_path / "named by its recipe")]) == 0


def test_numbers_that_a_dtype_cannot_hold_are_told(tmp_path):
    source = tmp_path / "ours"
    source.mkdir()
    large = weights() | {"model.norm.weight": torch.full((ARGS.dim,), 1e5)}
    about = {"recipe": {"model.name": "small", "model.flavor": "plain"}}
    write_tensors(source, large.items(), about, 10**9)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has values beyond .* 65504"):
        run(source, tmp_path / "hf", dtype="float16")
    assert run(source, tmp_path / "hf", dtype="bfloat16").is_dir()


def test_weights_of_no_flavor_are_those_of_one_with_other_sizes(tmp_path, monkeypatch):
    folder = run(saved(tmp_path / "ours", "scaled"), tmp_path / "hf")
    without = {name: args for name, args in FLAVORS.items() if name != "scaled"}
    monkeypatch.setitem(MODELS._entries, "small", dataclasses.replace(SPEC, flavors=without))
    back = run(folder, tmp_path / "back", model="small")
    recipe = read_state(back, read_manifest(back))["recipe"]
    assert recipe["model.flavor"] == "plain"
    assert in_recipe(recipe).args == FLAVORS["scaled"]
    assert same(content(back), weights("scaled"))


def test_weights_that_no_recipe_could_name_are_told_with_the_nearest_flavor(tmp_path, monkeypatch):
    """As its settings have no keys for sizes."""
    folder = run(saved(tmp_path / "ours", "scaled"), tmp_path / "hf")
    without = {name: args for name, args in FLAVORS.items() if name != "scaled"}
    small = dataclasses.replace(SPEC, flavors=without, settings=TextConfig)
    monkeypatch.setitem(MODELS._entries, "small", small)
    with pytest.raises(ConfigError) as error:
        run(folder, tmp_path / "new", model="small")
    assert "no flavor of small matches these weights" in str(error.value)
    closest = "The closest is plain, but ffn_dim is 80 instead of 64; rope_scaling is"
    assert closest in str(error.value)


def test_what_meta_cannot_say_is_told(tmp_path, caplog):
    with caplog.at_level("WARNING", logger="torchtitan"):
        run(saved(tmp_path / "plain"), tmp_path / "a", target_format="meta")
        assert not caplog.messages
        run(saved(tmp_path / "scaled", "scaled"), tmp_path / "b", target_format="meta")
    assert "the format meta cannot express this: rope_scaling is" in caplog.messages[0]


def test_a_network_that_meta_cannot_build_is_not_written(tmp_path, capsys):
    source, new = saved(tmp_path / "ours", "window"), tmp_path / "new"
    assert refused(capsys, source, new, "--to", "meta") == (
        "sliding_window: got 12; Meta's params.json has no such size\n  use the format hf\n"
        "error: head_dim: got 16; Meta's params.json has no such size\n  use the format hf\n"
    )


def test_a_damaged_checkpoint_is_not_converted(tmp_path):
    source = saved(tmp_path / "ours")
    flip(next(source.glob("*.safetensors")))
    with pytest.raises(ConfigError, match="differs from what was saved"):
        run(source, tmp_path / "hf")


@pytest.mark.parametrize("target", ["ours", "hf", "meta"])
def test_what_fails_half_way_leaves_nothing(target, tmp_path, monkeypatch):
    source, read = saved(tmp_path / "ours"), Verified.read
    # As a killed conversion leaves it; the next one takes its place.
    (tmp_path / "new.saving").mkdir()
    (tmp_path / "new.saving/model-00099-of-00099.safetensors").touch()

    def fail(self, name):
        if name == "model.norm.weight":
            raise OSError("the disk is gone")
        return read(self, name)

    options = ConvertOptions(target_format=target)
    with monkeypatch.context() as patch:
        patch.setattr(Verified, "read", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            convert(source, tmp_path / "new", options, {})
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    assert not list(run(source, tmp_path / "new", target_format=target).glob("*99*"))


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("512MiB", 2**29), ("7b", 7), ("60", 60)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1GB", "0", "5GBs"])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match="--max-shard-size"):
        parse_size(text)


# --- memory ---

LONG = dataclasses.replace(ARGS, dim=256, ffn_dim=1024, n_layers=13, vocab_size=512)
LARGEST = 4 * LONG.ffn_dim * LONG.dim
MODEL = 50_000_000


def anonymous():
    """Bytes that this process uses and that are no file's."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is given back first
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("RssAnon:")[1].split()[0])


def peaks(folder):
    """By how much memory grows in each conversion; in a process of its own."""
    seen = []

    def watch(owner, name):
        function = getattr(owner, name)

        def watched(*args, **kwargs):
            result = function(*args, **kwargs)
            seen.append(anonymous())
            return result

        setattr(owner, name, watched)

    for owner, name in [
        (Verified, "read"),
        (ForeignWeights, "read"),
        (hugging_face_files, "write_file"),
        (torch, "save"),
    ]:
        watch(owner, name)
    MODELS._entries["small"] = dataclasses.replace(SPEC, flavors={"long": LONG})

    def grown(source, target, size="4MB", **options):
        seen[:] = [before := anonymous()]
        run(folder / source, folder / target, max_shard_size=size, **options)
        return max(seen) - before

    return {
        "ours to hf": grown("ours", "hf", dtype="bfloat16"),
        "ours to hf, in one file": grown("ours", "one", "5GB", dtype="bfloat16"),
        "hf to ours": grown("hf", "back", dtype="float32"),
        "ours to meta": grown("ours", "meta", None, target_format="meta", dtype="bfloat16"),
        "meta to ours": grown("meta", "back2", dtype="float32"),
    }


@pytest.mark.gate
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_memory_does_not_grow_with_the_model(tmp_path):
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in SPEC.build(LONG, 8).state_dict().items()}
    assert sum(4 * shape.numel() for shape in shapes.values()) > MODEL
    (tmp_path / "ours").mkdir()
    tensors = ((f"model.{name}", torch.rand(shape)) for name, shape in shapes.items())
    about = {"recipe": {"model.name": "small", "model.flavor": "long"}}
    write_tensors(tmp_path / "ours", tensors, about, 4_000_000)
    found = run_ranks(peaks, 1, tmp_path)[0]
    whole = found.pop("ours to hf, in one file")
    # A file, the next tensor, and that before its dtype or rows were changed. Threads, allocators
    # and the interpreter take as much as a few tensors, in one run more than in another.
    limit = 4_000_000 + 2 * LARGEST + 4_000_000
    assert whole > 2 * limit, "what is held is not what is measured"
    assert max(found.values()) < limit, found


def test_a_run_starts_from_weights_of_hugging_face_on_any_layout(tmp_path):
    saves = {"enable": True, "last_save_in_hf": True, "export_dtype": "bfloat16"}
    whole = trained(tiny.job(tmp_path / "a", training={"steps": 2}, checkpoint=saves))
    exported = tmp_path / "a/checkpoint/step-2-hf"
    from transformers import AutoModelForCausalLM  # takes seconds

    model = AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
    assert model.dtype == torch.bfloat16

    frozen = {"name": "SGD", "lr": 1e-30, "weight_decay": 0.0}
    for name, ranks, degree in (("b", 1, {}), ("c", 2, {"tensor_parallel_degree": 2})):
        job = tiny.job(
            tmp_path / name,
            training={"steps": 1},
            optimizer=frozen,
            parallelism=degree,
            checkpoint={"initial_load_path": str(exported)},
        )
        for part in run_ranks(train, ranks, job):
            for weight, values in part.items():
                assert torch.equal(values, whole[weight].bfloat16().float()), (name, weight)


def test_a_recipe_of_torchtitan_starts_from_the_weights_beside_its_tokenizer(tmp_path):
    """`initial_load_in_hf` without a path: not from random weights."""
    saves = {"enable": True, "last_save_in_hf": True}
    whole = trained(tiny.job(tmp_path / "a", training={"steps": 2}, checkpoint=saves))
    exported = tmp_path / "a/checkpoint/step-2-hf"
    train_bpe(["a b"], 270, exported / "tokenizer.json")
    text = Path(__file__).with_name("theirs.toml").read_text()
    theirs = tmp_path / "theirs.toml"
    theirs.write_text(text.replace("WEIGHTS", str(exported)))
    ours = str(tmp_path / "ours.toml")
    assert main(["migrate", str(theirs), "-o", ours]) == 0
    job = load_job(ours, [f"--job.dump_folder={tmp_path / 'b'}"], 1, "cpu").config
    for weight, values in trained(job).items():
        assert torch.equal(values, whole[weight]), weight


def test_weights_that_are_not_finite_are_named(tmp_path):
    saves = {"enable": True, "last_save_in_hf": True}
    trained(tiny.job(tmp_path / "a", training={"steps": 1}, checkpoint=saves))
    exported = tmp_path / "a/checkpoint/step-1-hf"
    tensors = load_file(exported / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = -torch.inf
    tensors["model.layers.0.mlp.gate_proj.weight"].fill_(3e38)  # finite, but no sum of them
    save_file(tensors, exported / "model.safetensors", {"format": "pt"})
    initial = {"initial_load_path": str(exported)}
    named = r"NaN or infinity in model\.layers\.0\.feed_forward\.w3\.weight, "
    for name, degree in (("b", {}), ("c", {"tensor_parallel_degree": 2})):
        job = tiny.job(tmp_path / name, parallelism=degree, checkpoint=initial)
        with pytest.raises(AssertionError, match=named + r"model\.norm\.weight; start from other"):
            run_ranks(train, 2 if degree else 1, job)


def test_weights_of_another_model_are_refused_before_anything_starts(tmp_path):
    saves = {"enable": True, "last_save_in_hf": True}
    trained(tiny.job(tmp_path / "a", training={"steps": 1}, checkpoint=saves))
    initial = {"initial_load_path": str(tmp_path / "a/checkpoint/step-1-hf")}
    with pytest.raises(ConfigError, match=r"initial_load_path: \S+config.json: "):
        choose(tiny.job(tmp_path / "b", model={"flavor": "wide"}, checkpoint=initial))
