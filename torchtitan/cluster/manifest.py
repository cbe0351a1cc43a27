"""Write what runs a recipe on a scheduler: a Kubernetes resource, a SkyPilot task or a script."""

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from torchtitan import config
from torchtitan.checks import ELSEWHERE, load_job
from torchtitan.checks.model import model_of
from torchtitan.config import ConfigError, import_wing
from torchtitan.inputs import require_recipe
from torchtitan.job import JobConfig, ManifestSection
from torchtitan.logging import logger
from torchtitan.models.spec import count_parameters
from torchtitan.resilience.exit_codes import ExitCode
from torchtitan.resilience.stop import VARIABLE, planned_seconds
from torchtitan.tools.options import (
    Count,
    Flag,
    Output,
    Recipe,
    RecipeVerb,
    Text,
    one_of,
    verb,
    write_output,
)

FOLDER = Path(__file__).with_name("manifests")
WORK = "/work"
"""Folder of the recipe, of relative paths and of the run in the image of `Dockerfile`."""
OF_A_JOB = ("skypilot", "torchx")
"""Schedulers whose manifests say nothing of a queue, nor of the time to stop."""
OF_A_QUEUE = ("account", "partition", "time_limit_minutes")
LEAST_GRACE = 120
"""Seconds for the step that is under way, and to stop."""
RESTARTS = 10
"""Failures of a node after which the job ends."""
ACCELERATORS = {
    "a100-40": "A100",
    "a100-80": "A100-80GB",
    "h100": "H100",
    "h100-96": "H100",
    "h200": "H200",
    "b200": "B200",
    "gb200": "GB200",
    "mi300x": "MI300X",
}
"""Names of SkyPilot by ours."""

RESERVED = ("true", "false", "yes", "no", "on", "off", "y", "n", "null")
"""Words that YAML 1.1 does not read as text."""

app = verb()


@dataclass(frozen=True)
class Submission:
    """A job, as all schedulers need it described."""

    name: str
    nodes: int
    devices: int
    """Devices and processes of a node."""
    hardware: str
    """Name of the hardware; "cpu": there are no devices to ask for."""
    words: list[str]
    """Recipe and flags."""
    has_preflight: bool
    """Whether each node is checked before it trains."""
    grace: int
    """Seconds between a request to stop and the end."""
    image: str
    volume: str
    data: str | None
    """Absolute path of data outside `WORK`, if any."""
    wanted: ManifestSection


@app.command(cls=RecipeVerb, help=__doc__)
def manifest(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="SCHEDULER",
            parser=one_of(["kubeflow", "jobset", "skypilot", "slurm", "torchx"]),
            help="Scheduler: kubeflow, jobset, skypilot, slurm or torchx.",
        ),
    ],
    recipe: Recipe = None,
    world_size: Annotated[
        int | None, Count("Number of ranks (default: that of the recipe).")
    ] = None,
    devices_per_node: Annotated[
        int | None, Count("Ranks per node (default: as many as the hardware has).")
    ] = None,
    hardware: Annotated[
        str | None, Text("NAME", "Hardware of the nodes (default: job.hardware).")
    ] = None,
    grace_seconds: Annotated[
        int | None,
        Count(
            "Time to save and stop (default: two minutes, plus writing the state at 1 GB/s per "
            "node)."
        ),
    ] = None,
    no_preflight: Annotated[
        bool, Flag("--no-preflight", "Do not check the nodes before they train.")
    ] = False,
    image: Annotated[str, Text("NAME", "Container image (default: torchtitan).")] = "torchtitan",
    volume: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Volume with the recipe, at {WORK}, where the run writes (default: torchtitan).",
        ),
    ] = "torchtitan",
    output: Output = None,
) -> None:
    path, flags = config.split_recipe([*([recipe] if recipe else []), *context.args])
    require_recipe(path, flags, "manifest")
    job = load_job(path, flags, world_size, "cuda", exempt=ELSEWHERE).config
    ranks = world_size or job.job.ranks or job.parallelism.least_ranks
    job = load_job(path, flags, ranks, "cuda", exempt=ELSEWHERE).config
    hardware = hardware or job.job.hardware
    if not (devices_per_node or hardware):
        raise ConfigError(
            "job.hardware: the recipe names none; add --hardware, such as h100, or "
            "--devices-per-node"
        )
    nodes, each = split(ranks, devices_per_node or found_hardware(hardware).ranks_per_node)
    wanted = job.job.manifest
    if target in OF_A_JOB and (left_out := [key for key in OF_A_QUEUE if getattr(wanted, key)]):
        keys = ", ".join(left_out)
        logger.warning("job.manifest: %s has no %s; give them when you submit", target, keys)
    if grace_seconds and target in OF_A_JOB:
        raise ConfigError(f"--grace-seconds: {target} has no time to stop to set; leave it out")
    if grace_seconds and grace_seconds < (planned := save_seconds(job, nodes)):
        logger.warning(
            "--grace-seconds: %d s is less than a save is expected to take, %.3g s; a run that is "
            "killed during one resumes from the checkpoint before",
            grace_seconds,
            planned,
        )
    dataset = job.data.dataset_path or ""
    submission = Submission(
        name=name_of(path or "torchtitan"),
        nodes=nodes,
        devices=each,
        hardware=found_hardware(hardware).name if hardware.endswith(".toml") else hardware,
        words=[*([path] if path else []), *of_the_run(flags)],
        has_preflight=not no_preflight,
        grace=grace_seconds or grace_of(job, nodes),
        image=image,
        volume=volume,
        data=dataset if dataset.startswith("/") and not dataset.startswith(WORK) else None,
        wanted=wanted,
    )
    text = write(target, submission)
    write_output(text, output)


