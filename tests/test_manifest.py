"""What is written for schedulers: each field is one that they know, and means what it should."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.submission import TARGETS
from tests.tables import data
from torchtitan.cluster.manifest import TEMPLATES, split, yaml_text
from torchtitan.cluster.schedulers import fill
from torchtitan.tools.cli import main

ROOT = Path(__file__).parent.parent
RECIPE = "train_configs/llama3_70b.toml"
TABLE = data(__file__, "manifest.toml")
ASKED, WHERE = TABLE["asked"], TABLE["where"]
WHERE |= dict.fromkeys(("jobset", "kubeflow"), WHERE.pop("kubernetes"))


def written(capsys, target, *words):
    assert main(["manifest", RECIPE, "--for", target, *words]) == 0
    return capsys.readouterr().out


def checked(text, target):
    schema = json.loads((ROOT / f"tests/schemas/{target}.json").read_text(encoding="utf-8"))
    found = list(yaml.safe_load_all(text))
    for each in found:
        jsonschema.validate(each, schema)
    return found


def is_right_jobset(spec):
    """Return the container, if nodes, exit codes and the time to stop are as they should be."""
    [replicated] = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (32, 32, "Indexed")
    codes = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert codes == {"FailJob": [2, 3], "Ignore": [75]}
    assert [rule["onJobFailureReasons"] for rule in spec["failurePolicy"]["rules"]] == [
        ["PodFailurePolicy"]
    ]
    pod = job["template"]["spec"]
    # 70.6 billion parameters x 12 bytes on 32 nodes at 1 GB/s, and two minutes.
    assert pod["terminationGracePeriodSeconds"] == 150
    [container] = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    shell, option, line = container["command"]
    assert (shell, option) == ("sh", "-c")
    assert line == f"torchtitan preflight {RECIPE} && exec torchtitan train {RECIPE}"
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounted == {"shm": "/dev/shm", "work": "/work"}
    assert {each["name"] for each in pod["volumes"]} == set(mounted)
    names = [each["name"] for each in container["env"]]
    assert {"name": "TORCHTITAN_GRACE_SECONDS", "value": "150"} in container["env"]
    assert not any(name.startswith("NCCL") for name in names)
    return container


HARM = {
    "kubeflow": ("completionMode", "completionmode"),
    "jobset": ("completionMode", "completionmode"),
    "skypilot": ("num_nodes", "nodes"),
    "torchx": ("num_replicas", "replicas"),
}


@pytest.mark.slow  # needs packages that are not installed with this one
@pytest.mark.parametrize("target", HARM)
def test_the_software_itself_reads_it(target, capsys, tmp_path):
    python = os.environ.get("TORCHTITAN_ORACLES", sys.executable)
    _, package = TARGETS[target]
    look = f"import {package}"
    if subprocess.run([python, "-c", look], capture_output=True, check=False).returncode:
        pytest.skip(
            f"{package} is not installed; TORCHTITAN_ORACLES may name the Python of an "
            "environment that has it"
        )
    file = tmp_path / "job.py"
    text = written(capsys, target)
    for manifest, is_right in ((text, True), (text.replace(*HARM[target]), False)):
        file.write_text(manifest)
        command = [python, "-m", "tests.submission", target, file]
        environment = os.environ | {"HOME": str(tmp_path)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode == 0) == is_right, done.stderr


def test_a_jobset(capsys):
    [found] = checked(written(capsys, "jobset"), "jobset")
    container = is_right_jobset(found["spec"])
    set_there = {each["name"]: each.get("value", "3") for each in container["env"]}
    options, _ = fill({}, set_there, lambda: 1)
    assert options == {
        "nnodes": range(32, 33),
        "processes": 8,
        "rdzv_endpoint": "llama3-70b-node-0-0.llama3-70b:29500",
        "rdzv_conf": "is_host=false",
    }


def test_kubeflow(capsys):
    runtime, train = checked(written(capsys, "kubeflow"), "kubeflow")
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 32, "torch": {}}
    assert train["spec"]["trainer"] == {"numProcPerNode": 8}
    container = is_right_jobset(runtime["spec"]["template"]["spec"])
    names = [each["name"] for each in container["env"]]
    assert not any(name.startswith("PET") for name in names), "Trainer refuses them; it sets them"
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = node["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def test_skypilot(capsys):
    words = ["--job.description", "it's a # test", "--data.dataset_path", "/data/c4"]
    [task] = checked(written(capsys, "skypilot", *words), "skypilot")
    assert task["num_nodes"] == 32
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [75]}
    assert task["file_mounts"] == {
        "/work": {"name": "torchtitan", "mode": "MOUNT"},
        "/data/c4": {"name": "torchtitan-data", "mode": "MOUNT"},
    }
    folder, *commands = task["run"].splitlines()
    assert folder == "cd /work"
    given = [RECIPE, *words]
    assert shlex.split("\n".join(commands)) == [
        *("torchtitan", "preflight", *given, "&&"),
        *("torchtitan", "train", *given),
    ]


def test_slurm(capsys, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(written(capsys, "slurm", "--grace-seconds", "900"))
    subprocess.run(["bash", "-n", script], check=True)
    first, *lines = script.read_text().splitlines()
    assert first == "#!/usr/bin/env bash"
    found = {}
    for line in lines:
        if not line.startswith("#SBATCH"):
            break  # sbatch reads none after the first command
        option = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(.+))?", line)
        assert option
        assert re.fullmatch(TABLE["sbatch"][option[1]], option[2] or "")
        found[option[1]] = option[2]
    assert "#SBATCH" not in "\n".join(lines[len(found) :])
    assert (found["nodes"], found["gpus-per-task"], found["signal"]) == ("32", "8", "USR1@900")
    assert "export TORCHTITAN_GRACE_SECONDS=900" in lines


@pytest.mark.parametrize("target", TEMPLATES)
def test_what_a_recipe_asks_of_the_scheduler(target, capsys, tmp_path):
    words = [word for key, value in ASKED.items() for word in (f"--job.manifest.{key}", value)]
    assert main(["manifest", RECIPE, "--for", target, *words, "--training.steps", "7"]) == 0
    text, notes = capsys.readouterr()
    for part in WHERE[target]:
        assert part in text
    # The run is not told, and the user is told of what the scheduler does not take.
    assert f"torchtitan train {RECIPE} --training.steps 7" in text
    assert "job.manifest" not in text
    left_out = ASKED.keys() - WHERE[target].values()
    assert {key for key in ASKED if key in notes} == left_out
    if target == "slurm":
        (tmp_path / "job.sh").write_text(text)
        subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)
    elif target != "torchx":
        checked(text, target)


@pytest.mark.parametrize(
    "recipe", ["8b.toml", "日本.toml", f"{'x' * 70}.toml", "it's \\N.toml", ""]
)
@pytest.mark.parametrize("target", TEMPLATES)
def test_any_recipe_and_any_line_of_a_shell(recipe, target, says, tmp_path, monkeypatch):
    """A job has a name of Kubernetes, and no comment or operator hides what follows its line."""
    monkeypatch.chdir(tmp_path)
    if recipe:
        Path(recipe).write_text(f'extends = "{ROOT / "train_configs/debug_model.toml"}"\n')
    lines = ["module load cuda # 12", "export A=b;", " "]
    words = [recipe, "--for", target, "--world-size", "8", "--hardware", "h100"]
    words += ["--training.steps", "7", "--job.manifest.setup", *lines]
    text = says("manifest", *filter(None, words))
    assert "None" not in text
    if target == "slurm":
        (tmp_path / "job.sh").write_text(text)
        subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)
    elif target == "torchx":
        ast.parse(text)
    else:
        name = checked(text, target)[-1].get("metadata", {"name": "run"})["name"]
        assert re.fullmatch(r"[a-z]([-a-z0-9]{,38}[a-z0-9])?", name)
    shell = re.search("module load.*", text)[0]
    assert "# 12' " in shell.replace("\\'", "'")


def test_hardware_may_be_a_flag(says):
    words = ["manifest", "train_configs/debug_model.toml", "--world-size", "8", "--for", "slurm"]
    words += ["--job.hardware", ""]
    told = says(*words, status=2)
    assert "--hardware" in told
    assert "--devices-per-node" in told
    for hardware in ("h100", "torchtitan/plan/hardware/h100.toml"):
        assert "--gpus-per-task=8" in says(*words, "--hardware", hardware)
    assert 'accelerators: "H100:8"' in says(*words, "--hardware", hardware, "--for", "skypilot")


def test_a_grace_shorter_than_a_save_is_noted(capsys):
    for seconds, is_short in (("26", True), ("27", False)):
        words = [RECIPE, "--for", "jobset", "--grace-seconds", seconds]
        assert main(["manifest", *words]) == 0
        printed = capsys.readouterr()
        assert f"terminationGracePeriodSeconds: {seconds}\n" in printed.out
        told = "--grace-seconds: 26 s is less than a save is expected to take, 26.5 s"
        assert (told in printed.err) == is_short


@pytest.mark.parametrize(
    ("status", "before", "requeued"),
    [(0, 0, False), (2, 0, False), (3, 0, False), (75, 99, True), (1, 9, True), (1, 10, False)],
)
def test_a_script_of_slurm_is_requeued_by_its_status(status, before, requeued, capsys, tmp_path):
    """With stand-ins for Slurm's commands."""
    (tmp_path / "job.sh").write_text(written(capsys, "slurm"))
    for name, body in {"srun": f"exit {status}", "scontrol": 'echo "$@" > said'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    environment["SLURM_RESTART_COUNT"] = str(before)
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == status
    said = tmp_path / "said"
    assert (said.read_text() if said.exists() else "") == ("requeue 7\n" if requeued else "")


def test_torchx(capsys):
    tree = ast.parse(written(capsys, "torchx"))
    [role] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "specs.Role"
    ]
    given = {word.arg: ast.unparse(word.value) for word in role.keywords}
    assert given["num_replicas"] == "32"
    assert ast.literal_eval(given["entrypoint"]) == "sh"
    assert ast.literal_eval(given["args"]) == [
        *("-c", f"torchtitan preflight {RECIPE} && exec torchtitan train {RECIPE}")
    ]
    set_there = ast.literal_eval(given["env"]) | {"TORCHX_RANK0_HOST": "first"}
    options, _ = fill({}, set_there, lambda: 1)
    assert (options["processes"], options["rdzv_endpoint"]) == (8, "first:29500")
    assert "gpu=8" in given["resource"]


