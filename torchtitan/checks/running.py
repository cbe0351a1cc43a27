"""Whether a run can be written, saved, rolled back and started again as the recipe says."""

from collections.abc import Iterator
from pathlib import Path

from torchtitan.config import Problem, show
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.resilience import replicas

FOLDERS = (
    "checkpoint.folder",
    "comm.save_traces_folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
)


def problems_of_files(job: JobConfig) -> Iterator[Problem]:
    tokenizer = job.model.tokenizer_path
    if tokenizer is not None and not Path(tokenizer).expanduser().exists():
        message = (
            "there is no such file or folder; put the model's tokenizer.json or tokenizer.model "
            "there (for Llama 3: hf download meta-llama/Llama-3.1-8B tokenizer.json "
            f"--local-dir {tokenizer})"
        )
        yield Problem("model.tokenizer_path", message)
    initial = job.checkpoint.initial_load_path
    if initial is not None and not Path(initial).expanduser().is_dir():
        yield Problem("checkpoint.initial_load_path", "there is no such folder")
    if job.job.config_file is not None:
        message = 'only a flag can say it; in a recipe, wanted extends = "other.toml"'
        yield Problem("job.config_file", message)
    dump = Path(job.job.dump_folder).expanduser()
    cache = job.compile.cache_folder
    if cache is not None and Path(cache).expanduser().is_file():
        yield Problem("compile.cache_folder", "it is a file; wanted a folder")
    existing = next((folder for folder in (dump, *dump.parents) if folder.exists()), None)
    if existing and not existing.is_dir():
        yield Problem("job.dump_folder", f"{existing} is a file; wanted a folder")
    for key in FOLDERS:
        folder = Path(job.flat()[key])
        if folder.is_absolute() or ".." in folder.parts or folder == Path():
            yield Problem(key, "wanted the name of a folder inside job.dump_folder")
    prefix = job.comm.save_traces_file_prefix
    if "/" in prefix or prefix[-1:].isdigit():
        message = "wanted the first part of a file's name; the number of a rank follows it"
        yield Problem("comm.save_traces_file_prefix", message)


def problems_of_checkpoints(job: JobConfig) -> Iterator[Problem]:
    c = job.checkpoint
    idle = {
        "resume": c.resume == "must",
        "load_step": c.load_step >= 0,
        "load_only": c.load_only,
        "last_save_in_hf": c.last_save_in_hf,
    }
    for key, is_asked in idle.items():
        if is_asked and not c.enable:
            message = "it does nothing while checkpoint.enable is false"
            yield Problem(f"checkpoint.{key}", message, ("checkpoint.enable",))
    if c.load_step >= 0 and c.resume == "never":
        message = 'checkpoint.resume is "never"; use "must" there or -1 here'
        yield Problem("checkpoint.load_step", message, ("checkpoint.resume",))
    if c.export_dtype != "float32" and not (c.last_save_model_only or c.last_save_in_hf):
        message = "it needs checkpoint.last_save_model_only or checkpoint.last_save_in_hf"
        yield Problem("checkpoint.export_dtype", message, ("checkpoint.last_save_model_only",))
    spec = MODELS[job.model.name]
    if c.last_save_in_hf and "hf" not in spec.formats:
        message = f"the spec of {spec.name} does not say how its weights are written so"
        yield Problem("checkpoint.last_save_in_hf", message, ("model.name",))
    row = job.training.max_skipped_steps
    needed = 1 + -(-row // c.interval)
    message = ""
    if not c.enable or c.load_only:
        message = "rolling back needs checkpoints: checkpoint.enable = true, load_only = false"
    elif 0 < c.keep_latest_k < needed:
        message = (
            f"the checkpoint before {row} skipped steps in a row (training.max_skipped_steps) "
            f"would be gone after them; use checkpoint.keep_latest_k >= {needed}, or 0"
        )
    if job.spikes.max_rollbacks and message:
        yield Problem("spikes.max_rollbacks", message, ("checkpoint", "training"))


def problems_of_groups(job: JobConfig) -> Iterator[Problem]:
    for key, message in replicas.problems(job.fault_tolerance):
        yield Problem(key, message, ("fault_tolerance",))
    if job.fault_tolerance.enable and job.spikes.max_rollbacks:
        message = "replica groups, each with checkpoints of its own, cannot roll back; use 0"
        yield Problem("spikes.max_rollbacks", message, ("fault_tolerance.enable",))


def problems_of_restarts(job: JobConfig) -> Iterator[Problem]:
    """What keeps a run that is started again from going on where it was."""
    c = job.checkpoint
    wrong = {
        # What a replica group has lost the other groups still have.
        "enable": (not c.enable and not job.fault_tolerance.enable, True),
        "load_only": (c.load_only, False),
        "load_step": (c.load_step >= 0, -1),
        "resume": (c.resume == "never", "auto"),
    }
    for key, (is_wrong, right) in wrong.items():
        if is_wrong:
            message = f"a restart goes on from the newest checkpoint; write {show(right)}"
            yield Problem(f"checkpoint.{key}", message)
