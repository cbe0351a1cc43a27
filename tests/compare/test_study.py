"""Studies: what they ask for, what is refused, in which order their runs come."""

from pathlib import Path

import pytest

from tests.recipes.test_recipes import FOLDER, main_road, tokenizer  # noqa: F401  (a fixture)
from torchtitan.checkpoint import lock
from torchtitan.config import RecipeError
from torchtitan.tools.cli import main
from torchtitan.tools.compare import runs
from torchtitan.tools.compare.study import (
    REMOVED,
    is_study,
    make_study,
    prepare,
    read_study,
    slug,
    tasks,
)

DEBUG = FOLDER / "debug_model.toml"
STUDIES = main_road("studies/*.toml")
LARGEST = [path for path in STUDIES if "405b" in path.stem]
SMALLER = [path for path in STUDIES if path not in LARGEST]


def write(folder, text):
    path = folder / "study.toml"
    path.write_text(text)
    return path


def variants(*texts):
    named = (f'[[variants]]\nname = "{number}"\n{text}\n' for number, text in enumerate(texts))
    return f'recipe = "{DEBUG}"\n' + "".join(named)


def refused(study):
    with pytest.raises(RecipeError) as error:
        prepare(study)
    return error.value.lines


def test_a_study_is_told_from_a_recipe(tmp_path):
    assert is_study(write(tmp_path, variants("", "")))
    assert not is_study(DEBUG)


def test_variants_win_over_common_and_common_over_the_recipe(tmp_path):
    text = variants("", "training.seq_len = 64")
    path = write(tmp_path, text + "[common]\ntraining.seq_len = 32\noptimizer.lr = 0.5\n")
    first, second = (ready.job for ready in prepare(read_study(path)))
    assert (first.training.seq_len, second.training.seq_len) == (32, 64)
    assert first.optimizer.lr == second.optimizer.lr == 0.5
    # Flags win over both.
    flagged = prepare(read_study(path, ["--training.seq_len", "16"]))
    assert [ready.job.training.seq_len for ready in flagged] == [16, 16]


def test_checkpoints_and_validation_are_off_unless_asked_for(tmp_path):
    found = prepare(read_study(write(tmp_path, variants("", "checkpoint.enable = true"))))
    assert [ready.job.checkpoint.enable for ready in found] == [False, True]
    assert not any(ready.job.validation.enable for ready in found)


def test_all_steps_are_reported_and_the_last_one_traced(tmp_path):
    study = read_study(write(tmp_path, "steps = 7\nwarmup_steps = 3\n" + variants("", "")))
    job = prepare(study)[0].job
    assert (job.training.steps, job.metrics.log_freq) == (12, 1)
    profiling = job.profiling
    assert profiling.enable_profiling
    assert (profiling.profile_freq, profiling.profiler_warmup) == (12, 1)
    assert profiling.profiler_active == 1
    untraced = prepare(read_study(write(tmp_path, "trace = false\n" + variants("", ""))))[0].job
    assert not untraced.profiling.enable_profiling


def test_mistakes_of_all_variants_are_told_at_once_with_their_lines(tmp_path):
    path = write(tmp_path, variants("training.sequence = 3", "", 'training.seq_len = "long"'))
    lines = refused(read_study(path))
    assert [line.partition(": got")[0].partition(": unknown")[0] for line in lines] == [
        f"{path}:4: training.sequence",
        f"{path}:10: training.seq_len",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('baseline = "2"\n' + variants("", ""), ':1: baseline: got "2"; allowed: 0, 1'),
        *(
            (f"{key} = [1]\n{variants('', '')}", f":1: {key}: this key was removed; {instead}")
            for key, instead in REMOVED.items()
        ),
        ("round = 2\n" + variants("", ""), ":1: round: unknown key; allowed: "),
        ("rounds = 0\n" + variants("", ""), ":1: rounds: got 0; wanted an integer >= 1"),
        (variants(""), ": got one variant; wanted two or more to compare"),
        (variants("", "").replace('"1"', '"0!"'), ': variants "0" and "0!" would share a folder'),
        (variants("", "").replace('name = "1"', ""), ":5: variants.1: it has no name"),
    ],
)
def test_wrong_studies_are_refused(tmp_path, text, line):
    path = write(tmp_path, text)
    with pytest.raises(RecipeError) as error:
        read_study(path)
    assert any(found.startswith(f"{path}{line}") for found in error.value.lines), error.value.lines


