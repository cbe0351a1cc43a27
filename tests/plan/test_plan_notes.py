"""Settings of a recipe: each is in its plan, or in a note."""

import itertools
from functools import cache
from pathlib import Path

import pytest

from tests.tables import table
from tests.tiers import tiers
from torchtitan.checks import load_job
from torchtitan.plan.hardware import find_hardware
from torchtitan.plan.plan import memory_notes, plan, plan_notes

RECIPE = Path(__file__).parents[2] / "train_configs/debug_model.toml"
H100, A100 = find_hardware("h100"), find_hardware("a100-80")
QUIET = [*("--checkpoint.enable", "false"), *("--validation.enable", "false")]
SMALL = [
    *("--model.n_layers", "2", "--model.dim", "512", "--model.n_kv_heads", "4"),
    *("--training.seq_len", "256", "--training.local_batch_size", "2"),
    *("--training.mixed_precision_param", "bfloat16"),
]
SIMPLE = [
    *("--sharding.name", "simple_fsdp", "--compile.enable", "true"),
    *("--compile.granularity", "model", "--sharding.bucketing"),
]


def job(flags, ranks=4):
    exempt = ("model.tokenizer_path",)
    return load_job(str(RECIPE), [*QUIET, *flags], ranks, "cuda", exempt=exempt).config


@pytest.mark.parametrize(("flags", "note"), table(__file__, "plan_notes.txt"))
def test_a_setting_that_is_left_out_is_named(flags, note):
    assert not [*plan_notes(job([]), 4, H100, 2.5)]
    found = [*plan_notes(job(flags.split()), 4, H100, 2.5)]
    assert any(note in each for each in found), found


def test_products_that_the_hardware_lacks_are_named():
    flags = ["--convert.0.name", "float8"]
    assert not [*plan_notes(job(flags), 4, H100, 0)]
    [note] = plan_notes(job(flags), 4, A100, 0)
    assert note.startswith("convert.0.name: a100-80 has no products in float8")
    assert not [*plan_notes(job([*flags, "--convert.0.emulate", "true"]), 4, A100, 0)]
    [note] = plan_notes(job([]), 4, None, 0)
    assert "memory outside of the allocator is left out" in note


def test_documents_on_rocm_are_named():
    flags = ["--model.attn_mask_type", "block_causal"]
    found = [*plan_notes(job(flags), 4, find_hardware("mi300x"), 0)]
    assert [note for note in found if "on ROCm they run one by one" in note]
    assert not [note for note in plan_notes(job(flags), 4, H100, 0) if "ROCm" in note]


LAYOUTS = {
    "compiled": "--compile.enable true",
    "eager": "",
    "TP 2": "--parallelism.tensor_parallel_degree 2 --model.dim 1024 --model.n_kv_heads 8 "
    "--model.n_layers 1",
}


@cache
def planned(*flags, hardware="h100"):
    return plan(job([*SMALL, *flags]), 4, find_hardware(hardware))


@pytest.mark.parametrize(
    ("layout", "converter"),
    tiers(
        itertools.product(LAYOUTS, ["float8", "mxfp8"]),
        [("eager", "float8"), ("eager", "mxfp8"), ("TP 2", "mxfp8")],
        [("compiled", "float8")],
    ),
)
def test_converted_products_are_recorded_as_on_a_device_that_has_them(layout, converter):
    flags = [*LAYOUTS[layout].split(), "--convert.0.name", converter]
    found = planned(*flags, hardware="b200")
    kernels = [each for part in found.kinds[0].step.segments for each in part.kernels]
    products = [kernel for kernel in kernels if "_scaled_mm" in kernel.name]
    # 7 matrices in each block, and the output, which is not converted.
    outputs = sum(kernel.name == "aten.mm" for kernel in kernels)
    assert len(products) == 7 * found.job.model_args().n_layers * outputs > 0
    assert all(kernel.dtype.itemsize == 1 for kernel in products)


def test_settings_of_overlap_on_cuda_are_in_the_plan():
    def most(*flags):
        [found] = planned("--model.n_layers", "4", *flags).kinds
        levels = [level for _, level in found.step.levels()]
        return {kind: max(level[kind] for level in levels) for kind in ("gathered", "gradients")}

    before = most()
    ahead = most("--sharding.backward_prefetch", "3")
    pending = most("--sharding.reduce_scatters_in_flight", "3")
    assert ahead["gathered"] > before["gathered"]
    assert pending["gradients"] > before["gradients"]


@pytest.mark.slow
def test_merged_collectives_are_fewer_and_larger():
    found = {merging: planned(*SIMPLE, merging) for merging in ("none", "block", "size")}
    counts = [sum(each.count for each in one.traffic) for one in found.values()]
    assert counts[0] > counts[1] > counts[2]
    sent = {sum(each.bytes for each in one.traffic) for one in found.values()}
    assert max(sent) - min(sent) < 0.01 * max(sent)
    assert found["size"].allocated_gib.value > found["none"].allocated_gib.value


def test_a_compiled_recipe_that_barely_fits_may_not_at_another_launch():
    compiled = job(["--compile.enable", "true"])
    (note,) = memory_notes(compiled, 3.0, 33.7)
    assert "3.0 GiB that remain" in note
    for recipe, room in ((compiled, 4.0), (compiled, -1.0), (compiled, None), (job([]), 3.0)):
        assert not [*memory_notes(recipe, room, 33.7)]
