"""Foreign weights are read in blocks, under our names; what does not fit is told, all at once."""

import dataclasses
import json
import random
from unittest.mock import Mock, call

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.small_weights import ARGS, FLAVORS, SPEC, run, same, saved, weights
from tests.tables import table
from torchtitan.checkpoint.weights.foreign import ForeignWeights
from torchtitan.checkpoint.weights.hugging_face_files import HuggingFaceWeights
from torchtitan.checkpoint.weights.meta_files import MetaWeights
from torchtitan.checkpoint.weights.network import read_config
from torchtitan.config import ConfigError
from torchtitan.models import MODELS

pytestmark = pytest.mark.usefixtures("small")


def hugging_face(folder, flavor="plain"):
    return run(saved(folder / "ours", flavor), folder / "hf")


def meta(folder, files=1, flavor="plain", embedding_dim=0):
    """Meta's format, in several files as tensor parallelism cuts it."""
    source = run(saved(folder / "ours", flavor), folder / "meta", target_format="meta")
    if files == 1:
        return source
    whole = torch.load(source / "consolidated.00.pth")
    for number in range(files):
        part = {name: cut(name, t, files, embedding_dim)[number] for name, t in whole.items()}
        torch.save(part, source / f"consolidated.{number:02}.pth")
    return source


def cut(name, tensor, files, embedding_dim):
    """As Megatron-LM: outputs of most, inputs of what closes a block, norms everywhere."""
    if "norm" in name:
        return [tensor.clone() for _ in range(files)]
    dim = {"wo": 1, "w2": 1, "tok_embeddings": embedding_dim}.get(name.split(".")[-2], 0)
    return [part.clone() for part in tensor.chunk(files, dim)]


def everything(source):
    return {name: source.read(name) for name in source.shapes()}


def blocks(shape):
    """Some blocks of a tensor: what a rank may ask for."""
    dice = random.Random(0)
    for _ in range(12):
        spans = [sorted(dice.choices(range(size + 1), k=2)) for size in shape]
        yield tuple(a for a, _ in spans), tuple(b - a for a, b in spans)


# --- reading ---


@pytest.mark.parametrize(("files", "embedding_dim"), [(2, 0), (4, 0), (2, 1)])
def test_files_of_tensor_parallelism_are_joined(files, embedding_dim, tmp_path):
    """Llama 3 splits the embedding by its rows, Llama 2 by its columns."""
    n_kv_heads = {2: "plain", 4: "tied"}  # no fewer heads than files
    folder = meta(tmp_path, files, n_kv_heads[files], embedding_dim)
    source = MetaWeights(folder, [SPEC], n_kv_heads[files])
    assert same(everything(source), weights(n_kv_heads[files]))


@pytest.mark.parametrize("kind", ["hf", "meta", "meta in 2 files"])
def test_a_block_is_that_of_the_whole(kind, tmp_path):
    source: ForeignWeights
    if kind == "hf":
        source = HuggingFaceWeights(hugging_face(tmp_path), [SPEC], "plain")
    else:
        source = MetaWeights(meta(tmp_path, 2 if "2" in kind else 1), [SPEC], "plain")
    for name, tensor in weights().items():
        assert source.shapes()[name] == (tensor.dtype, tuple(tensor.shape))
        for offsets, sizes in blocks(tuple(tensor.shape)):
            place = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            block = source.read(name, offsets, sizes)
            assert block.shape == tensor[place].shape
            assert torch.equal(block, tensor[place])


def test_a_block_is_read_from_the_heads_it_is_in(tmp_path, monkeypatch):
    source = HuggingFaceWeights(hugging_face(tmp_path), [SPEC], "plain")
    block = Mock(wraps=source._block)
    monkeypatch.setattr(source, "_block", block)
    e = ARGS.head_size
    source.read("model.layers.1.attention.wq.weight", (2 * e, 8), (3 * e, 16))
    source.read("model.layers.1.attention.wq.weight", (e + 1, 0), (2, ARGS.dim))
    source.read("model.layers.1.feed_forward.w1.weight", (5, 0), (7, ARGS.dim))
    name = "model.layers.1.self_attn.q_proj.weight"
    half = e // 2
    assert block.call_args_list == [
        call(name, (2 * e, 8), (3 * e, 16)),
        # Rows 1 and 2 of a head are rows E/2 and 1 there.
        call(name, (e + 1, 0), (half, ARGS.dim)),
        call("model.layers.1.mlp.gate_proj.weight", (5, 0), (7, ARGS.dim)),
    ]


