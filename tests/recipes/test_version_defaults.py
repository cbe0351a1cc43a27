"""What a recipe of TorchTitan does not say, or says with several keys together."""

import base64
from pathlib import Path
from typing import Any

import pytest

from torchtitan.checks import load_job
from torchtitan.config import RecipeError
from torchtitan.convert import Float8
from torchtitan.inputs import problems_of_task
from torchtitan.job import JobConfig
from torchtitan.legacy_recipes.version_defaults import DEFAULTS, OUR_SECTIONS
from torchtitan.models.layers import RopeScaling
from torchtitan.tools.cli import main
from torchtitan.train import main as train

V0_1 = "[job]\nprint_args = false\n"
V0_2_0 = "[training]\nseed = 1\n[checkpoint]\nenable = false\n"
V0_2_2 = "[model]\nprint_after_conversion = false\n"
THEIRS = {"v0.1": V0_1, "v0.2.0": V0_2_0, "v0.2.2": V0_2_2}


@pytest.fixture(autouse=True)
def _clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that TorchTitan's defaults name."""
    monkeypatch.chdir(tmp_path)
    for name in ("tests/assets/tokenizer", "tests/assets/c4_test", "weights"):
        Path(name).mkdir(parents=True)
    Path("tests/assets/c4_test/data.json").write_text('{"text": "a"}\n')
    Path("torchtitan/datasets/tokenizer").mkdir(parents=True)
    Path("torchtitan/datasets/tokenizer/tokenizer.model").touch()


def read(text: str, *flags: str) -> tuple[JobConfig, list[str]]:
    Path("r.toml").write_text(text, encoding="utf-8")
    recipe = load_job("r.toml", flags, None, "cuda")
    return recipe.config, recipe.notices


def refused(text: str, *flags: str) -> list[str]:
    with pytest.raises(RecipeError) as error:
        read(text, *flags)
    return error.value.lines


@pytest.mark.parametrize("version", THEIRS)
def test_version_and_its_defaults(version: str) -> None:
    job, notices = read(THEIRS[version])
    values = job.flat()
    assert {key: values[key] for key in DEFAULTS[version]} == DEFAULTS[version]
    assert job.data.dataset_path == "tests/assets/c4_test"
    [notice] = [line for line in notices if "a recipe of TorchTitan" in line]
    sign = {"v0.1": "job.print_args", "v0.2.0": "training.seed"}
    key = sign.get(version, "model.print_after_conversion")
    assert f"a recipe of TorchTitan {version}, as it has {key}; " in notice
    for key in DEFAULTS[version]:
        assert f" {key} = " in notice
    seeds = [line for line in notices if "debug.seed: TorchTitan would draw one" in line]
    assert len(seeds) == (version != "v0.2.0")  # that one says it


@pytest.mark.parametrize("version", THEIRS)
def test_what_is_said_wins(version: str) -> None:
    job, notices = read(THEIRS[version] + "[validation]\nsteps = 3\n", "--job.dump_folder=x")
    assert (job.validation.steps, job.job.dump_folder) == (3, "x")
    [notice] = [line for line in notices if "a recipe of TorchTitan" in line]
    assert "dump_folder" not in notice
    assert "validation.steps" not in notice


def test_debug_model() -> None:
    ours = JobConfig().model_args()
    assert (ours.n_heads, ours.n_kv_heads, ours.rope_scaling) == (16, 8, None)
    theirs = read(V0_2_2)[0].model_args()
    assert (theirs.n_heads, theirs.n_kv_heads) == (16, 16)
    assert theirs.rope_scaling == RopeScaling(factor=8.0)
    first = read(V0_1)[0].model_args()
    assert (first.n_kv_heads, first.rope_scaling) == (16, None)
    assert read(V0_2_2, "--model.n_heads=8")[0].model_args().n_kv_heads == 8


def test_published_sizes() -> None:
    """v0.1 did not scale rotary frequencies; otherwise the sizes are those here."""
    for flavor in ("8B", "70B", "405B"):
        here = read("", f"--model.flavor={flavor}")[0].model_args()
        assert read(V0_2_2, f"--model.flavor={flavor}")[0].model_args() == here
        first = read(V0_1, f"--model.flavor={flavor}")[0].model_args()
        assert first.rope_scaling is None
        assert (first.dim, first.n_kv_heads) == (here.dim, here.n_kv_heads)


