"""Write what a scheduler runs a recipe with: a Kubernetes resource, a SkyPilot task, a script."""

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
from torchtitan.cluster.launcher import WRONG_RECIPE
from torchtitan.config import ConfigError, import_wing
from torchtitan.inputs import require_recipe
from torchtitan.job import JobConfig, ManifestSection
from torchtitan.logging import logger
from torchtitan.models.spec import count_parameters
from torchtitan.resilience.grace import VARIABLE, planned_seconds
from torchtitan.resilience.stop import DIVERGED, REQUEUE
from torchtitan.tools.options import Count, Recipe, RecipeVerb, one_of, verb

WORK = "/work"
"""Folder of the recipe, of relative paths and of the run in the image of `Dockerfile`."""
OF_A_JOB = ("skypilot", "torchx")
"""Schedulers whose manifests say nothing of a queue, nor of the time to stop."""
OF_A_QUEUE = ("account", "partition", "time_limit_minutes")
LEAST_GRACE = 120
"""Seconds for the step that is under way, and to stop."""
RESTARTS = 10
"""Failures of a node after which the job ends."""
SHARED_GIB = 16
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

    @property
    def train(self) -> str:
        """Command of each node, for a shell."""
        return shlex.join(["torchtitan", "train", *self.words])

    @property
    def preflight(self) -> str:
        """Command of each node before that; empty if there is none."""
        return shlex.join(["torchtitan", "preflight", *self.words]) if self.has_preflight else ""

    @property
    def before(self) -> list[str]:
        """Lines of bash that set up a node; the log is written, too, where no scheduler does it."""
        log = shlex.quote(self.wanted.log_file)
        return [*self.wanted.setup, *([f"exec > >(tee -a {log}) 2>&1"] if log != "''" else [])]

    @property
    def command(self) -> list[str]:
        """All lines as one command, which the launcher of the ranks replaces at last."""
        lines = [*self.before, *filter(None, [self.preflight])]
        if not lines:
            return shlex.split(self.train)
        return ["bash" if self.before else "sh", "-c", " && ".join([*lines, f"exec {self.train}"])]

    @property
    def requests(self) -> dict[str, Any]:
        """Cores and memory of a node, as Kubernetes has them."""
        memory = self.wanted.memory_gib
        return ({"cpu": self.wanted.cpus} if self.wanted.cpus else {}) | (
            {"memory": f"{memory}Gi"} if memory else {}
        )

    @property
    def mounts(self) -> dict[str, tuple[str, str]]:
        """Path and claim of each volume."""
        found = {"work": (WORK, self.volume)}
        return found | ({"data": (self.data, f"{self.volume}-data")} if self.data else {})


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
        int | None, Count("Ranks of a node (default: as many as its hardware has).")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Hardware of the nodes (default: job.hardware)."),
    ] = None,
    grace_seconds: Annotated[
        int | None,
        Count("Time to save and stop (default: two minutes, and the state at 1 GB/s a node)."),
    ] = None,
    no_preflight: Annotated[
        bool, typer.Option("--no-preflight", help="Do not check the nodes before they train.")
    ] = False,
    image: Annotated[
        str, typer.Option(metavar="NAME", help="Container image (default: torchtitan).")
    ] = "torchtitan",
    volume: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Volume with the recipe, at {WORK}, where the run writes (default: torchtitan).",
        ),
    ] = "torchtitan",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="File to write (default: standard output)."
        ),
    ] = None,
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
    nodes, each = split(ranks, devices_per_node or devices_of_node(hardware))
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
            *(grace_seconds, planned),
        )
    dataset = job.data.dataset_path or ""
    submission = Submission(
        name=re.sub(r"[^a-z0-9]+", "-", Path(str(path)).stem.lower()).strip("-"),
        nodes=nodes,
        devices=each,
        hardware=hardware,
        words=[str(path), *of_the_run(flags)],
        has_preflight=not no_preflight,
        grace=grace_seconds or grace_of(job, nodes),
        image=image,
        volume=volume,
        data=dataset if dataset.startswith("/") and not dataset.startswith(WORK) else None,
        wanted=wanted,
    )
    text = WRITERS[target](submission)
    if output is None:
        print(text, end="")
    elif output.exists():
        raise ConfigError(f"{output}: already exists; nothing was written")
    else:
        output.write_text(text, encoding="utf-8")


def of_the_run(flags: Sequence[str]) -> Iterator[str]:
    """Yield the flags that the run needs: not those of the manifest, and their values."""
    is_ours = False
    for word in flags:
        if word.startswith("--"):
            is_ours = word.startswith("--job.manifest.")
        if not is_ours:
            yield word


