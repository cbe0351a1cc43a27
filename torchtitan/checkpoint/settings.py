"""What a recipe may say about checkpoints."""

from typing import Literal

from pydantic import Field

from torchtitan.config import Config

Component = Literal["optimizer", "lr_scheduler", "data", "train_state", "rng"]


class CheckpointConfig(Config):
    """When a run is saved, and what it goes on from."""

    enable: bool = Field(False, description="Save checkpoints, and resume from them.")
    folder: str = Field("checkpoint", description="Folder inside job.dump_folder.")
    interval: int = Field(500, ge=1, description="Steps between saves; the last step is saved too.")
    resume: Literal["auto", "must", "never"] = Field(
        "auto",
        description="auto: go on from the newest checkpoint of this same run, or start afresh if "
        "there is none; must: there has to be one, even of a recipe that differs; never: start "
        "afresh, and refuse a folder that has been used.",
    )
    load_step: int = Field(-1, ge=-1, description="Resume from this step; -1: the newest.")
    load_only: bool = Field(False, description="Load, but never save.")
    initial_load_path: str | None = Field(
        None,
        description="Checkpoint of another run to start from (a step-N folder, or a folder of "
        "them), or weights of Hugging Face or Meta; a checkpoint of this run takes precedence.",
    )
    initial_load_model_only: bool = Field(
        True, description="Take only the weights from initial_load_path; false: everything."
    )
    exclude_from_loading: tuple[Component, ...] = Field(
        (), description="Parts that start afresh when loading."
    )
    enable_first_step_checkpoint: bool = Field(
        False, description="Also save after the first step, to see early that saving works."
    )
    last_save_model_only: bool = Field(
        False,
        description="Save only the weights at the end; such a checkpoint cannot be resumed.",
    )
    last_save_in_hf: bool = Field(
        False,
        description="Also write the weights of the last step for Hugging Face transformers, in "
        "export_dtype, as step-N-hf.",
    )
    export_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Dtype of a last save of only the model, and of step-N-hf."
    )
    keep_latest_k: int = Field(10, ge=0, description="How many checkpoints to keep; 0 keeps all.")
    keep_every: int = Field(
        0, ge=0, description="Never delete the checkpoints of multiples of this step; 0: of none."
    )
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = Field(
        "disabled",
        description="disabled: training waits until a checkpoint is on disk; async: it is copied "
        "in host memory, and written while training goes on; async_with_pinned_mem: CUDA copies "
        "beside the next step, into pinned memory (on a CPU the same as async).",
    )
    save_attempts: int = Field(
        3, ge=1, description="How often a save is tried before training goes on without it."
    )