def test_a_recipe_with_a_section_of_ours_is_ours() -> None:
    for section in set(OUR_SECTIONS) - {"convert"}:
        job, notices = read(V0_2_2 + f"[{section}]\n")
        assert job == JobConfig()
        assert [line for line in notices if f"of this project (it has [{section}]); " in line]
    ours = JobConfig.model_fields.keys() - {"job", "model", "training", "optimizer", "debug"}
    assert set(OUR_SECTIONS) < ours


@pytest.mark.parametrize("keys", ["", "[training]\nsteps = 9\n", "[data]\nlanes = -1\n"])
def test_a_recipe_without_a_sign_is_ours(keys: str) -> None:
    job, notices = read(keys, "--training.batch_size=4", "--training.steps=1000")
    assert job.flat() == JobConfig().flat() | {
        "training.local_batch_size": 4,
        "training.steps": 1000,
    }
    assert not [line for line in notices if "TorchTitan" in line]


def test_of_recipes_that_extend_each_other_the_last_decides() -> None:
    Path("ours.toml").write_text("[training]\nsteps = 1000\n")
    Path("theirs.toml").write_text(V0_2_2)
    job, notices = read('extends = "ours.toml"\n' + V0_2_2)
    assert job.data.dataset == "python_stdlib"
    assert [line for line in notices if "of this project (ours.toml has none); " in line]
    job, notices = read('extends = "theirs.toml"\n[spikes]\nsigma = 6\n')
    assert job.data.dataset == "c4_test"
    assert not [line for line in notices if "has none" in line]


def test_converters_by_either_name() -> None:
    """As v0.2.2's recipe of 405B writes it."""
    keys = (
        '[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\nfilter_fqns = ["output"]\n'
    )
    expected = (Float8(enable_fsdp_float8_all_gather=True, filter_fqns=("output",)),)
    for name in ("float8", "quantize.linear.float8"):
        for section in (keys, keys.replace("quantize.linear.", "")):
            recipe = f'[model]\nconverters = ["{name}"]\n{section}'
            assert read(recipe)[0].convert == expected
            main(["migrate", "r.toml", "-o", f"{name}{len(section)}.toml"])
            migrated = load_job(f"{name}{len(section)}.toml", [], None, "cuda")
            assert migrated.config == read(recipe)[0]
    flags = ("--quantize.linear.float8.filter_fqns", "wk", "output")
    first = '[model]\nconverters = ["float8"]\n[float8]\nfilter_fqns = ["wq"]\n'
    assert read(first, *flags)[0].convert == (Float8(filter_fqns=("wk", "output")),)
    both = keys + keys.replace("quantize.linear.", "")
    assert [
        line.split(": ")[1] for line in refused(f'[model]\nconverters = ["float8"]\n{both}')
    ] == [
        "float8.enable_fsdp_float8_all_gather",
        "float8.filter_fqns",
    ]


LOAD = "[checkpoint]\nenable = true\ninitial_load_in_hf = true\n"


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        (LOAD, (), "./tests/assets/tokenizer"),
        (LOAD + '[model]\nhf_assets_path = "weights"\n', (), "weights"),
        (LOAD + '[model]\nhf_assets_path = "weights/tokenizer.json"\n', (), "weights"),
        (LOAD + 'initial_load_path = "weights"\n', (), "weights"),
        (LOAD.replace("in_hf = true", "in_hf = false"), (), None),
        (LOAD.replace("enable = true", "enable = false"), (), None),
        (LOAD, ("--checkpoint.no-enable",), None),
        (LOAD, ("--checkpoint.initial_load_in_hf", "false"), None),
        (LOAD, ("--model.hf_assets_path", "weights"), "weights"),
        (
            V0_2_2,
            ("--checkpoint.enable", "--checkpoint.initial_load_in_hf"),
            "./tests/assets/tokenizer",
        ),
    ],
)
def test_weights_beside_the_tokenizer(text: str, flags: Any, expected: str | None) -> None:
    Path("weights/tokenizer.json").touch()
    job, notices = read(text, *flags)
    assert job.checkpoint.initial_load_path == expected
    said = [line for line in notices if ": checkpoint.initial_load_in_hf: " in line]
    assert len(said) == 1
    main(["migrate", "r.toml", "-o", "new.toml"])
    if not flags:
        assert load_job("new.toml", [], None, "cuda").config == job


