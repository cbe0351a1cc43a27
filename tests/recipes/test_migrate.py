"""`torchtitan migrate` converts recipes of TorchTitan v0.1 and v0.2; other verbs name it."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.recipes.test_bad_recipes import cases
from tests.tables import data, table
from torchtitan.checks import load_job
from torchtitan.config import RecipeError
from torchtitan.config.other_names import OLD_KEYS, Gone, Moved
from torchtitan.config.schema import places
from torchtitan.convert import CONVERTERS, MXFP8, Float8
from torchtitan.job import JobConfig
from torchtitan.models.layers import RopeScaling
from torchtitan.tools.cli import main
from torchtitan.tools.migrate import missing, read_old, rewrite
from torchtitan.torchtitan_keys import DEFAULTS, OF_CONVERTER, OUR_SECTIONS, TABLE

FOLDER = Path(__file__).parent
OLD = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("old/*.toml"))}
OURS = JobConfig().flat()
V0_1 = "[job]\nprint_args = false\n"
V0_2_0 = "[training]\nseed = 1\n[checkpoint]\nenable = false\n"
V0_2_2 = "[model]\nprint_after_conversion = false\n"
VERSIONS = {"v0.1": V0_1, "v0.2.0": V0_2_0, "v0.2.2": V0_2_2}
LOAD = "[checkpoint]\nenable = true\ninitial_load_in_hf = true\n"


@pytest.fixture(autouse=True)
def _clone(tmp_path, monkeypatch):
    """A folder with the files that TorchTitan's defaults name."""
    monkeypatch.chdir(tmp_path)
    for name in ("tests/assets/tokenizer", "tests/assets/c4_test", "weights"):
        Path(name).mkdir(parents=True)
    Path("tests/assets/c4_test/data.json").write_text('{"text": "a"}\n')
    Path("weights/tokenizer.json").touch()
    Path("torchtitan/datasets/tokenizer").mkdir(parents=True)
    Path("torchtitan/datasets/tokenizer/tokenizer.model").touch()


def migrate(text, name="old.toml"):
    """The text of a recipe in its present form, and the notices."""
    Path(name).write_text(text, encoding="utf-8")
    migration = read_old(Path(name))
    return rewrite(Path(name).read_text(encoding="utf-8-sig"), migration), migration.notices


def read(text, *flags, ranks=None):
    """The settings of a recipe after its migration, and the notices of that."""
    new, notices = migrate(text)
    Path("new.toml").write_text(new, encoding="utf-8")
    recipe = load_job("new.toml", flags, ranks, "cuda")
    assert translations(recipe) == []
    assert migrate(new) == (new, []), "migrating twice changes nothing"
    return recipe.config, notices


def translations(recipe):
    """What was read under another name; other notices say what was got."""
    return [line for line in recipe.notices if ": is now " in line or " is dropped; " in line]


def read_whole(name):
    """Without the files that a recipe of TorchTitan needs."""
    flags = ("--model.tokenizer_path=none", "--data.dataset=c4", "--data.dataset_path=none")
    return read(OLD[name], *flags, ranks=4)


def keys(table, prefix=""):
    """Dotted paths of all values."""
    result = []
    for key, value in table.items():
        is_table = isinstance(value, dict)
        result += keys(value, f"{prefix}{key}.") if is_table else [f"{prefix}{key}"]
    return result


@pytest.mark.parametrize("name", OLD)
def test_every_key_has_its_notice_and_comments_stay(name):
    job, notices = read_whole(name)
    about_keys = [
        line
        for line in notices
        if "a recipe of TorchTitan" not in line and "TorchTitan draws" not in line
    ]
    noticed = [line.split(": ")[1] for line in about_keys]
    renamed = [k for k in keys(tomllib.loads(OLD[name])) if k not in OURS and k != "optimizer.name"]
    optimizer = {f"optimizer.{key}" for key in type(job.optimizer).model_fields}
    changed = {
        "checkpoint.exclude_from_loading",
        "activation_checkpoint.selective_ac_option",
        "parallelism.context_parallel_rotate_method",
    }
    assert len(noticed) == len(set(noticed))
    assert set(noticed) - changed == set(renamed) - optimizer
    comments = [sorted(re.findall(r"#.*", text)) for text in (OLD[name], migrate(OLD[name])[0])]
    assert comments[0] == comments[1]