def devices_of_node(hardware: str) -> int:
    """Return the number of devices of a node.

    Raises:
        ConfigError: if the hardware is not known.
    """
    known = import_wing("torchtitan.estimate.hardware", "without --devices-per-node, --hardware")
    count: int = known.find_hardware(hardware).ranks_per_node
    return count


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


def _pod(job: Submission, environment: list[dict[str, Any]]) -> dict[str, Any]:
    vendor = "amd.com" if job.hardware.startswith("mi") else "nvidia.com"
    limits = {} if job.hardware == "cpu" else {f"{vendor}/gpu": job.devices}
    resources = {"requests": job.requests, "limits": limits}
    resources = {kind: amounts for kind, amounts in resources.items() if amounts}
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{SHARED_GIB}Gi"}}
    ]
    container: dict[str, Any] = {
        "name": "node",
        "image": job.image,
        "command": job.command,
        "workingDir": WORK,
        "env": [*environment, {"name": VARIABLE, "value": str(job.grace)}],
        **({"resources": resources} if resources else {}),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    for name, (path, claim) in job.mounts.items():
        container["volumeMounts"].append({"name": name, "mountPath": path})
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        "containers": [container],
        "volumes": volumes,
    }


def _exit_codes(action: str, *codes: int) -> dict[str, Any]:
    return {
        "action": action,
        "onExitCodes": {"containerName": "node", "operator": "In", "values": list(codes)},
    }


def _jobset(
    job: Submission, environment: list[dict[str, Any]], labels: Mapping[str, str]
) -> dict[str, Any]:
    """Return the spec of a JobSet: a failed node starts again alone, and meets the others."""
    limit = job.wanted.time_limit_minutes
    rules = [
        _exit_codes("FailJob", WRONG_RECIPE, DIVERGED),
        _exit_codes("Ignore", REQUEUE),
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": RESTARTS,
        **({"activeDeadlineSeconds": 60 * limit} if limit else {}),
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": _pod(job, environment)},
    }
    template = {**({"metadata": {"labels": dict(labels)}} if labels else {}), "spec": spec}
    ends = {"name": "wrong", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "failurePolicy": {"maxRestarts": 0, "rules": [ends]},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": template}],
    }


def _metadata(job: Submission) -> dict[str, Any]:
    account, queue = job.wanted.account, job.wanted.partition
    namespace = {"namespace": account} if account else {}
    labels = {"labels": {"kueue.x-k8s.io/queue-name": queue}} if queue else {}
    return {"name": job.name, **namespace, **labels}