def test_weights_beside_no_tokenizer() -> None:
    [line] = refused(LOAD, "--model.tokenizer_path", "none")
    assert line.startswith("r.toml:3: checkpoint.initial_load_in_hf: got true; it loads the ")
    [line] = refused(LOAD.replace("hf = true", "hf = 1"))
    assert line.endswith("initial_load_in_hf: got 1; wanted true or false")


def test_a_path_that_torchtitan_would_not_load() -> None:
    [line] = refused(V0_2_2 + '[checkpoint]\ninitial_load_path = "weights"\n')
    assert line.startswith("r.toml:4: checkpoint.initial_load_path: got ")
    assert "without checkpoint.enable = true TorchTitan ignores it" in line
    assert read('[checkpoint]\ninitial_load_path = "weights"\n')[0].checkpoint.initial_load_path


@pytest.mark.parametrize("run", [train, lambda words: main(["check", *words])])
def test_notices_are_shown_where_the_check_fails(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("r.toml").write_text(V0_2_2 + "[training]\nbatch_size = 2\nseq_len = 0\n")
    assert run(["r.toml"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert "note: r.toml:4: training.batch_size: is now training.local_batch_size" in error
    assert error[-2:] == [
        "error: r.toml:5: training.seq_len: got 0",
        "  wanted an integer >= 1",
    ]


@pytest.mark.parametrize("version", THEIRS)
def test_migrated_recipe_says_all(version: str) -> None:
    before, _ = read(THEIRS[version] + "[validation]\nenable = true\n")
    assert main(["migrate", "r.toml", "-o", "new.toml"]) == 0
    after = load_job("new.toml", [], None, "cuda")
    assert after.config == before
    assert not [line for line in after.notices if "TorchTitan" in line]


@pytest.mark.parametrize("name", ["llama4", "flux", "qwen3_vl", "lama3"])
def test_migrating_a_recipe_of_a_model_that_is_not_here(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("r.toml").write_text(f'{V0_2_2}name = "{name}"\nflavor = "debugmodel"\n')
    assert main(["migrate", "r.toml"]) == 2
    printed = capsys.readouterr()
    assert f'error: r.toml:3: model.name: got "{name}"\n' in printed.err
    assert "  allowed: llama3" in printed.err
    assert ("did you mean llama3?" in printed.err) == (name == "lama3")
    assert printed.out == ""


@pytest.mark.parametrize("flavor", ["debugmodel", "0.6B"])
def test_migrating_a_recipe_of_qwen(flavor: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.toml").write_text(f'{V0_2_2}name = "qwen3"\nflavor = "{flavor}"\n')
    assert main(["migrate", "r.toml"]) == 0
    printed = capsys.readouterr()
    assert 'name = "qwen3"' in printed.out
    said = "the debugmodel of qwen3 may have other sizes in TorchTitan" in printed.err
    assert said == (flavor == "debugmodel")


def test_migrating_a_recipe_that_cannot_be_trained_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("r.toml").write_text(f'{V0_2_2}flavor = "671B"\n')
    assert main(["migrate", "r.toml"]) == 0
    assert 'it cannot be trained yet: r.toml:3: model.flavor: got "671B"' in (
        capsys.readouterr().err
    )
    Path("r.toml").write_text(f'{V0_2_2}name = "x"\n[experimental]\ncustom_import = "no.such"\n')
    assert main(["migrate", "r.toml"]) == 0
    assert "job.imports: got" in capsys.readouterr().err


GATED = '[model]\nhf_assets_path = "./assets/hf/Llama-3.1-8B"\nflavor = "{flavor}"\n' + LOAD


def test_only_the_gated_tokenizer_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """It is said once, also where the weights are to come from there; the rest is checked."""
    Path("r.toml").write_text(GATED.format(flavor="8B"))
    assert main(["check", "r.toml", "--device", "cuda", "--world-size", "8"]) == 2
    printed = capsys.readouterr()
    told = printed.err.splitlines()
    assert told[:2] == [
        'error: r.toml:2: model.tokenizer_path: got "./assets/hf/Llama-3.1-8B"; there is no such '
        "file or folder",
        "  put the model's tokenizer.json or tokenizer.model there (hf download "
        "meta-llama/Llama-3.1-8B tokenizer.json --local-dir ./assets/hf/Llama-3.1-8B)",
    ]
    assert "note: r.toml:2: model.hf_assets_path: is now model.tokenizer_path" in told
    assert not [line for line in told[2:] if not line.startswith("note: ")]
    assert printed.out.startswith("on 8 ranks: "), "it is not valid as it is"
    assert main(["check", "r.toml", "--device", "cuda", "--world-size", "8", "--resolved"]) == 2
    printed = capsys.readouterr()
    assert 'initial_load_path = "./assets/hf/Llama-3.1-8B"' in printed.out


def test_what_else_is_wrong_is_said_beside_the_tokenizer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("r.toml").write_text(GATED.format(flavor="9B"))
    assert main(["check", "r.toml"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[2] for line in lines] == ["model.tokenizer_path", "model.flavor"]


HF = "hf download meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("a/b", f"tokenizer.json or tokenizer.model there ({HF} tokenizer.json --local-dir a/b)"),
        ("a/tokenizer.json", f"tokenizer.json there ({HF} tokenizer.json --local-dir a)"),
        ("tokenizer.json", f"tokenizer.json there ({HF} tokenizer.json --local-dir .)"),
        (
            "a/original/tokenizer.model",
            f"tokenizer.model there ({HF} original/tokenizer.model --local-dir a)",
        ),
        (
            "a/tokenizer.model",
            f"tokenizer.model there ({HF} original/tokenizer.model --local-dir a, and "
            "a/original/tokenizer.model is the path to write)",
        ),
    ],
)
def test_where_a_tokenizer_comes_from(path: str, hint: str) -> None:
    [line] = refused("", "--model.flavor=8B", f"--model.tokenizer_path={path}")
    assert line.endswith(f"; put the model's {hint}")
    [line] = refused(
        "", "--model.name=tiny", "--model.flavor=tiny", f"--model.tokenizer_path={path}"
    )
    assert "hf download" not in line


def tiktoken(path: Path, tokens: int) -> Path:
    """A tokenizer.model, whose 256 special tokens follow those in the file."""
    pairs = [bytes([n]) for n in range(256)] + [
        bytes([n // 256 + 97, n % 256]) for n in range(tokens - 256)
    ]
    lines = [f"{base64.b64encode(pair).decode()} {rank}" for rank, pair in enumerate(pairs)]
    path.write_text("\n".join(lines))
    return path


def test_vocabulary_follows_the_tokenizer_where_the_flavor_leaves_it_open() -> None:
    """As with the tokenizer of TorchTitan's own tests."""
    large = tiktoken(Path("large.model"), 2000)
    small = tiktoken(Path("small.model"), 1000)
    job, notices = read(f'[model]\ntokenizer_path = "{large}"\n')
    assert (job.model_args().vocab_size, job.flat()["model.vocab_size"]) == (2256, 2256)
    said = "r.toml:2: model.vocab_size: is 2256, as the tokenizer has more than the 2048 of "
    assert [line for line in notices if line.startswith(said)]
    assert not list(problems_of_task(job))
    job, _ = read(f'[model]\ntokenizer_path = "{small}"\n')
    assert (job.model_args().vocab_size, job.flat()["model.vocab_size"]) == (2048, None)
    for chosen in ("--model.vocab_size=2100", "--model.flavor=8B"):
        job, _ = read(f'[model]\ntokenizer_path = "{large}"\n', chosen)
        assert job.model_args().vocab_size == (128_256 if "8B" in chosen else 2100)
    [problem] = problems_of_task(
        read("", f"--model.tokenizer_path={large}", "--model.vocab_size=9")[0]
    )
    assert "2256 tokens, but the model's vocabulary only 9" in problem.message
