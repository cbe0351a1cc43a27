"""The verbs of the `torchtitan` command, the schema for editors, and the reference page."""

import ast
import errno
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated
from unittest.mock import Mock

import pytest
import typer
from typer.main import get_command

from tests import forked, registries
from tests.tables import table
from torchtitan.checks import load_job
from torchtitan.cluster import launcher
from torchtitan.config import ConfigError, counted, json_schema, packaged_recipes, split_recipe
from torchtitan.config.schema import descriptions, kind_of, places
from torchtitan.convert import CONVERTERS
from torchtitan.job import JobConfig
from torchtitan.optim import OPTIMIZERS
from torchtitan.plan.fitting import memory
from torchtitan.tools import commands
from torchtitan.tools.cli import ABSENT, act, command, main, verbs
from torchtitan.tools.commands import verb_of_help
from torchtitan.tools.options import RecipeVerb, Verb, count, verb

pytestmark = pytest.mark.usefixtures("in_empty_folder")
ROOT = Path(__file__).parents[2]
Seeds = Annotated[list[int], typer.Option(parser=count, metavar="N...")]
Vary = Annotated[list[str], typer.Option(metavar="KEY=A,B")]


FULL = "error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize(("output", "said"), [("/dev/full", FULL), ("", "")])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_takes_is_no_traceback(output, said, unbuffered):
    """A full disk is said; a reader that has read enough, as `| head`, is not."""
    shell = (
        f"exec 3>&1; {{ sleep 0.3; {sys.executable} -m torchtitan --version 2>&3; echo $? >&3; }}"
    )
    shell += f" > {output}" if output else " | true"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["sh", "-c", shell], text=True, capture_output=True, env=environment)
    assert done.stdout == f"{said}1\n"


def test_a_full_disk_is_said(monkeypatch, capsys):
    """A run leaves a traceback, as it may start again."""

    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("torchtitan.tools.cli.run", Mock(side_effect=full))
    with Path("output").open("w") as output, redirect_stdout(output):
        assert act(["plot", "r"]) == 1
    assert capsys.readouterr().err == "error: a file cannot be written: No space left on device\n"
    assert not Path("output").read_text(), "what is written as JSON stays so"
    with pytest.raises(OSError):
        act(["train", "r.toml"])


@pytest.mark.parametrize("output", ["r.toml/x", "/proc/x", "x" * 300])
def test_a_file_that_cannot_be_written_is_named(output, says):
    recipe("[training]\nsteps = 7\n")
    train = "tokenizer train --dataset r.toml --vocab-size 300 --output"
    for words in ("recipes copy debug_model", "migrate r.toml -o", train):
        assert f"error: {output}" in says(*words.split(), output, status=2), words


def python(*words):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def recipe(text):
    Path("r.toml").write_text(text, encoding="utf-8")
    return "r.toml"


def test_check_prints_the_resolved_recipe(says):
    path = recipe("[training]\nsteps = 7\n[lr_scheduler]\nwarmup_steps = 3\n")
    output = says("check", path, "--training.seq_len", "64", "--resolved")
    Path("resolved.toml").write_text(output, encoding="utf-8")
    resolved = load_job("resolved.toml", [], 1, "cpu")
    assert resolved.config == load_job(path, ["--training.seq_len=64"], 1, "cpu").config
    assert set(tomllib.loads(output)) == set(JobConfig.model_fields)


@pytest.mark.gate
def test_check_says_what_a_recipe_comes_to(capsys):
    path = recipe("[training]\nglobal_batch_size = 32\nsteps = 10\nlocal_batch_size = 2\n")
    words = ["--world-size", "4", "--parallelism.data_parallel_replicate_degree", "2"]
    assert main(["check", path, *words]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "valid on 4 ranks: pp 1, dp_replicate 2, dp_shard 2, cp 1, tp 1",
        "llama3 debugmodel: 5,770,496 parameters, 69.23 MFLOP per token",
        "32 sequences per optimizer step: 2 at a time x 4 accumulated x 4 data-parallel",
        "65,536 tokens per step, 655,360 in 10 steps",
    ]
    assert printed.err == (
        "note: r.toml: lr_scheduler.warmup_steps: got 200; the schedule has only 10 steps, all of "
        "which are warm-up\n"
    )
    assert main(["check", path, *words, "--resolved"]) == 0
    comments = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    assert comments == [
        "# in effect: dim 256, n_layers 6, n_heads 16, n_kv_heads 8, ffn_dim 768, vocab_size 2048, "
        'norm_eps 1e-05, rope_theta 500000.0, sliding_window 0, tied false, norm "rms", '
        "rope_scaling 1.0, rope_low_freq_factor 1.0, rope_high_freq_factor 4.0, "
        "rope_original_context 8192"
    ]


