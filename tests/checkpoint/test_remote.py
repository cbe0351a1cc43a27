"""Checkpoints on object stores: a store is no disk, and does what one does."""

import os
import tempfile
import time
import uuid
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import small_weights
from tests.checkpoint.test_folder import flip, recipe
from tests.checkpoint.test_foreign import everything
from tests.object_store import ObjectStore
from tests.ranks import run_ranks
from tests.runs import losses, train, train_each
from torchtitan import remote
from torchtitan.checkpoint import SaveFailed, ranges, saved_steps, saver
from torchtitan.checkpoint.dcp.reader import DcpCheckpoint
from torchtitan.checkpoint.folder import read_state, replace_state
from torchtitan.checkpoint.manifest import problems_of_files, read_manifest
from torchtitan.checkpoint.ranges import FetchedFiles
from torchtitan.checkpoint.storage import SavedTensors, write_tensors
from torchtitan.checkpoint.tiers import read_history
from torchtitan.checkpoint.weights.hugging_face_files import HuggingFaceWeights
from torchtitan.checkpoint.weights.meta_files import MetaWeights
from torchtitan.config import ConfigError
from torchtitan.models import MODELS
from torchtitan.remote import location
from torchtitan.tools.cli import main
from torchtitan.trainer import choose


@pytest.fixture(autouse=True)
def quick(monkeypatch, caplog):
    """Attempts follow each other at once, and all that is logged is kept."""
    caplog.set_level("INFO", "torchtitan")
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(saver, "RETRY_SECONDS", 0.0)
    monkeypatch.setitem(MODELS, "small", small_weights.SPEC)


@pytest.fixture(params=["store", pytest.param("memory", marks=pytest.mark.gate)])
def store(request):
    """A folder in the memory of this process."""
    yield from folder_on(request.param)


@pytest.fixture
def own_store():
    """A folder in the store that can be told to fail."""
    yield from folder_on("store")


def folder_on(protocol):
    ObjectStore.reset()
    folder = location(f"{protocol}://{uuid.uuid4().hex}/checkpoint")
    yield folder
    ObjectStore.reset()
    folder.remove()


def on(store, dump_folder, steps=4, **sections):
    """The recipe of the tests of disks, with its checkpoints in a store."""
    checkpoint = {"folder": str(store)} | sections.pop("checkpoint", {})
    return recipe(dump_folder, steps, checkpoint=checkpoint, **sections)


def copy(folder, destination):
    """A folder on a disk, in a store."""
    for path in folder.iterdir():
        (destination / path.name).write_bytes(path.read_bytes())
    return destination


def test_rare_checkpoints_in_a_store_and_frequent_ones_on_disk(store, tmp_path, caplog):
    job = on(store, tmp_path, checkpoint={"frequent": {"interval": 1}})
    whole = train(job)
    assert list(saved_steps(store)) == [2, 4]
    assert list(saved_steps(tmp_path / "frequent")) == [1, 3]
    (store / "step-4/manifest.json").unlink()
    assert same(train(job), whole)
    assert f"resumed from {tmp_path}/frequent/step-3 at step 3" in caplog.messages
    assert [step for _, step in read_history(store / "frequent.json")] == [0, 3]


def same(a, b):
    return all(torch.equal(a[name], weight) for name, weight in b.items())


@pytest.mark.parametrize(
    ("store", "mode"), [("store", "disabled"), ("memory", "async")], indirect=["store"]
)
def test_a_run_is_saved_in_a_store_and_resumed_as_from_a_disk(mode, store, tmp_path, caplog):
    whole = train(recipe(tmp_path / "disk", steps=6))
    train(on(store, tmp_path / "run", checkpoint={"async_mode": mode}))
    assert list(saved_steps(store)) == [2, 4]
    found = train(on(store, tmp_path / "run", steps=6, checkpoint={"async_mode": mode}))
    assert f"resumed from {store}/step-4 at step 4" in caplog.messages
    assert same(found, whole)
    assert losses(tmp_path / "run") == losses(tmp_path / "disk")
    on_disk = saved_steps(tmp_path / "disk/checkpoint")
    digests = {step: read_manifest(path).digest for step, path in saved_steps(store).items()}
    assert digests == {step: read_manifest(path).digest for step, path in on_disk.items()}
    assert not (tmp_path / "run/checkpoint").exists()
    assert (tmp_path / "run/metrics.jsonl").exists()