# --- what does not fit ---


def load(path):
    """Tensors that are no views of their file, which is going to be written anew."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def refusal(folder, opened):
    """What is said of weights, without the name of their folder."""
    with pytest.raises(ConfigError) as error:
        opened()
    return str(error.value).replace(str(folder), "HERE").splitlines()


def open_hugging_face(folder, flavor="plain"):
    return refusal(folder, lambda: HuggingFaceWeights(folder, [SPEC], flavor))


def open_meta(folder, flavor="plain"):
    return refusal(folder, lambda: MetaWeights(folder, [SPEC], flavor))


def test_every_tensor_that_does_not_fit_is_told(tmp_path):
    folder = hugging_face(tmp_path)
    tensors = load(folder / "model.safetensors")
    layer = "model.layers.1."
    del tensors[f"{layer}mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors[f"{layer}self_attn.q_proj.bias"] = torch.zeros(64)
    tensors[f"{layer}self_attn.o_proj.weight"] = torch.zeros(64, 32)
    tensors["model.embed_tokens.weight"] = torch.zeros(300, 64, dtype=torch.int8)
    # What transformers once saved beside the weights follows from the config.
    tensors[f"{layer}self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, folder / "model.safetensors")
    assert open_hugging_face(folder) == [
        "HERE: not the weights of small plain:",
        f"  missing: {layer}mlp.up_proj.weight",
        "  missing: model.norm.weight",
        f"  unexpected: {layer}self_attn.q_proj.bias",
        "  model.embed_tokens.weight: has dtype torch.int8; allowed: torch.float64, "
        "torch.float32, torch.bfloat16, torch.float16",
        f"  {layer}self_attn.o_proj.weight: has shape (64, 32); wanted (64, 64)",
    ]


def test_of_many_that_do_not_fit_the_number_is_told(tmp_path):
    folder = hugging_face(tmp_path)
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    told = open_hugging_face(folder)
    assert len(told) == 12
    assert told[-1] == f"  and {len(weights()) + 1 - 10} more"


def with_config(tmp_path, change):
    """A folder of Hugging Face whose config.json has other values."""
    folder = hugging_face(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | json.loads(change)))
    return folder


@pytest.mark.parametrize(("change", "told"), table(__file__, "other_architectures.txt"))
def test_another_architecture_is_refused(change, told, tmp_path):
    assert open_hugging_face(with_config(tmp_path, change), None) == [f"HERE/config.json: {told}"]


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}


@pytest.mark.parametrize("row", table(__file__, "two_values.txt"), ids=str)
def test_a_fact_with_two_values_is_refused_with_both(row, tmp_path):
    change, *values = row
    told = "\n".join(open_hugging_face(with_config(tmp_path, change), None))
    assert all(value in told for value in values), told
    assert "without a rope_type" not in told


def test_a_key_that_is_there_twice_is_refused_unless_its_values_are_equal(tmp_path):
    (tmp_path / "config.json").write_text('{"rms_norm_eps": NaN, "a": 1, "a": 1}')
    assert read_config(tmp_path / "config.json").keys() == {"rms_norm_eps", "a"}
    (tmp_path / "config.json").write_text('{"rope": {"factor": 8, "factor": 4}}')
    with pytest.raises(ConfigError, match="factor 8 and factor 4 are one fact with two values"):
        read_config(tmp_path / "config.json")


def test_a_fact_that_is_in_two_places_may_be_equal(tmp_path):
    folder = hugging_face(tmp_path, "both")
    config = json.loads((folder / "config.json").read_text())
    scaling = {"type": config["rope_scaling"].pop("rope_type"), **config["rope_scaling"]}
    config |= {"rope_scaling": scaling, "rope_parameters": LLAMA3 | {"rope_theta": 500_000}}
    config |= {"dtype": "float32", "torch_dtype": "torch.float32"}
    (folder / "config.json").write_text(json.dumps(config))
    assert same(everything(HuggingFaceWeights(folder, [SPEC], "both")), weights("both"))


@pytest.mark.parametrize("kind", ["hf", "meta"])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "model.", "module._orig_mod.model."])
def test_prefixes_of_wrappers_are_left_out_and_said(prefix, kind, tmp_path, caplog):
    if kind == "hf":
        folder = hugging_face(tmp_path)
        tensors = load(folder / "model.safetensors")
        # A compiled block has a part of its name in the middle.
        wrapped = {
            prefix + n.replace("layers.0.", "layers.0._orig_mod."): tensors[n] for n in tensors
        }
        save_file(wrapped, folder / "model.safetensors")
        source = HuggingFaceWeights(folder, [SPEC], "plain")
    else:
        folder = meta(tmp_path)
        path = folder / "consolidated.00.pth"
        torch.save({prefix + n: t for n, t in torch.load(path).items()}, path)
        source = MetaWeights(folder, [SPEC], "plain")
    assert same(everything(source), weights("plain"))
    assert "names are read without wrappers" in caplog.text


def test_weights_that_are_there_twice_are_refused_or_said(tmp_path, caplog):
    folder = hugging_face(tmp_path)
    whole = load(folder / "model.safetensors")
    for name in ("pytorch_model.bin", "adapter_model.safetensors"):
        (folder / name).write_bytes(b"not read")
    assert same(everything(HuggingFaceWeights(folder, [SPEC], "plain")), weights("plain"))
    assert "not read: adapter_model.safetensors, pytorch_model.bin" in caplog.text
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    first, *rest = whole
    save_file(whole, folder / shards[0])
    save_file({first: whole[first]}, folder / shards[1])
    index = {"weight_map": dict.fromkeys(rest, shards[0]) | {first: shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    [told] = open_hugging_face(folder)
    assert "in both model.safetensors, which transformers would read, and the files of" in told
    (folder / "model.safetensors").unlink()
    [told] = open_hugging_face(folder)
    assert told == f"HERE: {first} is in both {shards[0]} and {shards[1]}; remove one"
    wrapped = {f"_orig_mod.{first}": whole[first].clone()}
    save_file(whole | wrapped, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    [told] = open_hugging_face(folder)
    assert f"_orig_mod.{first}" in told
    assert f"are both {first}; remove one" in told


def test_weights_that_are_elsewhere_are_explained(tmp_path):
    folder = hugging_face(tmp_path)
    path = folder / "model.safetensors"
    path.rename(folder / "weights.safetensors")
    assert "there is only weights.safetensors" in open_hugging_face(folder)[0]
    path.symlink_to("/nowhere/blob")
    assert "model.safetensors: it is a link to /nowhere/blob, which" in open_hugging_face(folder)[0]
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert "it has no weight_map" in open_hugging_face(folder)[0]


def test_tensors_in_the_same_bytes_are_refused(tmp_path):
    path = hugging_face(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    place = header["model.norm.weight"]
    place["data_offsets"] = [0, place["data_offsets"][1] - place["data_offsets"][0]]
    written = json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + content[size:])
    assert "model.norm.weight and " in "".join(open_hugging_face(path.parent))


def test_both_sides_of_a_difference_of_names_are_shown(tmp_path):
    folder = hugging_face(tmp_path)
    tensors = load(folder / "model.safetensors")
    save_file({f"net.{n}": t for n, t in tensors.items()}, folder / "model.safetensors")
    told = open_hugging_face(folder)
    assert sum("missing: " in line for line in told) == 5
    assert sum("unexpected: net." in line for line in told) == 5


def test_another_flavor_than_the_one_named_is_refused(tmp_path):
    assert open_hugging_face(hugging_face(tmp_path, "both"), "plain") == [
        "HERE/config.json: not small plain:",
        "  n_kv_heads is 8 instead of 2",
        "  rope_scaling is RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, "
        "original_context=32) instead of None",
        "  tied is True instead of False",
    ]


def test_the_flavor_that_is_named_tells_the_family(tmp_path):
    folder = hugging_face(tmp_path, "tied")
    every = [MODELS["llama3"], SPEC]
    told = refusal(folder, lambda: HuggingFaceWeights(folder, every, "plain"))
    assert told[0] == "HERE/config.json: not small plain:"
    assert HuggingFaceWeights(folder, every).network.flavor == "tied"


def test_what_may_be_several_flavors_has_to_be_named(tmp_path):
    """Of params.json a tied network is one like any other."""
    flavors = FLAVORS | {"twin": dataclasses.replace(FLAVORS["plain"], tied=True)}
    spec = dataclasses.replace(SPEC, flavors=flavors)
    folder = meta(tmp_path)
    assert refusal(folder, lambda: MetaWeights(folder, [spec])) == [
        "HERE/params.json: it could be small plain or small twin; choose one with --model and "
        "--flavor"
    ]
    assert same(everything(MetaWeights(folder, [spec], "plain")), weights())


@pytest.mark.parametrize("kind", ["hf", "meta"])
def test_a_tied_matrix_may_be_repeated_but_not_differ(kind, tmp_path):
    if kind == "hf":
        folder, name = hugging_face(tmp_path, "tied"), "lm_head.weight"
        path, opened = folder / "model.safetensors", HuggingFaceWeights
        tensors, save = load(path), save_file
        tensors[name] = tensors["model.embed_tokens.weight"].clone()
    else:
        folder, name = meta(tmp_path, flavor="tied"), "output.weight"
        path, opened = folder / "consolidated.00.pth", MetaWeights
        tensors, save = torch.load(path), torch.save
    save(tensors, path)
    assert same(everything(opened(folder, [SPEC], "tied")), weights("tied"))
    tensors[name][5, 5] += 1
    save(tensors, path)
    (told,) = refusal(folder, lambda: opened(folder, [SPEC], "tied"))
    assert told.startswith(f"HERE: {name} must equal ")
    del tensors[name]
    save(tensors, path)
    assert same(everything(opened(folder, [SPEC], "tied")), weights("tied"))


def test_files_that_are_not_there_or_not_whole_are_named(tmp_path):
    folder = run(saved(tmp_path / "ours"), tmp_path / "hf", max_shard_size="200KB")
    path = sorted(folder.glob("model-*"))[1]
    path.write_bytes(path.read_bytes()[:-1])
    told = f"HERE/{path.name}: not a complete safetensors file"
    assert open_hugging_face(folder)[0].startswith(told)
    path.unlink()
    (told,) = open_hugging_face(folder)
    assert told == f"HERE/{path.name}: there is no such file, but the index names it"
    (folder / "model.safetensors.index.json").unlink()
    (told,) = open_hugging_face(folder)
    assert told.startswith("HERE: there is neither model.safetensors.index.json nor")
    (folder / "config.json").write_text("{")
    assert open_hugging_face(folder)[0].startswith("HERE/config.json: not JSON")
    (folder / "config.json").unlink()
    assert open_hugging_face(folder) == ["HERE/config.json: there is no such file"]


class Foreign:
    """Something that reading a pickle would make."""


def test_files_of_meta_that_cannot_be_read_are_named(tmp_path):
    folder = meta(tmp_path, 2)
    second = sorted(folder.glob("*.pth"))[1]
    torch.save(torch.load(second) | {"more": Foreign()}, second)
    (told,) = open_meta(folder)
    assert told.startswith("HERE/consolidated.01.pth: it contains more than tensors")
    torch.save([1, 2], second)
    assert open_meta(folder) == ["HERE/consolidated.01.pth: not a dictionary of tensors"]
    second.write_bytes(b"PK")
    assert open_meta(folder)[0].startswith("HERE/consolidated.01.pth: not a complete file")
    second.rename(folder / "consolidated.02.pth")
    assert open_meta(folder) == ["HERE/consolidated.01.pth: there is no such file"]


def test_blocks_that_make_no_whole_are_told(tmp_path):
    folder = meta(tmp_path, 2)
    second = folder / "consolidated.01.pth"
    tensors = torch.load(second)
    tensors["norm.weight"] += 1
    tensors["output.weight"] = tensors["output.weight"][:-1].clone()
    tensors["layers.0.attention.wo.weight"] = torch.zeros(64, 32, dtype=torch.bfloat16)
    del tensors["layers.1.ffn_norm.weight"]
    tensors["rope.freqs"] = torch.zeros(4)  # follows from the params
    torch.save(tensors, second)
    assert open_meta(folder) == [
        "HERE: not the weights of small plain:",
        "  layers.0.attention.wo.weight: has another shape or dtype in another file",
        "  layers.1.ffn_norm.weight: is in 1 of 2 files",
        "  norm.weight: is unsharded in each file, but not the same in all",
        "  output.weight: has another shape or dtype in another file",
    ]
    third = folder / "consolidated.02.pth"
    torch.save(torch.load(folder / "consolidated.00.pth"), third)
    torch.save(torch.load(folder / "consolidated.00.pth"), second)
    told = "tok_embeddings.weight: has shape (150, 64) in each of 3 files; wanted (300, 64)"
    assert f"  {told}" in open_meta(folder)
