"""Recipes of TorchTitan v0.1 and v0.2 load, and `torchtitan migrate` rewrites them for good."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from torchtitan.checks import load_job
from torchtitan.config import Recipe, RecipeError
from torchtitan.config.schema import places
from torchtitan.convert import CONVERTERS, MXFP8, Float8
from torchtitan.job import JobConfig
from torchtitan.legacy_recipes import TABLE, Converted, Gone, Kept, Moved, entry
from torchtitan.legacy_recipes.rewriting import migrate

FOLDER = Path(__file__).parent / "old"
OLD = sorted(FOLDER.glob("*.toml"))
DEFAULTS = JobConfig().flat()
SETTINGS = {
    f"{place.path}.{key}" for place in places(JobConfig) for key in place.settings.model_fields
}
DATA = ("--data.dataset", "c4", "--data.dataset_path", "none")
every_old_recipe = pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)


def read(path: Path) -> Recipe[JobConfig]:
    """Without the files that a recipe of TorchTitan needs."""
    return load_job(path, ["--model.tokenizer_path", "none", *DATA], 4, "cpu")


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def keys(table: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted paths of all values."""
    result = []
    for key, value in table.items():
        is_table = isinstance(value, dict)
        result += keys(value, f"{prefix}{key}.") if is_table else [f"{prefix}{key}"]
    return result


def is_of_key(notice: str) -> bool:
    """Whether a notice is about a key of the recipe, and not about what it does not say."""
    return "a recipe of TorchTitan" not in notice and "TorchTitan would draw" not in notice


def test_old_recipes_are_there() -> None:
    names = ["converters_v0_1", "converters_v0_2", "dec_2024", "v0_1", "v0_2"]
    assert [path.stem for path in OLD] == names


@every_old_recipe
def test_every_key_has_its_notice(path: Path) -> None:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    noticed = [notice.split(": ")[1] for notice in read(path).notices if is_of_key(notice)]
    renamed = [key for key in keys(table) if key not in DEFAULTS and key != "optimizer.name"]
    optimizer = {f"optimizer.{name}" for name in type(read(path).config.optimizer).model_fields}
    changed = {
        "checkpoint.exclude_from_loading",
        "activation_checkpoint.selective_ac_option",
        "parallelism.context_parallel_rotate_method",
    }
    assert len(noticed) == len(set(noticed))
    assert set(noticed) - changed == set(renamed) - optimizer


def test_values_of_v0_1() -> None:
    job = read(FOLDER / "v0_1.toml").config
    assert job.job.print_config
    assert job.job.imports == ("json",)
    assert job.data.dataset == "c4"
    assert job.compile.enable
    assert (job.debug.seed, job.debug.deterministic) == (42, True)
    assert job.lr_scheduler.min_lr_factor == 0.1
    assert job.checkpoint.enable
    assert job.checkpoint.last_save_model_only
    assert not job.checkpoint.initial_load_model_only
    assert job.checkpoint.exclude_from_loading == ("data", "lr_scheduler")
    assert job.activation_checkpoint.selective_ac_option == 3
    assert job.parallelism.data_parallel_replicate_degree == 2
    assert job.accumulation(job.degrees(4)) == 4


def test_values_of_v0_2() -> None:
    job = read(FOLDER / "v0_2.toml").config
    assert (job.data.dataset, job.data.num_workers, job.data.prefetch_factor) == ("c4", 2, 4)
    assert (job.optimizer.name, job.lr_scheduler.total_steps) == ("Adam", 500)
    assert job.validation.enable
    assert job.debug.deterministic_warn_only


def test_values_of_december_2024() -> None:
    job = read(FOLDER / "dec_2024.toml").config
    assert job.training.local_batch_size == 4
    assert job.lr_scheduler.warmup_steps == 2
    assert job.flat()["optimizer.implementation"] == "fused"
    assert not job.parallelism.disable_loss_parallel
    assert not job.metrics.disable_color_printing
    assert not job.metrics.save_for_all_ranks
    assert job.parallelism.pipeline_parallel_schedule == "GPipe"


def test_converters_of_v0_1() -> None:
    float8 = Float8(
        emulate=True,
        enable_fsdp_float8_all_gather=True,
        precompute_float8_dynamic_scale_for_fsdp=True,
        filter_fqns=("output", "attention"),
    )
    rest = MXFP8(filter_fqns=("output", "feed_forward"))
    assert read(FOLDER / "converters_v0_1.toml").config.convert == (float8, rest)