def test_a_damaged_checkpoint_in_a_store_is_set_aside(store, tmp_path, caplog):
    whole = train(on(store, tmp_path))
    flip(store / "step-4/rank-0.safetensors")
    with pytest.raises(ConfigError, match="step-4"):
        train(on(store, tmp_path, checkpoint={"resume": "must"}))
    found = train(on(store, tmp_path))
    told = "; renamed to step-4/manifest.damaged.json"
    assert any(line.endswith(told) for line in caplog.messages)
    assert any(f"resumed from {store}/step-2" in line for line in caplog.messages)
    assert same(found, whole)
    assert list(saved_steps(store)) == [2, 4]


def test_a_folder_is_a_checkpoint_from_the_moment_its_manifest_is_there(store, tmp_path, caplog):
    train(on(store, tmp_path))
    (store / "step-4/manifest.json").unlink()
    assert list(saved_steps(store)) == [2]
    assert choose(on(store, tmp_path)).path == store / "step-2"
    train(on(store, tmp_path, steps=3))
    assert f"deleted {store}/step-4: an unfinished save" in caplog.messages
    assert list(saved_steps(store)) == [2, 3]
    assert not (store / "step-4").exists()


def test_checkpoints_in_a_store_are_kept_and_deleted_as_on_a_disk(store, tmp_path):
    keep = {"interval": 1, "keep_latest_k": 2, "keep_every": 3}
    train(on(store, tmp_path, steps=7, checkpoint=keep))
    assert list(saved_steps(store)) == [3, 6, 7]
    assert not (store / "step-5").exists()


def test_the_policies_of_a_start_hold_in_a_store(store, tmp_path):
    with pytest.raises(ConfigError, match=r'got "must", but there is no checkpoint in \w+://'):
        choose(on(store, tmp_path, checkpoint={"resume": "must"}))
    train(on(store, tmp_path))
    assert choose(on(store, tmp_path, 3, checkpoint={"load_step": 2})).path == store / "step-2"
    with pytest.raises(ConfigError, match=r"no checkpoint of step 3 .* there are step-2, step-4"):
        choose(on(store, tmp_path, checkpoint={"load_step": 3}))
    with pytest.raises(ConfigError, match="has been used"):
        choose(on(store, tmp_path, checkpoint={"resume": "never"}))
    with pytest.raises(ConfigError, match=r"step-4: already exists"):
        choose(on(store, tmp_path, checkpoint={"load_step": 2}))
    assert list(saved_steps(store)) == [2, 4]


def test_another_run_starts_from_weights_in_a_store(store, tmp_path):
    whole = train(on(store, tmp_path / "a"))
    frozen = {"name": "SGD", "lr": 1e-30, "weight_decay": 0.0}
    initial = {"initial_load_path": str(store), "enable": False}
    found = train(recipe(tmp_path / "b", steps=1, checkpoint=initial, optimizer=frozen))
    assert same(found, whole)
    full = initial | {"initial_load_path": f"{store}/step-2", "initial_load_model_only": False}
    train(recipe(tmp_path / "c", checkpoint=full))
    whole_losses = losses(tmp_path / "a")
    assert losses(tmp_path / "c") == {step: whole_losses[step] for step in (3, 4)}


@pytest.mark.parametrize("flavor", ["plain", "tied"])
def test_weights_of_hugging_face_are_read_from_a_store(flavor, store, tmp_path):
    ours = small_weights.saved(tmp_path / "ours", flavor)
    local = small_weights.run(ours, tmp_path / "hf", max_shard_size="200KB")
    there = copy(local, store / "hf")
    expected = everything(HuggingFaceWeights(local, [small_weights.SPEC]))
    weights = HuggingFaceWeights(there, [small_weights.SPEC])
    assert small_weights.same(everything(weights), expected)
    name = "model.layers.1.attention.wo.weight"
    part = weights.read(name, (8, 16), (24, 32))
    assert torch.equal(part, expected[name][8:32, 16:48])


def test_damaged_weights_of_hugging_face_in_a_store_are_refused(store, tmp_path):
    local = small_weights.run(small_weights.saved(tmp_path / "ours"), tmp_path / "hf")
    there = copy(local, store / "hf")
    file = there / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-5])
    with pytest.raises(ConfigError, match=r"model.safetensors: not a complete safetensors file"):
        HuggingFaceWeights(there, [small_weights.SPEC])
    file.write_bytes(data[:100])
    with pytest.raises(ConfigError, match="it ends in its header"):
        HuggingFaceWeights(there, [small_weights.SPEC])
    file.unlink()
    with pytest.raises(ConfigError, match=r"there is neither model.safetensors.index.json nor"):
        HuggingFaceWeights(there, [small_weights.SPEC])


