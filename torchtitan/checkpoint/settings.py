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
        "them); a checkpoint of this run takes precedence.",
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
    export_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Dtype of the weights in a last save of only the model."
    )
    keep_latest_k: int = Field(10, ge=0, description="How many checkpoints to keep; 0 keeps all.")
    async_mode: Literal["disabled"] = Field(
        "disabled", description="Training waits until a checkpoint is on disk."
    )
