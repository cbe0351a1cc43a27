"""Names that are not of today: those of earlier versions, and those of other software.

A key of an earlier version is read under its new name, with a notice. One without a counterpart is
dropped, with a notice, where its feature is off, and otherwise refused with what to write instead.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtitan.config.settings import ConfigError, KeyPath, Setting
from torchtitan.config.words import dotted, located, show, told

Settings = dict[KeyPath, Setting]


@dataclass(frozen=True)
class Moved:
    """A key with another name now; `convert` gives its value as it is written now."""

    to: str
    convert: Callable[[Any], Any] | None = None
    chosen_by: tuple[str, Any] | None = None
    """An old key, and the value of it that what this key sets belongs to."""
    idle: Callable[[Any], bool] = lambda _: False
    """Predicate of the values that may be left out next to another choice."""


@dataclass(frozen=True)
class Gone:
    """A key without a counterpart; `asks_nothing` accepts values that can be dropped."""

    instead: str
    asks_nothing: Callable[[Any], bool]
    acts_with: str | None = None
    """The switch that is on where the key asks for anything, if there is one."""


def always(value: Any) -> bool:
    """Whatever its value, dropping the key changes nothing."""
    return True


def falsy(value: Any) -> bool:
    """Off, empty or zero."""
    return not value or value == "none"


def just(*values: Any) -> Callable[[Any], bool]:
    """One of these values."""
    return lambda value: value in values


DATA_PARALLEL = "parallelism.data_parallel_impl"
OLD_KEYS: Mapping[str, Moved | Gone] = {
    DATA_PARALLEL: Moved("sharding.name"),
    "parallelism.simple_fsdp_bucketing": Moved(
        "sharding.bucketing", None, (DATA_PARALLEL, "simple_fsdp"), just("none")
    ),
    "parallelism.simple_fsdp_bucket_mb": Moved(
        "sharding.bucket_mb", None, (DATA_PARALLEL, "simple_fsdp"), always
    ),
    "metrics.precision_freq": Gone(
        "this version writes no report of rounding; compare with a run without [[convert]]", falsy
    ),
    "optimizer.offload_states": Gone(
        "use training.enable_cpu_offload, which keeps parameters in host memory too, or "
        "optimizer.state_dtype for states in fewer bits",
        falsy,
    ),
    "compile.cuda_graphs": Gone(
        'they were not faster than compile.granularity = "model"; use that', falsy
    ),
    "checkpoint.frequent.replicas": Gone(
        "files are not sent to other nodes; if a node is lost, the run resumes from "
        "checkpoint.folder",
        falsy,
    ),
    "communication.weights.levels": Gone(
        "at equal distances, as they are now, less of the weights is lost; levels of "
        "communication.gradients may be learned",
        just("uniform"),
    ),
    **{
        f"communication.weights.{key}": Gone("levels of weights are not learned", always)
        for key in ("learn_steps", "learn_rate")
    },
    "model.expert_products": Gone("products of experts are always grouped", just(None, "grouped")),
    "convert.0.experts": Gone(
        "experts keep their dtype: on an H100, a layer of Qwen3-30B-A3B took 87 ms in Float8 and "
        "11.5 ms in bfloat16; remove the key, and linears alone are converted",
        falsy,
    ),
}
"""Keys that this project once had; in a list of sections, 0 stands for any number."""


def old_key(path: KeyPath) -> Moved | Gone | None:
    """Return what became of a key, if this project once had it and no longer does."""
    return OLD_KEYS.get(dotted(tuple("0" if name.isdecimal() else name for name in path)))


class Translation(NamedTuple):
    """The settings of one source under their present names."""

    settings: Settings
    notices: list[str]
    problems: list[str]
    moved: dict[KeyPath, KeyPath]
    """New paths of the settings that were moved."""


def translate(settings: Settings) -> Translation:
    """Read the settings of one source, whatever version it was written for."""
    result = Translation({}, [], [], {})
    for path, setting in settings.items():
        translate_key(old_key(path), path, setting, settings, result)
    return result


def translate_key(
    row: Moved | Gone | None,
    path: KeyPath,
    setting: Setting,
    settings: Settings,
    result: Translation,
) -> None:
    """Add a key of `settings` to `result`, as its row of a table says; without one, as it is."""
    where, got = located(setting.origin, dotted(path)), show(setting.value)
    if isinstance(row, Moved):
        if not (because := _why_dropped(row, setting.value, settings)):
            move(tuple(row.to.split(".")), row.convert, path, setting, settings, result)
            return
        result.notices.append(f"{where}: {got} is dropped; {because}")
    elif isinstance(row, Gone) and _asks_nothing(row, setting.value, settings):
        result.notices.append(f"{where}: {got} is dropped; {row.instead}")
    elif isinstance(row, Gone):
        result.problems.append(f"{where}: {told(setting.value)}{row.instead}")
    else:
        result.settings[path] = setting


def move(
    target: KeyPath,
    convert: Callable[[Any], Any] | None,
    path: KeyPath,
    setting: Setting,
    settings: Settings,
    result: Translation,
) -> None:
    """Read a key under its new name, its value as it is written there."""
    where, value = located(setting.origin, dotted(path)), setting.value
    try:
        value = convert(value) if convert else value
    except ConfigError as error:
        result.problems.append(f"{where}: {told(value)}{error}")
        return
    if target != path:
        result.notices.append(f"{where}: is now {'.'.join(target)}")
        if same := settings.get(target, result.settings.get(target)):
            both = f"{'.'.join(target)} of {same.origin} sets the same thing; keep that"
            result.problems.append(f"{where}: {told(setting.value)}{both}")
            return
    elif value != setting.value:
        result.notices.append(f"{where}: {show(setting.value)} is now {show(value)}")
    result.moved[path] = target
    result.settings[target] = Setting(value, setting.origin)


def _why_dropped(row: Moved, value: Any, settings: Settings) -> str | None:
    if row.chosen_by and row.idle(value):
        chooser, choice = row.chosen_by
        chosen = settings.get(tuple(chooser.split(".")))
        if chosen and chosen.value != choice:
            return f"it only has an effect with {chooser} = {show(choice)}"
    return None


def _asks_nothing(row: Gone, value: Any, settings: Settings) -> bool:
    switch = settings.get(tuple(row.acts_with.split("."))) if row.acts_with else None
    is_off = row.acts_with is not None and (switch is None or switch.value is False)
    return is_off or row.asks_nothing(value)


_NAMES = {
    "model.dim": "hidden_size n_embd d_model embed_dim embedding_size model_dim",
    "model.n_layers": "num_layers num_hidden_layers n_layer",
    "model.n_heads": "num_attention_heads num_heads n_head",
    "model.n_kv_heads": "num_key_value_heads num_kv_heads num_query_groups n_query_groups",
    "model.ffn_dim": "intermediate_size ffn_hidden_size d_ff",
    "model.tokenizer_path": "tokenizer tokenizer_model tokenizer_name tokenizer_dir",
    "training.local_batch_size": "batch_size micro_batch_size per_device_train_batch_size "
    "device_batch_size",
    "training.global_batch_size": "gradient_accumulation_steps total_batch_size train_batch_size "
    "accumulate_grad_batches",
    "training.steps": "max_steps iters max_iters train_iters num_iterations num_train_steps",
    "training.seq_len": "block_size seq_length sequence_length max_seq_len max_seq_length "
    "context_length max_position_embeddings",
    "training.max_norm": "grad_clip clip_grad max_grad_norm gradient_clip_val",
    "training.mixed_precision_param": "bf16 precision mixed_precision autocast",
    "training.enable_cpu_offload": "cpu_offload",
    "optimizer.lr": "learning_rate max_lr peak_lr",
    "optimizer.weight_decay": "wd",
    "optimizer.beta1": "betas adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon adam_eps",
    "lr_scheduler.warmup_steps": "warmup_iters lr_warmup_iters lr_warmup_steps num_warmup_steps",
    "lr_scheduler.decay_type": "cosine lr_scheduler_type lr_decay_style schedule",
    "lr_scheduler.min_lr_factor": "min_lr lr_min",
    "parallelism.tensor_parallel_degree": "tp tp_size tensor_model_parallel_size "
    "tensor_parallel_size",
    "parallelism.pipeline_parallel_degree": "pp pp_size pipeline_model_parallel_size "
    "pipeline_parallel_size",
    "parallelism.context_parallel_degree": "cp cp_size context_parallel_size",
    "parallelism.data_parallel_shard_degree": "dp dp_size data_parallel_size fsdp dp_shard zero",
    "parallelism.data_parallel_replicate_degree": "ddp dp_replicate",
    "activation_checkpoint.mode": "gradient_checkpointing recompute_granularity "
    "recompute_activations",
    "job.dump_folder": "output_dir out_dir output save_dir run_dir",
    "job.config_file": "config config_path",
    "checkpoint.interval": "save_interval save_steps save_every ckpt_interval",
    "checkpoint.resume": "resume_from_checkpoint",
    "checkpoint.initial_load_path": "init_from pretrained model_name_or_path load",
    "validation.freq": "eval_interval eval_steps eval_every val_check_interval",
    "validation.steps": "eval_iters val_steps",
    "metrics.log_freq": "log_interval logging_steps log_every",
    "metrics.enable_wandb": "wandb wandb_log wandb_project report_to",
    "metrics.enable_tensorboard": "tensorboard tensorboard_dir",
    "data.dataset": "dataset_name train_data",
    "data.dataset_path": "data_path data_dir train_data_path",
    "data.num_workers": "dataloader_num_workers",
    "--processes": "nproc nproc_per_node num_processes ngpu ngpus gpus devices world_size",
    "--nnodes": "num_nodes nodes",
}
SYNONYMS = {name: ours for ours, names in _NAMES.items() for name in names.split()}
"""The setting, or the option of `torchtitan train`, by the name that users of Hugging Face,
Megatron-LM, litgpt or nanoGPT know."""