def test_what_the_comparison_decides_no_variant_sets(tmp_path):
    path = write(tmp_path, variants("training.steps = 5", "", 'job.dump_folder = "x"'))
    lines = refused(read_study(path))
    ending = "; the comparison sets it, alike for all variants"
    assert lines == [
        f"{path}:4: training.steps: got 5{ending}; use --steps",
        f'{path}:10: job.dump_folder: got "x"{ending}; use --output',
    ]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--training.steps=5"], "--training.steps: got 5; {}; use --steps"),
        (["--no-metrics.save-events"], "--metrics.save_events: got false; {}"),
    ],
)
def test_what_the_comparison_decides_no_flag_sets(flags, line):
    study = make_study([DEBUG], ["training.seq_len=64,128"], flags)
    assert refused(study) == [line.format("the comparison sets it, alike for all variants")]


def test_a_variant_that_cannot_run_is_told_and_the_others_stay(tmp_path):
    text = variants("", "parallelism.tensor_parallel_degree = 3", 'model.flavor = "405B"')
    common = "[common]\ntraining.global_batch_size = 9\n"
    study = read_study(write(tmp_path, "ranks = 3\n" + text + common))
    fine, uneven, large = prepare(study)
    assert not fine.problems
    assert any("it does not divide the 16 heads" in line for line in uneven.problems)
    (line,) = large.problems
    assert "3 ranks hold at least " in line
    assert {task.ready.name for task in tasks(study, [fine, uneven, large])} == {"0"}


def test_rounds_alternate(tmp_path):
    study = read_study(write(tmp_path, "rounds = 3\n" + variants("", "")))
    found = [(task.ready.name, task.folder.name) for task in tasks(study, prepare(study))]
    assert found == [
        *[("0", "round-1"), ("1", "round-1"), ("1", "round-2"), ("0", "round-2")],
        *[("0", "round-3"), ("1", "round-3")],
    ]


def test_a_run_is_another_if_its_recipe_is(tmp_path):
    def keys(text):
        study = read_study(write(tmp_path, text))
        return [task.key for task in tasks(study, prepare(study))]

    first = keys("rounds = 1\n" + variants("", "optimizer.lr = 0.1"))
    # More rounds, another name of the report: the same runs.
    assert keys('rounds = 1\ntitle = "other"\n' + variants("", "optimizer.lr = 0.1")) == first
    assert keys("rounds = 1\n" + variants("", "optimizer.lr = 0.2"))[0] == first[0]
    assert keys("rounds = 1\n" + variants("", "optimizer.lr = 0.2"))[1] != first[1]


def test_one_recipe_varied_in_all_ways():
    vary = ["parallelism.tensor_parallel_degree=1,2", "optimizer.lr=0.1,0.2"]
    study = make_study([DEBUG], vary, [], ranks=2, rounds=1)
    assert [plan.name for plan in study.plans] == [
        *("tensor_parallel_degree = 1, lr = 0.1", "tensor_parallel_degree = 1, lr = 0.2"),
        *("tensor_parallel_degree = 2, lr = 0.1", "tensor_parallel_degree = 2, lr = 0.2"),
    ]
    jobs = [ready.job for ready in prepare(study)]
    assert [job.parallelism.tensor_parallel_degree for job in jobs] == [1, 1, 2, 2]
    assert [job.optimizer.lr for job in jobs] == [0.1, 0.2, 0.1, 0.2]
    with pytest.raises(RecipeError, match=r"--vary: got seq_len=3; wanted section.key=value,value"):
        make_study([DEBUG], ["seq_len=3"], [])
    names = make_study([DEBUG], ['job.description=["a, b", "c"]'], []).plans
    assert [plan.name for plan in names] == ["description = a, b", "description = c"]