def test_converters_of_v0_2() -> None:
    (float8,) = read(FOLDER / "converters_v0_2.toml").config.convert
    # There, nothing was left out unless the recipe said so.
    assert float8 == Float8(recipe="rowwise", emulate=True, filter_fqns=())


FLOAT8_KEYS = "[float8]\nfilter_fqns = ['output', 'wk']\nrecipe_name = 'rowwise'\n"


@pytest.mark.parametrize(
    ("old", "flags", "expected"),
    [
        (FLOAT8_KEYS, "", ()),
        # A flag names the converter of the recipe's keys, or changes one of them.
        (
            FLOAT8_KEYS,
            "--model.converters float8",
            (Float8(recipe="rowwise", filter_fqns=("output", "wk")),),
        ),
        (
            "[model]\nconverters = ['mx', 'float8']\n" + FLOAT8_KEYS,
            "--mx.filter_fqns attention,output --float8.filter_fqns feed,output --float8.emulate",
            (
                MXFP8(filter_fqns=("attention", "output")),
                Float8(recipe="rowwise", filter_fqns=("feed", "output"), emulate=True),
            ),
        ),
        (
            "[model]\nconverters = ['mx']\n",
            "--model.converters float8,mx --float8.filter_fqns att,out --mx.filter_fqns feed",
            (Float8(filter_fqns=("att", "out")), MXFP8(filter_fqns=("feed",))),
        ),
        ("[model]\nconverters = ['mx']\n", "--model.converters=", ()),
        ("[[convert]]\nname = 'mxfp8'\n", "--convert.0.name float8", (Float8(),)),
        ("[[convert]]\nname = 'mxfp8'\n", "--model.converters float8", (Float8(filter_fqns=()),)),
        ("[[convert]]\nname = 'mxfp8'\n", "--model.converters=", ()),
        # Of 2024: the output was left out, and a switch was the name.
        ("[float8]\nenable_float8_linear = true\n", "", (Float8(),)),
        ("[float8]\nenable_float8_linear = false\nemulate = true\n", "", ()),
    ],
)
def test_converters(old: str, flags: str, expected: tuple[Any, ...], tmp_path: Path) -> None:
    path = written(tmp_path / "old.toml", old + "[data]\n")
    assert load_job(path, flags.split(), 1, "cpu").config.convert == expected


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            "[mx]\nrecipe_name = 'mxfp4_cutlass'",
            '4: mx.recipe_name: got "mxfp4_cutlass"; MXFP8 with scales rounded up is the only ',
        ),
        (
            "[float8]\nemulat = true",
            "4: float8.emulat: unknown key; allowed: enable_fsdp_float8_all_gather, ",
        ),
        (
            "[float8]\nrecipe_name = 'colwise'",
            '4: convert.0.recipe: got "colwise"; allowed: tensorwise, ',
        ),
        (
            "[float8]\nmoe_fqns = ['experts']",
            '4: float8.moe_fqns: got ["experts"]; set experts = true ',
        ),
        ("[float8]\nscaling_type_input = 'delayed'", "4: float8.scaling_type_input: got "),
    ],
)
def test_keys_of_converters_that_are_refused(
    keys: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = keys[1 : keys.index("]")]
    written(tmp_path / "old.toml", f"[model]\nconverters = ['{name}']\n{keys}\n[data]\n")
    with pytest.raises(RecipeError) as error:
        load_job("old.toml", [], 1, "cpu")
    (found,) = error.value.lines
    assert found.startswith(f"old.toml:{line}")


@every_old_recipe
def test_migrated_recipe_is_the_same_with_its_comments(path: Path, tmp_path: Path) -> None:
    text, notices = migrate(path)
    before, migrated = read(path), read(written(tmp_path / "new.toml", text))
    assert list(filter(is_of_key, notices)) == list(filter(is_of_key, before.notices))
    assert migrated.config == before.config
    assert migrated.notices == []
    assert migrate(tmp_path / "new.toml") == (text, []), "migrating twice changes nothing"
    comments = (re.findall(r"#.*", each) for each in (text, path.read_text(encoding="utf-8")))
    assert len({tuple(sorted(found)) for found in comments}) == 1


def test_text_of_a_migrated_recipe(tmp_path: Path) -> None:
    old = """\
# My run.
extends = "base.toml"
debug.deterministic_warn_only = false

[training]  # all of it
steps   = 1_000  # many
batch_size = 0x10 # renamed
# what to learn from
dataset = "c4"  # moved
seed = 1
enable_loss_parallel = true  # turned round

# Leaves.
[experimental]
custom_import = "json"

# About the last section.
[float8]
emulate = false

[job]
description = '''
a   # no comment


[training]
batch_size = 3'''
"""
    (tmp_path / "base.toml").write_text("", encoding="utf-8")
    text, _ = migrate(written(tmp_path / "old.toml", old))
    assert (
        text
        == """\
# My run.
extends = "base.toml"
debug.deterministic_warn_only = false
debug.seed = 1

[training]  # all of it
steps   = 1_000  # many
local_batch_size = 0x10 # renamed

# Leaves.

# About the last section.

[job]
description = '''
a   # no comment


[training]
batch_size = 3'''
imports = ["json"]

[data]
# what to learn from
dataset = "c4"  # moved

[parallelism]
disable_loss_parallel = false  # turned round
"""
    )


@pytest.mark.parametrize(
    "old",
    [
        'training = { batch_size = 4, steps = 5, dataset = "c4", gc_debug = false }\n',
        "training.batch_size = 4\ntraining.seed = 3\n[job]\ndescription = 'x'\n",
        "[experimental]\ntensor_parallel_degree = 1\n[parallelism]\ncontext_parallel_degree = 1\n",
        "[training.dataloader]\nnum_workers = 2\n[model]\n[training]\nbatch_size = 8\n",
        "[training.dataloader]\nnum_workers = 2\n[training]\nbatch_size = 8\n",
        'data = { add_bos = true }\ntraining = { dataset = "c4" }\n',
        "\ufeff[training]\r\nbatch_size = 4\r\n",
        "[training]\nbatch_size = 4",
        '["training"]\n"batch_size" = 4\n',
        "[checkpoint]\nexclude_from_loading = [\n  'dataloader', # why\n  'optimizer',\n]\n",
        "[mx]\nfilter_fqns = ['attention', 'output']\n[float8]\nfilter_fqns = ['feed_forward']\n"
        "[model]\nconverters='float8,mx'",
        "[quantize]\nlinear.float8.emulate = true\n[model]\nconverters='quantize.linear.float8'",
    ],
)
def test_migrating_other_ways_to_write_it(old: str, tmp_path: Path) -> None:
    path = written(tmp_path / "old.toml", old)
    new = written(tmp_path / "new.toml", migrate(path)[0])
    assert read(new).config == read(path).config
    assert translations(read(path))
    assert translations(read(new)) == []


def translations(recipe: Recipe[JobConfig]) -> list[str]:
    """What was read under another name; other notices say what was got."""
    return [line for line in recipe.notices if ": got " not in line]


def test_nothing_to_migrate(tmp_path: Path) -> None:
    text = "[training]\n\n\n\nsteps=5"
    assert migrate(written(tmp_path / "new.toml", text)) == (text, [])


def test_keys_without_a_counterpart_are_refused_together(tmp_path: Path) -> None:
    path = written(tmp_path / "old.toml", '[model]\nconverters = ["m"]\n[mx]\n[comm]\nmode = "x"\n')
    with pytest.raises(RecipeError) as error:
        migrate(path)
    assert [line.split(": ")[1] for line in error.value.lines] == ["model.converters", "comm.mode"]


def test_old_names_win_by_their_source(tmp_path: Path) -> None:
    written(tmp_path / "base.toml", "[training]\nlocal_batch_size = 4\n")
    path = written(tmp_path / "mine.toml", 'extends = "base.toml"\n[training]\nbatch_size = 2\n')
    assert read(path).config.training.local_batch_size == 2


def test_table_leads_to_settings_that_exist() -> None:
    for name, row in TABLE.items():
        if isinstance(row, Moved):
            assert row.to in SETTINGS
        if isinstance(row, Kept):
            assert name in DEFAULTS
        if isinstance(row, Gone):
            assert name not in DEFAULTS
            assert row.instead
        if isinstance(row, Converted):
            assert any(row.to in settings.model_fields for settings in CONVERTERS.values())


def test_own_settings_are_not_translated() -> None:
    translated = {key for key in DEFAULTS if isinstance(entry(tuple(key.split("."))), Gone | Moved)}
    assert translated == {
        "checkpoint.exclude_from_loading",
        "activation_checkpoint.selective_ac_option",
        "parallelism.context_parallel_rotate_method",
    }
