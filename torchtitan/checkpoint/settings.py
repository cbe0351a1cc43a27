"""The sections `[checkpoint]` and `[checkpoint.frequent]`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from torchtitan.config import Config, Context, Problem, exists, local_path
from torchtitan.remote import is_url, location, problem_of_url

WITHOUT_SAVING = (
    *("enable", "resume", "initial_load_path", "initial_load_model_only"),
    *("exclude_from_loading", "frequent", "last_save_model_only"),
)
"""Keys that have an effect or problems of their own while `enable` is false, or that a recipe of
TorchTitan has then by default."""
Component = Literal["optimizer", "lr_scheduler", "data", "train_state", "rng"]

NOTHING_SAVED = (
    "checkpoints are off (checkpoint.enable = false, or load_only): nothing will be saved"
)


class FrequentConfig(Config):
    """Frequent checkpoints, of which few are kept; a folder on a local disk of each node will do.
    Each node has the files of its own ranks."""

    interval: int = Field(0, ge=0)
    """Steps between saves; 0: off. If both tiers are due at a step, only checkpoint.folder gets a
    checkpoint."""
    folder: str = "frequent"
    """Folder inside job.dump_folder, or an absolute path, in which each run has its own
    subfolder."""
    keep_latest_k: int = Field(2, ge=1)
    """Number of most recent checkpoints to keep."""

    def problems(self, context: Context) -> Iterator[Problem]:
        if is_url(self.folder):
            yield Problem("folder", "wanted a folder on a disk, not a URL")
        for key in ("folder", "keep_latest_k"):
            if not self.interval and getattr(self, key) != type(self).model_fields[key].default:
                yield Problem(key, "it has no effect while self.interval is 0", ("interval",))


class CheckpointConfig(Config):
    """Saving of checkpoints, and the starting point of a run."""

    enable: bool = True
    """Save checkpoints, and resume from them."""
    folder: str = "checkpoint"
    """Folder inside job.dump_folder; or a URL of an object store, such as
    s3://bucket/run/checkpoint."""
    interval: int = Field(500, ge=1)
    """Steps between saves; the last step is also saved."""
    resume: Literal["auto", "must", "never"] = "auto"
    """auto: resume from the newest checkpoint of the same run, or start from scratch if there is
    none; must: resume from the newest checkpoint, even if its recipe differs, and refuse to start
    if there is none; never: start from scratch, and refuse a folder that was already used."""
    load_step: int = Field(-1, ge=-1)
    """Resume from this step; -1: the newest."""
    load_only: bool = False
    """Load checkpoints, but never save any."""
    initial_load_path: str | None = None
    """Checkpoint of another run, or of TorchTitan, to start from (a step-N folder, or a folder of
    them), or weights in the format of Hugging Face or Meta; a path or a URL. A checkpoint of this
    run takes precedence."""
    initial_load_model_only: bool = True
    """Load only the weights from initial_load_path; false: the full state."""
    exclude_from_loading: tuple[Component, ...] = ()
    """Parts that start from scratch instead of being loaded. This applies once: a checkpoint that
    was saved with this setting is resumed with all parts."""
    enable_first_step_checkpoint: bool = False
    """Also save after the first step, to find out early whether saving works."""
    last_save_model_only: bool = False
    """Save only the weights at the end; that checkpoint cannot be resumed."""
    last_save_in_hf: bool = False
    """Also export the weights of the last step for Hugging Face transformers, in export_dtype, to
    step-N-hf."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the weights that last_save_model_only and last_save_in_hf write."""
    keep_latest_k: int = Field(10, ge=0)
    """Number of most recent checkpoints to keep; 0: all."""
    keep_every: int = Field(0, ge=0)
    """Never delete checkpoints of steps that are multiples of this; 0: off."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """disabled: training waits until the checkpoint is on disk; async: the checkpoint is copied to
    host memory and written while training continues; async_with_pinned_mem: CUDA copies to pinned
    memory during the next step (on a CPU the same as async)."""
    save_attempts: int = Field(3, ge=1)
    """Maximum number of attempts to save a checkpoint, after which training continues without
    it."""
    frequent: FrequentConfig = FrequentConfig()

    def path_in(self, dump_folder: Path) -> Path:
        """Return the folder in which checkpoints are saved."""
        return location(self.folder) if is_url(self.folder) else dump_folder / self.folder

    @property
    def saves(self) -> bool:
        """Whether anything is saved, so that a run that is stopped can resume."""
        return self.enable and not self.load_only

    def saves_at(self, step: int, *, is_final: bool) -> bool:
        """Whether a step must be saved; `is_final`: no step will follow."""
        first = self.enable_first_step_checkpoint and step == 1
        return self.saves and (is_final or first or not step % self.interval)

    def saves_often_at(self, step: int) -> bool:
        """Whether a step that is not saved otherwise is saved as a frequent checkpoint."""
        every = self.frequent.interval
        return self.saves and bool(every) and not step % every

    def problems(self, context: Context) -> Iterator[Problem]:
        if (often := self.frequent.interval) >= self.interval:
            message = f"wanted less than the {self.interval} steps of self.interval, or 0"
            yield Problem("frequent.interval", message, ("interval",))
        idle = {
            "frequent.interval": often > 0,
            "resume": self.resume == "must",
            "load_step": self.load_step >= 0,
            "load_only": self.load_only,
            "last_save_in_hf": self.last_save_in_hf,
        }
        why = "it has no effect while self.enable is false"
        for key, is_asked in idle.items():
            if is_asked and not self.enable:
                yield Problem(key, why, ("enable",))
        for key, field in type(self).model_fields.items():
            is_other = getattr(self, key) != field.default and key not in {*idle, *WITHOUT_SAVING}
            if is_other and not self.enable:
                yield Problem(key, why, ("enable",), severity="note")
        if self.load_step >= 0 and self.resume == "never":
            message = 'self.resume is "never"; use "must" there or -1 here'
            yield Problem("load_step", message, ("resume",))
        if self.export_dtype != "float32" and not (
            self.last_save_model_only or self.last_save_in_hf
        ):
            message = "it needs self.last_save_model_only or self.last_save_in_hf"
            yield Problem("export_dtype", message, ("last_save_model_only", "last_save_in_hf"))
        for key in ("folder", "initial_load_path"):
            url = getattr(self, key)
            if url and is_url(url) and (problem := problem_of_url(url)):
                yield Problem(key, problem)
        initial = self.initial_load_path
        if initial is None or is_url(initial):
            return
        if initial == context.recipe.model.tokenizer and not exists(initial):
            return  # said of the tokenizer
        if not (exists(initial) and local_path(initial).is_dir()):
            yield Problem("initial_load_path", "there is no such folder")