def name_of(recipe: str) -> str:
    """Return the name of a job, which Kubernetes also gives, with a suffix, to its pods."""
    plain = re.sub(r"[^a-z0-9]+", "-", Path(recipe).stem.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}")[:40].strip("-")


def of_the_run(flags: Sequence[str]) -> Iterator[str]:
    """Yield the flags that the run needs: not those of the manifest, and their values."""
    is_ours = False
    for word in flags:
        if word.startswith("--"):
            is_ours = word.startswith("--job.manifest.")
        if not is_ours:
            yield word


def found_hardware(hardware: str) -> Any:
    """Find hardware by its name or file.

    Raises:
        ConfigError: if the hardware is not known.
    """
    known = import_wing("torchtitan.plan.hardware", "--hardware, without --devices-per-node")
    return known.find_hardware(hardware)


def split(ranks: int, each: int) -> tuple[int, int]:
    """Return nodes, and ranks of a node.

    Raises:
        ConfigError: if they do not divide.
    """
    if ranks <= each:
        return 1, ranks
    if ranks % each:
        fitting = [size for size in range(1, ranks + 1) if not ranks % size]
        nearest = min(fitting, key=lambda size: (abs(size - each), size))
        raise ConfigError(
            f"--devices-per-node: got {each}, but {ranks} ranks are not a multiple of that; use "
            f"{nearest}, or another --world-size"
        )
    return ranks // each, each


def grace_of(job: JobConfig, nodes: int) -> int:
    """Return the seconds that the run may need to stop, in multiples of 30."""
    return 30 * math.ceil((LEAST_GRACE + save_seconds(job, nodes)) / 30)


def save_seconds(job: JobConfig, nodes: int) -> float:
    """Return the seconds that a save is expected to take."""
    model = model_of(job)
    assert model is not None, "the recipe was checked"
    return planned_seconds(count_parameters(model.empty()).total, nodes)