VALUES = data(__file__, "migrated/values.toml")


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    values = json.loads(json.dumps(read_whole(name)[0].flat()))
    assert {key: values[key] for key in VALUES[name]} == VALUES[name]


def test_what_values_come_to():
    assert list(OLD) == ["converters_v0_1", "converters_v0_2", "dec_2024", "v0_1", "v0_2"]
    job, _ = read_whole("v0_1")
    assert job.accumulation(job.degrees(4)) == 4
    assert 'dataset = "c4"' in migrate(OLD["v0_1"])[0]
    gathers = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
    filtered = {"filter_fqns": ("output", "attention")}
    float8 = Float8(**dict.fromkeys(("emulate", *gathers), True), **filtered)
    rest = MXFP8(filter_fqns=("output", "feed_forward"))
    assert read_whole("converters_v0_1")[0].convert == (float8, rest)
    # There, nothing was left out unless the recipe said so.
    float8 = Float8(recipe="rowwise", emulate=True, filter_fqns=())
    assert read_whole("converters_v0_2")[0].convert == (float8,)


FLOAT8_KEYS = "[float8]\nfilter_fqns = ['output', 'wk']\nrecipe_name = 'rowwise'\n"
OF_405B = "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\nfilter_fqns = ['wk']\n"
FLOAT8_405B = (Float8(enable_fsdp_float8_all_gather=True, filter_fqns=("wk",)),)


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        (FLOAT8_KEYS, ()),
        (
            "[model]\nconverters = ['mx', 'float8']\n[mx]\nfilter_fqns = ['attention', 'output']\n"
            "[float8]\nfilter_fqns = ['feed', 'output']\nemulate = true\n",
            (
                MXFP8(filter_fqns=("attention", "output")),
                Float8(filter_fqns=("feed", "output"), emulate=True),
            ),
        ),
        ("[model]\nconverters = []\n", ()),
        # A name and a section by either of their names.
        ("[model]\nconverters = ['float8']\n" + OF_405B, FLOAT8_405B),
        ("[model]\nconverters = ['quantize.linear.float8']\n" + OF_405B, FLOAT8_405B),
        (
            "[model]\nconverters = ['float8']\n" + OF_405B.replace("quantize.linear.", ""),
            FLOAT8_405B,
        ),
        # Of 2024: the output was left out, and a switch was the name.
        ("[float8]\nenable_float8_linear = true\n", (Float8(),)),
        ("[float8]\nenable_float8_linear = false\nemulate = true\n", ()),
    ],
)
def test_converters(old, expected):
    assert read(old + "[data]\n")[0].convert == expected


@pytest.mark.parametrize(
    "case", cases(FOLDER / "bad_old_recipes.txt"), ids=lambda case: case.name.replace(" ", "-")
)
def test_what_is_refused(case):
    Path("bad.toml").write_text(case.recipe, encoding="utf-8")
    with pytest.raises(RecipeError) as error:
        missing(Path("bad.toml"), read_old(Path("bad.toml")))
    assert error.value.lines == case.lines


def test_text_of_a_migrated_recipe():
    before, after = (
        (FOLDER / f"migrated/{name}.toml").read_text(encoding="utf-8")
        for name in ("before", "after")
    )
    assert migrate(before)[0] == after