def test_without_a_preflight(capsys):
    for target in ("jobset", "slurm", "skypilot", "torchx"):
        text = written(capsys, target, "--no-preflight")
        assert "preflight" not in text
        assert "&&" not in text
    [task] = checked(written(capsys, "skypilot", "--no-preflight"), "skypilot")
    assert task["run"] == f"cd /work\ntorchtitan train {RECIPE}\n"


def test_a_recipe_of_a_laptop_asks_for_no_devices(says):
    recipe = "train_configs/debug_model.toml"
    words = ["manifest", recipe, "--world-size", "4", "--devices-per-node", "2"]
    hardware = ["--job.hardware", "cpu"]
    [found] = checked(says(*words, *hardware, "--for", "jobset"), "jobset")
    [container] = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert "resources" not in container
    assert "export PET_NPROC_PER_NODE=2\n" in says(*words, *hardware, "--for", "slurm")


def test_nothing_is_overwritten(tmp_path, says):
    file = tmp_path / "job.sh"
    words = ["manifest", "train_configs/debug_model.toml", "--for", "slurm", "-o", str(file)]
    assert main(words) == 0
    before = file.read_text()
    assert before.startswith("#!")
    assert "already exists; nothing was written" in says(*words, status=2)
    assert file.read_text() == before


@pytest.mark.parametrize(("ranks", "each", "nodes"), [(1, 8, 1), (8, 8, 1), (24, 8, 3), (6, 8, 1)])
def test_ranks_are_split_over_nodes(ranks, each, nodes):
    assert split(ranks, each) == (nodes, ranks // nodes)


def test_yaml_is_read_as_it_was_meant():
    for text in ("it's: # 1", "5", "é" * 300, "yes", "-y", "/a.b/c", "a/b@c", "one\ntwo\n", ""):
        assert yaml.safe_load(yaml_text(text)) == text


@pytest.mark.parametrize("target", TEMPLATES)
def test_what_is_written_is_kept(target, says):
    page = (ROOT / "docs/clusters.md").read_text(encoding="utf-8")
    assert f"torchtitan manifest train_configs/qwen3_32b.toml --for {target}\n" in page
    text = says("manifest", "train_configs/qwen3_32b.toml", "--for", target)
    assert text == (ROOT / f"tests/data/manifests/{target}.txt").read_text(encoding="utf-8")
    assert target != "slurm" or f"```text\n{text}```" in page