@pytest.mark.costs("a plan")
def test_the_first_lines_of_check_answer(tmp_path):
    recipe("[checkpoint]\nenable = true\n[training]\nseq_len = 64\n")

    def check():
        """As with `| head -5`."""
        head = subprocess.Popen(["head", "-5"], stdin=subprocess.PIPE, text=True)
        with head, redirect_stdout(head.stdin):
            return main(["check", "r.toml", "--plan"])

    done = forked.run(check, tmp_path)
    assert done.status == 0, done.stderr
    begins = ("valid on 1 rank: ", "llama3 debugmodel: ", "planned memory of a rank on cpu: ")
    lines = done.stdout.splitlines()
    assert all(line.startswith(begin) for line, begin in zip(lines, begins, strict=False))
    assert [lines[3].split()[1], lines[4].split()[1]] == ["sequences", "tokens"]
    assert "Error" not in done.stderr


@pytest.mark.gate
def test_check_here_says_where_the_run_starts(capsys, says):
    words = [recipe("[checkpoint]\nenable = true\n"), "--here", "--device", "cpu"]
    small = ["--training.steps=1", "--model.dim=32", "--training.seq_len=8", "--no-data.shuffle"]
    assert says("check", *words, *small).endswith("\nstarts from scratch\n")
    must = [*words, *small, "--checkpoint.resume=must"]
    assert 'got "must", but there is no checkpoint' in says("check", *must, status=2)
    assert main(["check", *must, "--checkpoint.frequent.interval=1"]) == 0
    told = "is refused unless nodes hold a frequent checkpoint, which is not looked for here\n"
    assert capsys.readouterr().out.endswith(told)
    assert main(["train", words[0], *small]) == 0
    before = sorted(Path("outputs").rglob("*"))
    assert says("check", *words, *small).endswith("\nresumes from outputs/checkpoint/step-1\n")
    assert "belongs to another run" in says("check", *words, *small, "--model.dim=64", status=2)
    assert sorted(Path("outputs").rglob("*")) == before


LARGE = ["--training.steps=9", "--model.flavor=70B", "--device", "cuda", "--world-size", "16"]
LARGE += ["--training.seq_len=4096", "--training.local_batch_size=1"]


@pytest.mark.slow
def test_check_judges_the_memory_of_a_device(capsys, says):
    assert says("check", *LARGE, "--device-memory", "141").startswith("valid on 16 ranks: ")
    assert main(["check", *LARGE, "--device-memory", "60"]) == 2
    printed = capsys.readouterr()
    what, fix = printed.err.splitlines()[:2]
    held = re.fullmatch(
        r"error: --device-memory: got 60; a rank takes ([\d.]+) GiB by its plan", what
    )
    assert held
    assert f" GiB allocated, {held[1]} reserved (" in printed.out
    assert "; it does not fit: " in printed.out
    assert printed.out.startswith("on 16 ranks: "), "not valid for that device"
    first, second, third = re.findall(r"(--[^(]*) \(([\d.]+) GiB reserved\)", fix)
    for flags, size in (first, second, third):
        assert float(size) <= 60 < float(held[1]), flags
    assert main(["check", *LARGE, *first[0].split(), "--device-memory", "60"]) == 0
    assert f" GiB allocated, {first[1]} reserved (" in capsys.readouterr().out
    assert main(["check", *LARGE, "--device-memory", "1"]) == 2
    assert "no change was found after which it fits: use at least " in capsys.readouterr().err