BATCH_OF_4 = '{"training.local_batch_size": 4}'


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        *table(__file__, "other_ways.txt"),
        ("\ufeff[training]\r\nbatch_size = 4\r\n", BATCH_OF_4),
        ("[training]\nbatch_size = 4", BATCH_OF_4),
    ],
)
def test_other_ways_to_write_a_recipe(old, expected):
    job, notices = read(old)
    values, expected = job.flat(), json.loads(expected)
    assert {key: values[key] for key in expected} == expected
    assert notices


def test_nothing_to_migrate():
    text = "[training]\n\n\n\nsteps=5"
    assert migrate(text) == (text, [])


@pytest.mark.parametrize("version", VERSIONS)
def test_a_recipe_gets_the_defaults_of_its_version(version):
    job, notices = read(VERSIONS[version])
    values = job.flat()
    assert {key: values[key] for key in DEFAULTS[version]} == DEFAULTS[version]
    assert job.data.dataset_path == "tests/assets/c4_test"
    [notice] = [line for line in notices if "a recipe of TorchTitan" in line]
    sign = {"v0.1": "job.print_args", "v0.2.0": "training.seed"}
    key = sign.get(version, "model.print_after_conversion")
    assert f"a recipe of TorchTitan {version}, as it has {key}; " in notice
    assert all(f" {key} = " in notice for key in DEFAULTS[version])
    seeds = [line for line in notices if "debug.seed: TorchTitan draws one" in line]
    assert len(seeds) == (version != "v0.2.0")  # that one says it
    # What the recipe says wins.
    job, notices = read(VERSIONS[version] + "[validation]\nsteps = 3\n")
    assert job.validation.steps == 3
    [notice] = [line for line in notices if "a recipe of TorchTitan" in line]
    assert "validation.steps" not in notice


def test_sizes_of_models():
    """v0.1 did not scale rotary frequencies; otherwise the published sizes are those here."""
    ours = JobConfig().model_args()
    assert (ours.n_heads, ours.n_kv_heads, ours.rope_scaling) == (16, 8, None)
    theirs = read(V0_2_2)[0].model_args()
    assert (theirs.n_heads, theirs.n_kv_heads) == (16, 16)
    assert theirs.rope_scaling == RopeScaling(factor=8.0)
    first = read(V0_1)[0].model_args()
    assert (first.n_kv_heads, first.rope_scaling) == (16, None)
    assert read(V0_2_2 + "n_heads = 8\n")[0].model_args().n_kv_heads == 8
    for flavor in ("8B", "70B", "405B"):
        chosen = f'flavor = "{flavor}"\n'
        here = read(f"[model]\n{chosen}")[0].model_args()
        assert read(V0_2_2 + chosen)[0].model_args() == here
        first = read(f"{V0_1}[model]\n{chosen}")[0].model_args()
        assert first.rope_scaling is None
        assert (first.dim, first.n_kv_heads) == (here.dim, here.n_kv_heads)


def test_a_recipe_of_ours_keeps_our_defaults():
    for section in set(OUR_SECTIONS) - {"convert"}:
        job, notices = read(V0_2_2 + f"[{section}]\n")
        assert job == JobConfig()
        assert [line for line in notices if f"of this project (it has [{section}]); " in line]
    ours = JobConfig.model_fields.keys() - {"job", "model", "training", "optimizer", "debug"}
    assert set(OUR_SECTIONS) < ours
    for text in ("", "[training]\nsteps = 9\n", "[data]\nlanes = -1\n"):
        job, notices = read(text)
        assert job.flat() == OURS | ({"training.steps": 9} if "steps" in text else {})
        assert notices == []