def test_weights_of_meta_in_a_store_are_refused_in_words(store):
    with pytest.raises(ConfigError, match=r"Meta's files are only read from a disk; copy them"):
        MetaWeights(store, [small_weights.SPEC])


def test_tools_look_at_checkpoints_in_a_store(store, tmp_path, says):
    train(on(store, tmp_path))
    assert "complete" in says("checkpoint", "ls", store)
    assert main(["checkpoint", "verify", str(store)]) == 0
    assert main(["checkpoint", "diff", f"{store}/step-2", f"{store}/step-4"]) == 1
    flip(store / "step-2/rank-0.safetensors")
    assert "its bytes differ from those saved" in says("checkpoint", "verify", store, status=1)


def test_weights_are_converted_from_a_store_and_into_one(store, tmp_path):
    ours = copy(small_weights.saved(tmp_path / "ours"), store / "ours")
    there = small_weights.run(ours, store / "hf")
    small_weights.run(tmp_path / "ours", tmp_path / "hf")
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert {path.name for path in there.iterdir()} == names
    for name in names:
        assert (there / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    back = small_weights.run(there, store / "back", model="small")
    assert small_weights.same(small_weights.content(back), small_weights.weights())
    with pytest.raises(ConfigError, match=r"hf: already exists; nothing was written"):
        small_weights.run(ours, store / "hf")


def test_the_last_weights_are_exported_to_a_store(store, tmp_path):
    (store / "step-4-hf/model.safetensors").write_bytes(b"of an export that was killed")
    exports = {"last_save_in_hf": True}
    train(on(store, tmp_path / "a", checkpoint=exports))
    train(recipe(tmp_path / "b", checkpoint=exports))
    for path in (tmp_path / "b/checkpoint/step-4-hf").iterdir():
        if path.name != "tokenizer.json":
            assert (store / "step-4-hf" / path.name).read_bytes() == path.read_bytes()


def test_a_store_that_fails_for_a_moment_is_asked_again(own_store, tmp_path, caplog):
    ObjectStore.break_down("pipe_file", within="manifest.json", times=2)
    train(on(own_store, tmp_path))
    ObjectStore.break_down("open", within="step-6/rank-0", times=2)
    train(on(own_store, tmp_path, steps=6))
    assert "attempt 2 of 3 failed" in caplog.text
    assert "ClientError: 503 Slow Down" in caplog.text
    ObjectStore.break_down("cat_file", within="manifest.json", times=2)
    assert choose(on(own_store, tmp_path, steps=6)).path == own_store / "step-6"


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("what", ["rank-0.safetensors", "train_state.json", "manifest.json"])
def test_a_store_that_fails_does_not_stop_training(mode, what, own_store, tmp_path, caplog):
    ObjectStore.break_down("open", "pipe_file", within=f"step-4/{what}")
    train(on(own_store, tmp_path, steps=6, checkpoint={"async_mode": mode}))
    assert any(
        line.startswith("step 4 could NOT be saved") and line.endswith("checkpoint is step-2")
        for line in caplog.messages
    )
    assert list(saved_steps(own_store)) == [2, 6]
    assert not (own_store / "step-4").exists()
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_a_run_whose_last_state_no_store_takes_says_so(own_store, tmp_path):
    ObjectStore.break_down("open", "pipe_file", "rm", within="step-4/")
    with pytest.raises(SaveFailed, match="step 4 could not be saved"):
        train(on(own_store, tmp_path))
    assert list(saved_steps(own_store)) == [2]


def test_what_cannot_be_read_back_is_not_taken_for_damaged(own_store, tmp_path, caplog):
    ObjectStore.break_down("cat_file", "ls", within="step-4")
    train(on(own_store, tmp_path, checkpoint={"keep_latest_k": 1}))
    assert "step-4 could not be read back, so older checkpoints are kept" in caplog.text
    ObjectStore.reset_failures()
    assert list(saved_steps(own_store)) == [2, 4]


def test_a_store_that_cannot_be_read_at_the_start_is_refused_in_words(own_store, tmp_path):
    train(on(own_store, tmp_path))
    for method in ("ls", "info", "cat_file"):
        ObjectStore.break_down(method)
        with pytest.raises(ConfigError, match=r"store://\S+: ClientError: 503 Slow Down"):
            choose(on(own_store, tmp_path, steps=6))
    ObjectStore.break_down("cat_file", within="rank-0.safetensors")
    with pytest.raises(ConfigError, match=r"step-4/rank-0.safetensors: ClientError: 503"):
        train(on(own_store, tmp_path, steps=6))
    ObjectStore.break_down("pipe_file")
    with pytest.raises(ConfigError, match=r"checkpoint.folder: store://\S+: ClientError: 503"):
        train(on(own_store, tmp_path, steps=6))
    ObjectStore.reset_failures()
    assert list(saved_steps(own_store)) == [2, 4]  # none was set aside


def test_training_goes_on_while_a_slow_store_is_written_to(own_store, tmp_path, caplog):
    def wait(method, path):
        until = time.monotonic() + 60
        while method == "open" and "step-2/" in path and "step 3/4" not in caplog.text:
            assert time.monotonic() < until, "training waits for the store"
            time.sleep(0.01)

    ObjectStore.before = staticmethod(wait)
    train(on(own_store, tmp_path, checkpoint={"async_mode": "async"}))
    assert list(saved_steps(own_store)) == [2, 4]


def test_old_checkpoints_that_cannot_be_deleted_end_no_run(own_store, tmp_path, caplog):
    ObjectStore.break_down("rm", within="step-2/rank-0")
    train(on(own_store, tmp_path, checkpoint={"keep_latest_k": 1}))
    assert "could not delete old checkpoints" in caplog.text
    assert list(saved_steps(own_store)) == [4]  # the manifest went first
    ObjectStore.reset_failures()
    train(on(own_store, tmp_path, steps=5, checkpoint={"keep_latest_k": 2}))
    assert not (own_store / "step-2").exists()


def sharded(folder, dump_folder, steps=4):
    two = {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1}
    return on(location(folder), dump_folder, steps, parallelism=two)


def test_ranks_write_their_own_files_and_others_read_them(tmp_path):
    """Through fsspec, by `file://`: processes of a test share no memory."""
    store = f"file://{tmp_path}/store"
    jobs = [
        recipe(tmp_path / "disk", steps=4),
        *(sharded(store, tmp_path / "run", steps) for steps in (2, 4)),
    ]
    disk, _, found = run_ranks(train_each, 2, jobs)[0]
    assert {path.name for path in (tmp_path / "store/step-2").iterdir()} == {
        *("rank-0.safetensors", "rank-1.safetensors"),
        *("train_state.json", "manifest.json"),
    }
    assert same(found, disk)
    one = {"parallelism": {"data_parallel_shard_degree": 1}}
    alone = [on(location(store), tmp_path / "run", 6, **one), recipe(tmp_path / "disk", steps=6)]
    found, whole = run_ranks(train_each, 1, alone)[0]
    assert all(torch.allclose(found[name], weight, atol=1e-6) for name, weight in whole.items())


def refusal(job, fails=False):
    """Why a rank does not train; if `fails`, the store of rank 1 does."""
    if fails and os.environ["RANK"] == "1":
        remote.RemotePath.read_ranges = Mock(side_effect=remote.StoreError("a: unplugged"))
    try:
        train(job)
    except ConfigError as error:
        return str(error)
    return "trained"


def test_ranks_whose_store_is_not_the_same_are_refused(tmp_path):
    found = run_ranks(refusal, 2, sharded("memory://somewhere", tmp_path))
    assert found[0] == found[1]
    assert "checkpoint.folder: rank 1 cannot write into memory://somewhere" in found[0]


def test_a_store_that_fails_on_one_rank_is_told_by_all(tmp_path):
    store = f"file://{tmp_path}/store"
    first, second = (sharded(store, tmp_path, steps) for steps in (2, 4))
    found = run_ranks(lambda: (refusal(first), refusal(second, fails=True)), 2)
    assert found[0] == found[1]
    assert found[0][0] == "trained"
    assert found[0][1].endswith(": unplugged")


@pytest.fixture
def small_requests(monkeypatch):
    """Bytes of a request."""
    for module in (remote, ranges):
        monkeypatch.setattr(module, "PART", 4096)
    monkeypatch.setattr(ranges, "SPAN", 16384)
    return 4096


def write(folder, tensors):
    write_tensors(folder, tensors.items(), {}, 10**9)
    found = SavedTensors(folder)
    ObjectStore.requests.clear()
    return found


def test_of_a_tensor_in_a_store_only_the_block_is_read(own_store, small_requests):
    whole = torch.arange(512 * 256, dtype=torch.float32).view(512, 256)
    saved = write(own_store / "step-0", {"model.a": whole})
    assert torch.equal(saved.read("model.a", (128, 0), (32, 256)), whole[128:160])
    wanted = 32 * 256 * 4
    assert wanted <= ObjectStore.bytes_read() <= wanted + 2 * small_requests
    assert torch.equal(saved.read("model.a"), whole)


def test_columns_of_a_matrix_in_a_store_need_only_the_memory_that_they_have(
    own_store, small_requests
):
    whole = torch.arange(512 * 256, dtype=torch.float32).view(512, 256)
    saved = write(own_store / "step-0", {"model.a": whole})
    fetch = FetchedFiles._fetch
    with patch.object(FetchedFiles, "_fetch", autospec=True, side_effect=fetch) as fetched:
        part = saved.read("model.a", (3, 64), (500, 32))
    assert torch.equal(part, whole[3:503, 64:96])
    sizes = [end - begin for _, _, begin, end in (call.args for call in fetched.call_args_list)]
    assert max(sizes) <= ranges.SPAN < part.nbytes


def test_small_tensors_in_a_store_are_read_together(own_store, small_requests):
    norms = {f"model.{n:03}": torch.full((16,), float(n)) for n in range(200)}
    saved = write(own_store / "step-0", norms)
    assert all(torch.equal(saved.read(name), norm) for name, norm in norms.items())
    size = (own_store / "step-0/weights-0.safetensors").stat().st_size
    reads = [count for method, _, count in ObjectStore.requests if method == "cat_file"]
    # The header is longer than a request, and its blocks are not kept.
    assert len(reads) <= size / small_requests + 3 < len(norms) / 4
    assert sum(reads) <= size + 2 * small_requests


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int8"])
def test_scalars_and_empty_tensors_in_a_store(dtype, own_store):
    kind = getattr(torch, dtype)
    tensors = {"model.a": torch.tensor(3, dtype=kind), "model.b": torch.empty((0, 4), dtype=kind)}
    saved = write(own_store / "step-0", {**tensors, "model.c": torch.arange(7).to(kind)})
    for name, tensor in tensors.items():
        assert torch.equal(saved.read(name), tensor)
    assert torch.equal(saved.read("model.c", (2,), (3,)), torch.arange(2, 5).to(kind))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_dcp_in_a_store_are_read(store, tmp_path, says):
    state = {"model": {"w": torch.randn(300, 40)}, "step": torch.tensor(7), "words": ["a", 1]}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    there = copy(tmp_path / "dcp", store / "dcp")
    found = DcpCheckpoint(there)
    assert torch.equal(found.read("model.w"), state["model"]["w"])
    assert torch.equal(found.read("model.w", (7, 3), (50, 9)), state["model"]["w"][7:57, 3:12])
    assert {name: found.value(name) for name in found.values()} == {"words": ["a", 1]}
    assert "dcp" in says("checkpoint", "ls", there)
    assert main(["checkpoint", "verify", str(there)]) == 0
    (there / "__0_0.distcp").unlink()
    assert main(["checkpoint", "verify", str(there)]) == 1


def test_the_state_of_a_checkpoint_in_a_store_is_replaced_as_a_rollback_does(store, tmp_path):
    train(on(store, tmp_path))
    path = store / "step-4"
    state = read_state(path, read_manifest(path))
    state["train_state"]["rollbacks"] = 3
    replace_state(path, state)
    manifest = read_manifest(path)
    assert read_state(path, manifest) == state
    assert list(problems_of_files(path, manifest)) == []
    assert choose(on(store, tmp_path, steps=6)).path == path


def test_weights_for_a_store_are_written_where_tmpdir_says(store, tmp_path, monkeypatch, caplog):
    (tmp_path / "spool").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "spool"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    small_weights.run(small_weights.saved(tmp_path / "ours"), store / "copy")
    told = [line for line in caplog.messages if "TMPDIR sets the place" in line]
    assert len(told) == 1
    assert told[0].startswith(f"{store}/copy: first written to {tmp_path}/spool/")
    assert not list((tmp_path / "spool").iterdir())
    assert (store / "copy/model.safetensors").is_file()