def values(job: Submission, quote: Callable[[str], str]) -> dict[str, Any]:
    """Return what the templates name; what a job does not have is empty.

    Args:
        quote: writes a text in the language of the template.
    """
    wanted, log = job.wanted, shlex.quote(job.wanted.log_file)
    # A comment, or an operator at the end, would change what is written behind a line.
    setup = [
        f"eval {shlex.quote(line)}" if re.search(r"[#;&|\\]", line) else line
        for line in filter(str.strip, wanted.setup)
    ]
    train = shlex.join(["torchtitan", "train", *job.words])
    preflight = shlex.join(["torchtitan", "preflight", *job.words]) if job.has_preflight else ""
    # The log is written here where no scheduler does it.
    before = [*setup, *([f"exec > >(tee -a {log}) 2>&1"] if wanted.log_file else [])]
    lines = [*before, *filter(None, [preflight])]
    shell = "bash" if before else "sh"
    command = [shell, "-c", " && ".join([*lines, f"exec {train}"])] if lines else shlex.split(train)
    is_cpu, cpus, memory = job.hardware == "cpu", wanted.cpus, wanted.memory_gib
    vendor = "amd.com" if job.hardware.startswith("mi") else "nvidia.com"
    accelerator = ACCELERATORS.get(job.hardware, job.hardware.upper())
    texts = {
        "name": job.name,
        "address": f"{job.name}-node-0-0.{job.name}",
        "image": job.image,
        "docker_image": f"docker:{job.image}",
        "accelerators": "" if is_cpu else f"{accelerator}:{job.devices}",
        "volume": job.volume,
        "data": job.data,
        "data_volume": f"{job.volume}-data" if job.data else "",
        "account": wanted.account,
        "partition": wanted.partition,
        "log_file": wanted.log_file,
        "entrypoint": command[0],
    }
    return {
        **{name: quote(text) if text else "" for name, text in texts.items()},
        "command": [quote(word) for word in command],
        "arguments": repr(command[1:]),
        "recipe": job.name,
        "train": train,
        "preflight": preflight,
        "setup": setup,
        "lines": lines,
        "nodes": job.nodes,
        "devices": job.devices,
        "gpus": None if is_cpu else job.devices,
        "gpu_count": 0 if is_cpu else job.devices,
        "processes": job.devices if is_cpu else None,
        "vendor": "" if is_cpu else vendor,
        "requests": bool(cpus or memory),
        "resources": bool(cpus or memory or not is_cpu),
        "cpus": cpus,
        "cpus_or_any": cpus or -1,
        "memory_gib": memory,
        "memory_mb_or_any": 1024 * memory if memory else -1,
        "time_limit_minutes": wanted.time_limit_minutes,
        "time_limit_seconds": 60 * (wanted.time_limit_minutes or 0) or None,
        "grace": job.grace,
        "grace_variable": VARIABLE,
        "restarts": RESTARTS,
        "wrong_recipe": ExitCode.WRONG_RECIPE,
        "diverged": ExitCode.DIVERGED,
        "requeue": ExitCode.REQUEUE,
    }


def write(target: str, job: Submission) -> str:
    """Return the manifest of a job for a scheduler, by its template."""
    template, quote = TEMPLATES[target]
    known = {"is_jobset": target == "jobset", "is_kubeflow": target == "kubeflow"}
    return "".join(f"{line}\n" for line in render(template, known | values(job, quote)))


def render(template: str, known: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a template with values in place of their names.

    `{{name}}` is a value: a line with one that is empty is left out, and a line with a list is
    written once for each of its items. `{{?name}}` only decides about its line. `{{>file}}` is
    another template, with the indentation of its line.
    """
    for line in (FOLDER / template).read_text(encoding="utf-8").splitlines():
        if included := re.fullmatch(r"( *){{>(.+)}}", line):
            yield from (f"{included[1]}{inner}" for inner in render(included[2], known))
            continue
        found = {name: known[name] for name in re.findall(r"{{\??(\w+)}}", line)}
        if any(value is False or value in (None, "") for value in found.values()):
            continue
        lists = [name for name, value in found.items() if isinstance(value, list | tuple)]
        for item in found[lists[0]] if lists else [None]:
            yield _filled(line, found | dict.fromkeys(lists, item))


def _filled(line: str, found: Mapping[str, Any]) -> str:
    return re.sub(r"{{(\w+)}}", lambda name: str(found[name[1]]), re.sub(r"{{\?\w+}}", "", line))


def yaml_text(text: str) -> str:
    """Return a text as YAML, in quotes where it would be read as something else without."""
    is_plain = re.fullmatch(r"[A-Za-z/][\w./@-]*", text) and text.lower() not in RESERVED
    return text if is_plain else json.dumps(text, ensure_ascii=False)


TEMPLATES: dict[str, tuple[str, Callable[[str], str]]] = {
    "kubeflow": ("kubeflow.yaml", yaml_text),
    "jobset": ("jobset.yaml", yaml_text),
    "skypilot": ("skypilot.yaml", yaml_text),
    "slurm": ("slurm.sh", shlex.quote),
    "torchx": ("torchx.txt", repr),
}
"""Template of each scheduler in `manifests/`, and how it writes a text."""