def test_check_says_what_updates_which_roles(capsys):
    assert main(["check", recipe(""), "--optimizer.name", "Muon", "--optimizer.lr", "1e-3"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if " updates " in line]
    assert said == [
        "AdamW updates embedding (1 tensors, 524,288 parameters), norm (13 tensors, 3,328 "
        "parameters), head (1 tensors, 524,288 parameters)",
        "Muon updates matrix (42 tensors, 4,718,592 parameters)",
    ]


def test_check_without_a_world_size_takes_the_least(capsys):
    path = recipe("[parallelism]\ndata_parallel_replicate_degree = 4\n")
    assert main(["check", path, "--training.seq_len=64", "--device=cpu"]) == 0
    layout = "pp 1, dp_replicate 4, dp_shard 1, cp 1, tp 1"
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == f"valid on 4 ranks: {layout}; --world-size N checks another number"


def test_memory_of_which_no_kind_is_large_has_no_list_of_kinds():
    small = SimpleNamespace(value=0.01)
    planned = SimpleNamespace(
        kinds=[1], hardware=None, device_type="cpu", room_gib=None, capacity_gib=None
    )
    planned.allocated_gib = planned.reserved_gib = small
    planned.outside_gib, planned.by_kind_gib = 0.3, {"parameters": 0.01}
    assert memory(planned).endswith(" reserved, 0.3 outside the allocator")


def test_things_are_counted_in_the_singular_too():
    words = [counted(number, "sequence") for number in (0, 1, 2048)]
    assert words == ["0 sequences", "1 sequence", "2,048 sequences"]


def test_check_for_another_device(says):
    path = recipe("[profiling]\nenable_profiling = true\nenable_memory_snapshot = true\n")
    assert main(["check", path, "--device", "cuda"]) == 0
    assert "on cpu" in says("check", path, "--device", "cpu", status=2)


def test_check_takes_flags_in_any_order(says):
    words = ["--training.steps", "300", "--world-size", "2", "--no-data.shuffle", "--device", "cpu"]
    assert "valid on 2 ranks" in says("check", recipe(""), *words)
    output = says("check", recipe(""), *words, "--resolved")
    assert "shuffle = false" in output
    assert "steps = 300" in output


def test_migrate_prints(capsys):
    text = "[training]\n{} = 2\n\n[data]\nshuffle = false\n"
    assert main(["migrate", recipe(text.format("batch_size"))]) == 0
    printed = capsys.readouterr()
    assert printed.out == text.format("local_batch_size")
    moved, mixed = printed.err.splitlines()
    assert moved == "note: r.toml:2: training.batch_size: is now training.local_batch_size"
    assert mixed.startswith(
        "note: r.toml:2: a key of TorchTitan, in a recipe of this project (it has [data]); "
    )


def test_migrate_writes_but_not_over(capsys):
    path = recipe("[training]\nbatch_size = 2\n")
    assert main(["migrate", path, "-o", "new.toml"]) == 0
    new = Path("new.toml").read_text(encoding="utf-8")
    assert new.startswith("[training]\nlocal_batch_size = 2\n")
    assert main(["migrate", path, "-o", path]) == 2
    assert "r.toml: already exists; nothing was written" in capsys.readouterr().err
    assert main(["migrate", "none.toml"]) == 2


def test_what_the_command_line_does_not_know(capsys):
    for typed, message in table(__file__, "bad_commands.txt"):
        said = refused(typed, capsys)
        assert message in said, typed
        assert f"see torchtitan{' ' * bool(typed)}" in said, typed


def test_what_is_refused(capsys):
    recipe("")
    for typed, message in table(__file__, "refused_commands.txt"):
        assert message in refused(typed, capsys), typed


def refused(typed, capsys):
    """What is said of a command."""
    assert main(typed.split()) == 2, typed
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


@pytest.mark.parametrize("words", [[], ["checkpoint"]])
def test_a_group_alone_shows_its_help(words, says):
    text = says(*words, "--help")
    assert says(*words) == text


def test_help_has_the_verbs_in_groups(says):
    lines = says("--help").splitlines()
    names = [name for group, modules in verbs().items() for name in (group, *modules)]
    begins = [(f"│ {name} ", f"╭─ {name} ") for name in names]
    places = [next(n for n, line in enumerate(lines) if line.startswith(b)) for b in begins]
    assert places == sorted(places)


@pytest.mark.costs("the help of every verb")
def test_each_verb_has_help(says):
    for name in (name for modules in verbs().values() for name in modules):
        text = says(name, "--help")
        assert f"torchtitan {name}" in text
        assert "<bool>" not in text
        for words in ([name, "-h"], ["--help", name]):
            assert says(*words) == text


def test_help_shows_names_in_brackets(capsys):
    assert main(["checkpoint", "convert", "--help"]) == 0
    assert "the section [model] of a recipe" in " ".join(capsys.readouterr().out.split())


@pytest.mark.gate
@pytest.mark.parametrize("words", ["train --help all", "checkpoint --help", "recipes copy --help"])
def test_help_is_the_same_without_docstrings(words):
    shown = [
        subprocess.check_output([sys.executable, *flags, "-m", "torchtitan", *words.split()])
        for flags in ([], ["-OO"])
    ]
    assert shown[0] == shown[1]


def test_help_of_a_section_is_the_same_for_every_verb(says):
    text = says("train", "--help", "loss")
    assert "│ --loss.vocabulary_chunk " in text
    for words in (["check", "r.toml", "--help"], ["compare", "-h"], ["-h"]):
        assert says(*words, "loss") == text, words


def test_help_shows_the_choice_that_flags_make(says):
    for flag in (["--optimizer.name", "Muon"], ["--optimizer.name=Muon"]):
        lines = says("train", *flag, "--help", "optimizer").splitlines()
        titles = [line.strip("╭─╮ ") for line in lines if line.startswith("╭")]
        muon = '[optimizer] with name = "Muon"'
        assert titles == [muon, "[[optimizer.groups]]", "[optimizer.adamw]"]
        assert any("Settings of Muon that" in line for line in lines)


@pytest.mark.gate
def test_help_is_that_of_the_verb_itself(capsys):
    for name, module in (
        (name, module) for modules in verbs().values() for name, module in modules.items()
    ):
        own = command(module)
        for words in ([], *([inner] for inner in getattr(own, "commands", ()))):
            for each in (own, verb_of_help(name, (Verb, RecipeVerb))):
                each.main([*words, "--help"], name, standalone_mode=False)
            printed = capsys.readouterr().out
            half = len(printed) // 2
            assert printed[:half] == printed[half:], (name, words)


def test_help_texts_stand_alone():
    """A capital, a period, and the default in parentheses."""
    entries = (entry for part in commands.settings() for entry in part.entries)
    texts = [("settings", entry.path, entry.help) for entry in entries]
    for name in (name for group in verbs().values() for name in group):
        found = verb_of_help(name, (Verb, RecipeVerb))
        for inner in getattr(found, "commands", {"": found}).values():
            texts += [(name, option.name, option.help) for option in inner.params if option.help]
    assert len(texts) > 350
    for of, name, text in texts:
        is_sentence = re.fullmatch(r"[A-Z0-9].*[.)]", text) or re.match(r"[a-z]+: ", text)
        assert is_sentence, f"{of} {name}: {text}"
        assert "absent" not in text, f"{of} {name}: {text}"


OTHERS = {
    # Of torchrun, hf, lm_eval, sbatch, git, nvidia-smi, docker, pip.
    *("--standalone", "--nproc-per-node", "--nproc_per_node", "--node-rank", "--local_addr"),
    *("--rdzv_backend", "--rdzv_conf", "--rdzv_endpoint", "--rdzv_id", "--role", "--tee"),
    *("--local-ranks-filter", "--signals-to-handle", "--repo-type", "--local-dir"),
    *("--model_args", "--account", "--ntasks-per-node", "--porcelain", "--query-gpu"),
    *("--shm-size", "--index-url"),
    # Of all verbs together, and beginnings of keys.
    *("--version", "--convert", "--job.manifest"),
}
"""Flags that no verb has."""


def test_every_flag_that_a_message_or_a_page_names_exists():
    known = {option for options in commands.completion_table().values() for option in options}
    known |= OTHERS | {words.split()[-1] for words in ABSENT if "--" in words}
    named = []
    for path in (ROOT / "torchtitan").rglob("*.py"):
        tree = ast.walk(ast.parse(path.read_text()))
        texts = (str(node.value) for node in tree if isinstance(node, ast.Constant))
        named += [(path.name, flag) for text in texts for flag in flags_in(text)]
    for path in (ROOT / "docs").glob("*.md"):
        if path.stem not in ("from_torchtitan", "extending"):  # which have keys of others
            flags = flags_in(path.read_text())
            named += [(path.name, flag) for flag in flags if "." in flag]
    assert len(named) > 200
    assert not {(name, flag) for name, flag in named if not {flag, turned_on(flag)} & known}


def flags_in(text):
    """The flags in a text, but for placeholders such as --section.key."""
    found = re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", text)
    return [flag for flag in found if not re.match(r"--(no-)?(section|a|convert\.N)\b", flag)]


def turned_on(flag):
    return re.sub(r"\.no[-_]", ".", flag).replace("--no-", "--")


def test_long_help_on_a_terminal_is_paged(monkeypatch, capsys):
    paged = []
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setattr("pydoc.pager", paged.append)
    assert main(["train", "--help", "loss"]) == 0
    assert not paged
    assert capsys.readouterr().out
    assert main(["train", "--help", "all"]) == 0
    assert "--loss.vocabulary_chunk" in "".join(paged)
    assert capsys.readouterr().out == ""


def test_help_lists_the_sections(says):
    lines = says("train", "--help").splitlines()
    listed = [line.split()[1] for line in lines if re.match(r"│ [a-z_]+  ", line)]
    assert listed == list(JobConfig.model_fields)
    assert any(line.startswith("│ optimizer ") and "AdamW, Adam, SGD" in line for line in lines)


@pytest.mark.gate
@pytest.mark.parametrize("entry", [" train", ".train", ".launch --processes 2"])
def test_all_entry_points_have_one_parser(entry):
    done = python("-m", *f"torchtitan{entry}".split(), "--log-levle", "debug")
    assert done.returncode == 2
    assert "there is no --log-levle\n  did you mean --log-level?" in done.stderr
    assert "see torchtitan train --help" in done.stderr


def test_a_rank_starts_no_ranks(monkeypatch, says):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    error = says("train", "r.toml", "--processes", "2", status=2)
    assert error.startswith("error: torchrun started this process as a rank\n  leave out --proc")


def test_log_level_reaches_the_ranks(monkeypatch):
    recipe = ["--training.steps", "1", "--metrics.log_level", "info"]
    start = Mock(return_value=0)
    monkeypatch.setattr(launcher, "start", start)
    monkeypatch.setattr(launcher.trainer, "main", start)
    for more in ([], ["--processes", "2"]):
        assert main(["train", *recipe, "--log-level", "warning", *more]) == 0
    found = [call.args[-1] for call in start.call_args_list]
    assert found == [[*recipe, "--metrics.log_level", "warning"]] * 2


def test_an_option_of_several_values_takes_all_words_up_to_the_next():
    found = []

    def compare(paths: list[Path], seeds: Seeds, vary: Vary, context: typer.Context):  # typer reads
        found.append((paths, seeds, vary, context.args))

    app = verb()
    app.command(cls=RecipeVerb)(compare)
    words = ["a.toml", "--seeds", "1", "2", "--vary", "x.y=1", "--training.steps", "3", "--seeds=4"]
    get_command(app).main(words, standalone_mode=False)
    flags = ["--training.steps", "3"]
    assert found == [([Path("a.toml")], [1, 2, 4], ["x.y=1"], flags)]


def completed(words, monkeypatch, capsys):
    """Completions of the last of `words` in bash."""
    monkeypatch.setenv("_TORCHTITAN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    with pytest.raises(SystemExit):
        main([])
    return capsys.readouterr().out.split()


def test_completion(monkeypatch, capsys):
    Path("folder").mkdir()
    for name in ("folder/one.toml", "folder/two.toml", "folder/a.txt", "recipe.toml", "b.txt"):
        Path(name).touch()
    for typed, expected in table(__file__, "completions.txt"):
        words = f"torchtitan {typed.removesuffix('<TAB>')}"
        names = expected.replace("{PACKAGED}", " ".join(packaged_recipes())).split()
        found = completed(words, monkeypatch, capsys)
        assert found == ([] if expected == "nothing" else names), typed


def test_completion_imports_no_torch(monkeypatch, capsys):
    assert completed("torchtitan train --optimizer.name Mu", monkeypatch, capsys) == ["Muon"]
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        "from torchtitan.tools.cli import main\n"
        "main()"
    )
    assert python("-c", code).stdout.split() == ["Muon", "False"]


def test_modules_of_the_current_folder_can_be_imported(capsys):
    Path("local_optimizers.py").write_text(
        "from torchtitan.optim import OPTIMIZERS, SGD\nOPTIMIZERS['Local'] = OPTIMIZERS['SGD']\n",
        encoding="utf-8",
    )
    path = recipe('[job]\nimports = ["local_optimizers"]\n')
    assert main(["check", path, "--optimizer.name", "SGD"]) == 0
    assert "Local" in OPTIMIZERS
    capsys.readouterr()


def test_split_recipe():
    flags = ["--x.y", "1"]
    assert split_recipe([]) == (None, [])
    assert split_recipe(["a.toml", *flags]) == ("a.toml", flags)
    assert split_recipe([*flags, "--job.config_file", "a.toml"]) == ("a.toml", flags)
    found = split_recipe(["--job.config-file=a.toml", "--x.y=a b"])
    assert found == ("a.toml", ["--x.y=a b"])
    for words, message in [
        (["--job.config_file"], "got no value; wanted a recipe"),
        (["--job.config_file", "--x.y"], "got no value; wanted a recipe"),
        (["--job.config_file=a.toml", "b.toml"], "got a.toml and b.toml; wanted one recipe"),
        (["a.toml", "--job.config_file=b.toml"], "got a.toml and b.toml; wanted one recipe"),
    ]:
        with pytest.raises(ConfigError, match=f"^--job.config_file: {message}$"):
            split_recipe(words)


def test_help_has_every_setting(monkeypatch, says):
    monkeypatch.setenv("COLUMNS", "1000")  # so that no text is broken into lines
    output = says("train", "--help", "all")
    for path, _, settings, *_ in places(JobConfig):
        for key, field in settings.model_fields.items():
            if kind_of(field) is field:
                assert f"│ --{path}.{key}  (" in output
                about, of_flavor, _ = descriptions(settings)[key].partition("the flavor's")
                assert f"│     {about}{'' if of_flavor else ' '}" in output
    assert "(default: 256 in debugmodel; 2048 in 1B; " in output
    assert "the flavor's" not in output
    for name, choice in CONVERTERS.items():
        assert f'─ [[convert]] with name = "{name}" ─' in output
        assert all(f"│ --convert.0.{key}  (" in output for key in choice.model_fields)


def resolved(schema, part):
    """A part of a schema, its `$ref` followed."""
    reference = part.get("$ref")
    return schema["$defs"][reference.removeprefix("#/$defs/")] if reference else part


def test_schema_describes_every_key(says):
    text = says("check", "--json-schema")
    assert "the flavor's" not in text
    schema = json.loads(text)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(schema["properties"]) == {"extends", *JobConfig.model_fields}
    for name, part in schema["properties"].items():
        section = resolved(schema, part)
        assert section["description"], name
        several = section.get("items", section)
        for choice in several.get("oneOf", [several]):
            assert name == "extends" or choice["additionalProperties"] is False
            for key, value in choice.get("properties", {}).items():
                assert resolved(schema, value)["description"], f"{name}.{key}"
    choices = schema["properties"]["model"]["oneOf"]
    keys = {choice["properties"]["name"]["const"]: choice for choice in choices}
    for name, dim in (("llama3", "256 in debugmodel; 2048 in 1B"), ("qwen3", "debugmodel")):
        assert dim in keys[name]["properties"]["dim"]["description"]


def test_schema_tells_choices_apart_and_refers_to_nothing_that_is_missing():
    text = json.dumps(schema := json_schema(JobConfig))
    choices = schema["properties"]["optimizer"]["oneOf"]
    names = {choice["properties"]["name"]["const"]: choice.get("required") for choice in choices}
    # Without a name a section is AdamW's; were `name` optional elsewhere, it would be several.
    assert names.pop("AdamW") is None
    assert all(required == ["name"] for required in names.values())
    part = schema["properties"]["convert"]
    assert part["type"] == "array"
    choices = part["items"]["oneOf"]
    assert [choice["properties"]["name"]["const"] for choice in choices] == list(CONVERTERS)
    assert all(choice["required"] == ["name"] for choice in choices)
    for piece in text.split('"$ref": "')[1:]:
        assert piece.split('"')[0].removeprefix("#/$defs/") in schema["$defs"]


def test_reference_is_fresh_and_describes_every_key_once():
    script = runpy.run_path(str(ROOT / "scripts/write_config_docs.py"))
    with registries.having(registries.SHIPPED):
        pages, of_help = script["pages"](), script["reference_json"]()
    command = "run python scripts/write_config_docs.py"
    assert commands.REFERENCE.read_text(encoding="utf-8") == of_help, command
    for name, page in pages.items():
        for part in page.split("\n## "):
            rows = re.findall(r"^\| `([\w.]+)` \|.*\| (.*) \|$", part, re.MULTILINE)
            assert len(rows) == len({key for key, _ in rows}), (name, part)
            assert all(about for _, about in rows), (name, part)