def test_runs_are_launched_once_and_not_again(tmp_path, monkeypatch):
    text = f'rounds = 2\noutput = "{tmp_path}/out"\n' + variants("", "training.seq_len = 64")
    study = read_study(write(tmp_path, text))
    todo = tasks(study, prepare(study))
    calls = []

    def run(command, output):
        calls.append(command[-1].split("/runs/")[1].removesuffix(".toml"))
        assert command[1:-1] == [
            *("-m", "torchtitan", "train", "--max-restarts", "0", "--processes", "1"),
            "--job.config_file",
        ]
        return 5 if "seq_len = 64" in Path(command[-1]).read_text() else 0

    monkeypatch.setattr(runs, "_run", run)
    runs.launch_all(todo)
    # The one that failed is not tried in the second round.
    assert calls == ["0/round-1", "1/round-1", "0/round-2"]
    runs.launch_all(todo)
    assert calls[3:] == ["1/round-1"]
    # What is left of a run that was interrupted is set aside, and it begins anew.
    todo[0].folder.mkdir()
    (todo[0].folder / "half").touch()
    todo[0].folder.with_name("round-1.outcome.json").unlink()
    runs.launch_all(todo[:1])
    assert calls[4:] == ["0/round-1"]
    assert (todo[0].folder.with_name("round-1.before-1") / "half").exists()


def test_two_comparisons_do_not_share_a_folder(tmp_path, capsys):
    path = write(tmp_path, f'output = "{tmp_path}/out"\n' + variants("", ""))
    with lock(tmp_path / "out"):
        assert main(["compare", str(path)]) == 2
    assert f"output: another run writes into {tmp_path}/out" in capsys.readouterr().err
    assert not (tmp_path / "out/runs").exists()


@pytest.mark.gate
@pytest.mark.parametrize("studies", [SMALLER, LARGEST], ids=["smaller", "largest"])
def test_shipped_studies_can_run_where_they_are_meant_to(
    studies,
    tokenizer,  # noqa: F811
):
    for path in studies:
        # Symmetric memory is CUDA's.
        cannot = ["FSDP x async TP"] if path.stem == "ladder_2d_debug" else []
        assert_can_run(path, ["--model.tokenizer_path", tokenizer], cannot)


def assert_can_run(path, needed, cannot):
    """All variants of a study, but `cannot`, with what a large one needs of its user."""
    is_large = not path.stem.endswith("_debug")
    study = read_study(path, needed if is_large else [])
    found = prepare(study, is_here=not is_large)
    assert [ready.name for ready in found if ready.problems] == cannot
    batches = {
        ready.job.global_batch(ready.job.degrees(ready.plan.ranks)) * ready.job.training.seq_len
        for ready in found
        if not ready.problems
    }
    assert len(batches) == 1, "variants of a study train on as much a step"
    assert study.conditions.description
    twin = path.with_name("_".join([*path.stem.split("_")[:-1], "debug"]) + ".toml")
    assert twin.exists(), "each study has a twin for a laptop"


def test_slugs_are_folders():
    assert slug("FSDP 2 x TP 2, Float8!") == "fsdp-2-x-tp-2-float8"


def test_each_recipe_gets_the_ranks_that_it_needs():
    key = "parallelism.tensor_parallel_degree"
    ready = prepare(make_study([DEBUG], [f"{key}=1,2"], []))
    assert [one.plan.ranks for one in ready] == [1, 2]
    assert not any(one.problems for one in ready)
    cannot = prepare(make_study([DEBUG], [f"{key}=1,3"], []))[1]
    assert (cannot.plan.ranks, bool(cannot.problems)) == (3, True)
    given = prepare(make_study([DEBUG], [f"{key}=1,2"], [], ranks=2))
    assert [one.plan.ranks for one in given] == [2, 2]