def test_a_recipe_that_extends_another_has_its_defaults():
    Path("ours.toml").write_text("[training]\nsteps = 1000\n")
    job, _ = read('extends = "ours.toml"\n' + V0_2_2)
    assert (job.data.dataset, job.training.steps) == ("python_stdlib", 1000)
    # Recipes that extend each other are migrated one by one, the base first.
    Path("base.toml").write_text(V0_2_2 + "[training]\nbatch_size = 2\n")
    Path("mine.toml").write_text('extends = "base.toml"\n[training]\ncompile = true\n')
    [note] = missing(Path("mine.toml"), read_old(Path("mine.toml")))
    assert note.startswith("it cannot be trained yet: base.toml: keys of TorchTitan v0.1, ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LOAD, "./tests/assets/tokenizer"),
        (LOAD + '[model]\nhf_assets_path = "weights"\n', "weights"),
        (LOAD + '[model]\nhf_assets_path = "weights/tokenizer.json"\n', "weights"),
        (LOAD + 'initial_load_path = "weights"\n', "weights"),
        (LOAD.replace("in_hf = true", "in_hf = false"), None),
        (LOAD.replace("enable = true", "enable = false"), None),
        (V0_2_2 + LOAD, "./tests/assets/tokenizer"),
    ],
)
def test_weights_beside_the_tokenizer(text, expected):
    job, notices = read(text)
    assert job.checkpoint.initial_load_path == expected
    assert len([line for line in notices if ": checkpoint.initial_load_in_hf: " in line]) == 1


def test_a_recipe_that_cannot_be_trained_here(capsys):
    for text, status, *said in table(__file__, "not_trained.txt"):
        Path("old.toml").write_text(f"{V0_2_2}{text}\n")
        assert main(["migrate", "old.toml"]) == int(status)
        printed = capsys.readouterr()
        assert [line for line in said if line not in printed.err] == [], text
        assert '"0.6B"' not in text or "may have other sizes" not in printed.err
        assert bool(printed.out) == (status == "0")


@pytest.mark.parametrize(
    "verb",
    [
        *("train", "check", "plan", "verify-parallelism", "verify-resume", "preflight"),
        *("manifest --for slurm", "data inspect", "compare --vary optimizer.lr=1,2"),
    ],
)
def test_other_verbs_name_the_command(verb, says):
    Path("my old.toml").write_text("[training]\nbatch_size = 4\nwarmup_steps = 5\nsteps = 0\n")
    name, *options = verb.split(" --")
    words = [*name.split(), "my old.toml", *(w for o in options for w in f"--{o}".split())]
    assert says(*words, status=2).endswith(
        "error: my old.toml: keys of TorchTitan v0.1, such as training.batch_size, "
        "training.warmup_steps\n  run torchtitan migrate 'my old.toml' -o 'my old_migrated.toml'\n"
    )


def test_the_table_leads_to_settings_that_exist():
    settings = {f"{p.path}.{key}" for p in places(JobConfig) for key in p.settings.model_fields}
    of_converters = {key for each in CONVERTERS.values() for key in each.model_fields}
    for name, row in {**TABLE, **OLD_KEYS}.items():
        if isinstance(row, Gone):
            assert name not in OURS
            assert row.instead
        elif row.to.startswith(OF_CONVERTER):
            assert row.to.removeprefix(OF_CONVERTER) in of_converters
        else:
            assert row.to in settings
    assert {key for key in OURS if isinstance(TABLE.get(key), Moved | Gone)} == {
        "checkpoint.exclude_from_loading",
        "activation_checkpoint.selective_ac_option",
        "parallelism.context_parallel_load_balancer",
        "parallelism.context_parallel_rotate_method",
    }


def test_earlier_keys_of_ours_win_by_their_source():
    Path("base.toml").write_text("[compile]\nenable = true\n")
    mine = 'extends = "base.toml"\n[parallelism]\ndata_parallel_impl = "fsdp2"\n'
    Path("mine.toml").write_text(mine)
    recipe = load_job("mine.toml", ["--metrics.precision_freq", "0"], None, "cpu")
    assert (recipe.config.sharding.name, recipe.config.compile.enable) == ("fsdp2", True)
    assert [line.split("; ")[0] for line in translations(recipe)] == [
        "mine.toml:3: parallelism.data_parallel_impl: is now sharding.name",
        "--metrics.precision_freq: 0 is dropped",
    ]