def jobset(job: Submission) -> str:
    """Return a JobSet of Kubernetes."""
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    values = {
        "PET_NNODES": str(job.nodes),
        "PET_NPROC_PER_NODE": str(job.devices),
        "PET_MASTER_ADDR": f"{job.name}-node-0-0.{job.name}",
        "PET_MASTER_PORT": "29500",
    }
    environment: list[dict[str, Any]] = [{"name": k, "value": v} for k, v in values.items()]
    environment.append({"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}})
    return yaml(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(job),
            "spec": _jobset(job, environment, {}),
        }
    )


def kubeflow(job: Submission) -> str:
    """Return a runtime of Kubeflow Trainer, which sets PET_*, and a TrainJob that uses it."""
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    version = "trainer.kubeflow.org/v1alpha1"
    runtime = {
        "apiVersion": version,
        "kind": "TrainingRuntime",
        "metadata": {**_metadata(job), "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {"spec": _jobset(job, [], label)},
        },
    }
    reference = {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": job.name,
    }
    train = {
        "apiVersion": version,
        "kind": "TrainJob",
        "metadata": _metadata(job),
        "spec": {"runtimeRef": reference, "trainer": {"numProcPerNode": job.devices}},
    }
    return f"{yaml(runtime)}---\n{yaml(train)}"


def skypilot(job: Submission) -> str:
    """Return a task of SkyPilot, for `sky jobs launch`."""
    resources: dict[str, Any] = {"image_id": f"docker:{job.image}"}
    if job.hardware != "cpu":
        name = ACCELERATORS.get(job.hardware, job.hardware.upper())
        resources["accelerators"] = f"{name}:{job.devices}"
    least = {"cpus": job.wanted.cpus, "memory": job.wanted.memory_gib}
    resources |= {key: f"{number}+" for key, number in least.items() if number}
    # Restarts on errors would not look at the exit code; the launcher restarts ranks by itself.
    resources["job_recovery"] = {"recover_on_exit_codes": [REQUEUE]}
    mounts = {path: {"name": claim, "mode": "MOUNT"} for path, claim in job.mounts.values()}
    lines = [f"cd {WORK}", *(f"{line} &&" for line in (*job.before, job.preflight) if line)]
    command = "".join(f"{line}\n" for line in (*lines, job.train))
    return yaml(
        {
            "name": job.name,
            "num_nodes": job.nodes,
            "resources": resources,
            "file_mounts": mounts,
            "run": command,
        }
    )


def slurm(job: Submission) -> str:
    """Return a script for sbatch, submitted in the folder of the recipe."""
    devices = [] if job.hardware == "cpu" else [f"#SBATCH --gpus-per-task={job.devices}"]
    processes = [] if devices else [f"export PET_NPROC_PER_NODE={job.devices}"]
    wanted = job.wanted
    options = {
        "account": wanted.account,
        "partition": wanted.partition,
        "time": wanted.time_limit_minutes,
        "cpus-per-task": wanted.cpus,
        "mem": f"{wanted.memory_gib}G" if wanted.memory_gib else None,
        "output": wanted.log_file,
    }
    # `srun` does not read the option of `sbatch`.
    processes += [f"export SRUN_CPUS_PER_TASK={wanted.cpus}"] if wanted.cpus else []
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.nodes}",
        "#SBATCH --ntasks-per-node=1",
        *devices,
        "#SBATCH --exclusive",
        *(f"#SBATCH --{key}={shlex.quote(str(value))}" for key, value in options.items() if value),
        f"#SBATCH --signal=USR1@{job.grace}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        *(f"{line} || exit" for line in wanted.setup),
        "set -uo pipefail",
        f"export {VARIABLE}={job.grace}",
        *processes,
        "# The highest status of all nodes; the run is saved, and can be resumed, after "
        f"{REQUEUE}.",
        f"srun {job.preflight} &&" if job.has_preflight else "",
        f"srun {job.train}",
        "status=$?",
        'case "$status" in',
        f"    0 | {WRONG_RECIPE} | {DIVERGED}) ;;",
        f'    {REQUEUE}) scontrol requeue "$SLURM_JOB_ID" ;;',
        f'    *) [ "${{SLURM_RESTART_COUNT:-0}}" -ge {RESTARTS} ] ||',
        '        scontrol requeue "$SLURM_JOB_ID" ;;',
        "esac",
        'exit "$status"',
    ]
    return "".join(f"{line}\n" for line in lines if line)


def torchx(job: Submission) -> str:
    """Return a component of TorchX: `torchx run FILE:train`."""
    cpus, memory = job.wanted.cpus or -1, 1024 * (job.wanted.memory_gib or 0) or -1
    gpus = 0 if job.hardware == "cpu" else job.devices
    resource = {"cpu": cpus, "gpu": gpus, "memMB": memory}
    environment = {"PET_NNODES": str(job.nodes), "PET_NPROC_PER_NODE": str(job.devices)}
    mounts = [
        f"specs.VolumeMount(src={claim!r}, dst_path={path!r})"
        for path, claim in job.mounts.values()
    ]
    arguments = ", ".join(f"{name}={value}" for name, value in resource.items())
    return f'''"""torchx run FILE:train"""

from torchx import specs


def train() -> specs.AppDef:
    """Train {job.words[0]}."""
    return specs.AppDef(
        name={job.name!r},
        roles=[
            specs.Role(
                name="node",
                image={job.image!r},
                entrypoint={job.command[0]!r},
                args={job.command[1:]!r},
                env={environment!r},
                num_replicas={job.nodes},
                max_retries={RESTARTS},
                retry_policy=specs.RetryPolicy.APPLICATION,
                resource=specs.Resource({arguments}),
                mounts=[{", ".join(mounts)}],
            )
        ],
    )
'''


WRITERS: dict[str, Callable[[Submission], str]] = {
    "kubeflow": kubeflow,
    "jobset": jobset,
    "skypilot": skypilot,
    "slurm": slurm,
    "torchx": torchx,
}


def yaml(value: Mapping[str, Any]) -> str:
    """Return mappings, lists, numbers and text as YAML."""
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            name = _scalar(key)
            if isinstance(inner, (Mapping, list)) and inner:
                yield f"{name}:"
                yield from (f"  {line}" for line in _lines(inner))
            elif isinstance(inner, str) and inner.endswith("\n"):
                yield f"{name}: |"
                yield from (f"  {line}" for line in inner.splitlines())
            else:
                yield f"{name}: {_scalar(inner)}"
    else:
        for inner in value:
            first, *rest = _lines(inner) if isinstance(inner, Mapping) else [_scalar(inner)]
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return str(value)
    is_plain = re.fullmatch(r"[A-Za-z/][\w./@-]*", value) and value.lower() not in RESERVED
    return value if is_plain else json.dumps(value, ensure_ascii=False)
