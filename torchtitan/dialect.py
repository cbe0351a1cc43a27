"""Recipes written for TorchTitan v0.1 and v0.2: what moved, and what has no counterpart.

One table maps every key of theirs that is not ours. A key that moved is read under its new name,
with a notice. A key without a counterpart is dropped, with a notice, where its value asks for
nothing (a feature that is off); otherwise it is refused, with what to write instead.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from torchtitan.config import KeyPath, RecipeError, Setting, Translation, read_toml, show


@dataclass(frozen=True)
class Moved:
    """A key with another name here, and how its value is written here."""

    to: str
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Gone:
    """A key without a counterpart: `asks_nothing` tells values that can be dropped."""

    instead: str
    asks_nothing: Callable[[Any], bool]


def always(value: Any) -> bool:
    """Whatever its value, dropping the key changes nothing."""
    return True


def falsy(value: Any) -> bool:
    """Off, empty or zero; also as a flag's words."""
    return not value or value in (["false"], ["False"], ["0"], "none", ["none"], [""])


def just(*values: Any) -> Callable[[Any], bool]:
    """One of these values; also as a flag's words."""
    return lambda value: value in values or value in [[str(one)] for one in values]


def _inverted(value: Any) -> Any:
    return {True: False, False: True}.get(value, value) if isinstance(value, bool) else value


def _fused(value: Any) -> Any:
    return {True: "fused", False: "foreach"}[value] if isinstance(value, bool) else value


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value] if value else []


def _excluded(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return ["data" if item == "dataloader" else item for item in value]


PARALLELISM = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "tensor_parallel_degree",
    "disable_loss_parallel",
    "fsdp_reshard_after_forward",
    "pipeline_parallel_degree",
    "pipeline_parallel_schedule",
    "context_parallel_degree",
)
ONLY_PIPELINE = "it only acts with pipeline parallelism, which is not part of this version"
ONLY_CONTEXT = "it only acts with context parallelism, which is not part of this version"
ONLY_EXPERTS = "there are no models with experts"
ONLY_QUANTIZED = "it only acts with a converter, and none is asked for"
CHECKPOINT_OPTION = "this version has mode and selective_ac_option only"

TABLE: Mapping[str, Moved | Gone] = {
    "job.print_args": Moved("job.print_config"),
    "job.use_for_integration_test": Gone("the tests name the recipes they run", always),
    "job.save_config_file": Gone("the resolved recipe is always written beside the run", always),
    "job.custom_config_module": Gone("settings belong to their component; use job.imports", falsy),
    "experimental.custom_import": Moved("job.imports", _as_list),
    "experimental.custom_model_path": Moved("job.imports", _as_list),
    "experimental.custom_args_module": Gone("settings belong to their component", falsy),
    "model.hf_assets_path": Moved("model.tokenizer_path"),
    "model.norm_type": Gone('every model has the norm of its paper ("rmsnorm")', just("rmsnorm")),
    "model.converters": Gone("converters are not part of this version; leave it out", falsy),
    "model.print_after_conversion": Gone("converters are not part of this version", falsy),
    "training.dataset": Moved("data.dataset"),
    "training.dataset_path": Moved("data.dataset_path"),
    "training.dataloader.num_workers": Moved("data.num_workers"),
    "training.dataloader.prefetch_factor": Moved("data.prefetch_factor"),
    "training.dataloader.persistent_workers": Gone(
        "workers always live as long as the run", always
    ),
    "training.dataloader.pin_memory": Gone("the device decides", always),
    "training.batch_size": Moved("training.local_batch_size"),
    "training.warmup_steps": Moved("lr_scheduler.warmup_steps"),
    "training.compile": Moved("compile.enable"),
    "training.seed": Moved("debug.seed"),
    "training.deterministic": Moved("debug.deterministic"),
    "training.gc_debug": Gone("use a Python profiler", falsy),
    "training.data_parallel_degree": Moved("parallelism.data_parallel_shard_degree"),
    "training.enable_loss_parallel": Moved("parallelism.disable_loss_parallel", _inverted),
    "optimizer.fused": Moved("optimizer.implementation", _fused),
    "optimizer.early_step_in_backward": Gone("the step follows the backward; leave it out", falsy),
    "lr_scheduler.lr_min": Moved("lr_scheduler.min_lr_factor"),
    "debug.moe_force_load_balance": Gone(ONLY_EXPERTS, falsy),
    "parallelism.enable_compiled_autograd": Gone("torch.compile works without it", falsy),
    "parallelism.enable_async_tensor_parallel": Gone("tensor parallelism is not there yet", falsy),
    "parallelism.pipeline_parallel_split_points": Gone(ONLY_PIPELINE, falsy),
    "parallelism.module_fqns_per_model_part": Gone(ONLY_PIPELINE, falsy),
    "parallelism.pipeline_parallel_layers_per_stage": Gone(ONLY_PIPELINE, always),
    "parallelism.pipeline_parallel_schedule_csv": Gone(ONLY_PIPELINE, falsy),
    "parallelism.pipeline_parallel_first_stage_less_layers": Gone(ONLY_PIPELINE, always),
    "parallelism.pipeline_parallel_last_stage_less_layers": Gone(ONLY_PIPELINE, always),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Gone(ONLY_EXPERTS, always),
    "parallelism.context_parallel_rotate_method": Gone(ONLY_CONTEXT, always),
    "parallelism.context_parallel_load_balancer": Gone(ONLY_CONTEXT, always),
    "parallelism.expert_parallel_degree": Gone(ONLY_EXPERTS, just(1)),
    "parallelism.expert_tensor_parallel_degree": Gone(ONLY_EXPERTS, just(1)),
    "parallelism.expert_parallel_comm_backend": Gone(ONLY_EXPERTS, always),
    "checkpoint.enable_checkpoint": Moved("checkpoint.enable"),
    "checkpoint.initial_load_model_weights_only": Moved("checkpoint.initial_load_model_only"),
    "checkpoint.last_save_model_weights_only": Moved("checkpoint.last_save_model_only"),
    "checkpoint.model_weights_only": Moved("checkpoint.last_save_model_only"),
    "checkpoint.exclude_from_loading": Moved("checkpoint.exclude_from_loading", _excluded),
    "checkpoint.interval_type": Gone("checkpoint.interval counts steps", just("steps")),
    "checkpoint.create_seed_checkpoint": Gone(
        "every layout starts from the same weights, so no seed checkpoint is needed", falsy
    ),
    "checkpoint.initial_load_in_hf": Gone("Hugging Face weights are not read yet", falsy),
    "checkpoint.initial_load_in_hf_quantized": Gone("Hugging Face weights are not read yet", falsy),
    "checkpoint.last_save_in_hf": Gone("Hugging Face weights are not written yet", falsy),
    "checkpoint.enable_ft_dataloader_checkpoints": Gone(
        "the data position is in every checkpoint", always
    ),
    "activation_checkpoint.selective_ac_option": Moved(
        "activation_checkpoint.selective_ac_option", _number
    ),
    "activation_checkpoint.memory_budget": Gone(CHECKPOINT_OPTION, always),
    "activation_checkpoint.visualize_memory_budget_pareto": Gone(CHECKPOINT_OPTION, falsy),
    "activation_checkpoint.early_stop": Gone(CHECKPOINT_OPTION, always),
    "activation_checkpoint.preserve_rng_state": Gone("it is always preserved", always),
    "activation_checkpoint.determinism_check": Gone(CHECKPOINT_OPTION, just("default")),
    "activation_checkpoint.debug": Gone(CHECKPOINT_OPTION, falsy),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Gone(
        ONLY_EXPERTS, just([], ["moe.router.gate"])
    ),
    "metrics.enable_color_printing": Moved("metrics.disable_color_printing", _inverted),
    "metrics.rank_0_only": Moved("metrics.save_for_all_ranks", _inverted),
    "validation.local_batch_size": Gone("validation reads batches of the training shape", always),
    "validation.seq_len": Gone("validation reads batches of the training shape", always),
    "validation.dataloader.*": Gone("validation reads its few batches when due", always),
    "comm.trace_buf_size": Gone("there is no flight recorder in this version", always),
    "comm.save_traces_folder": Gone("there is no flight recorder in this version", always),
    "comm.save_traces_file_prefix": Gone("there is no flight recorder in this version", always),
    "comm.mode": Gone("there is no fake backend in this version", just("default")),
    "float8.enable_float8_linear": Gone("converters are not part of this version", falsy),
    "float8.*": Gone(ONLY_QUANTIZED, always),
    "mx.*": Gone(ONLY_QUANTIZED, always),
    "quantize.*": Gone(ONLY_QUANTIZED, always),
    "memory_estimation.enable": Gone("there is no memory estimation in this version", falsy),
    "memory_estimation.enabled": Gone("there is no memory estimation in this version", falsy),
    "memory_estimation.*": Gone("there is no memory estimation in this version", always),
    "fault_tolerance.enable": Gone("there are no replica groups in this version", falsy),
    "fault_tolerance.*": Gone("it only acts with fault_tolerance.enable", always),
    **{f"{old}.{key}": Moved(f"parallelism.{key}") for key in PARALLELISM for old in ("training",)},
    **{f"experimental.{key}": Moved(f"parallelism.{key}") for key in PARALLELISM},
    "experimental.enable_async_tensor_parallel": Gone("tensor parallelism is not there yet", falsy),
    "experimental.enable_compiled_autograd": Gone("torch.compile works without it", falsy),
    "experimental.pipeline_parallel_microbatches": Gone(ONLY_PIPELINE, always),
    "experimental.pipeline_parallel_split_points": Gone(ONLY_PIPELINE, falsy),
    "experimental.pipeline_parallel_schedule_csv": Gone(ONLY_PIPELINE, falsy),
    "experimental.context_parallel_rotate_method": Gone(ONLY_CONTEXT, always),
}
SECTIONS = {name.split(".")[0] for name in TABLE}


def entry(path: KeyPath) -> Moved | Gone | None:
    """The row of the table for a key: its own, or that of the section it stands in."""
    dotted = ".".join(path)
    if dotted in TABLE:
        return TABLE[dotted]
    sections = (".".join(path[:depth]) for depth in range(len(path) - 1, 0, -1))
    return next((TABLE[f"{name}.*"] for name in sections if f"{name}.*" in TABLE), None)


def translate(settings: dict[KeyPath, Setting]) -> Translation:
    """Read the settings of one source, whatever version it was written for."""
    result = Translation({}, [], [])
    for path, setting in settings.items():
        row, dotted = entry(path), ".".join(path)
        if row is None:
            empty_table = setting.value == {} and path[0] in SECTIONS
            if not empty_table:
                result.settings[path] = setting
        elif isinstance(row, Moved):
            target = tuple(row.to.split("."))
            if target != path:
                result.notices.append(f"{setting.origin}: {dotted} is now {row.to}")
                if target in settings:
                    text = f"{dotted} and {row.to} say the same thing; keep the second"
                    result.problems.append(f"{setting.origin}: {text}")
            result.settings[target] = Setting(row.convert(setting.value), setting.origin)
        elif row.asks_nothing(setting.value):
            result.notices.append(f"{setting.origin}: {dotted} is left out: {row.instead}")
        else:
            text = f"got {show(setting.value)}, which has no counterpart: {row.instead}"
            result.problems.append(f"{setting.origin}: {dotted}: {text}")
    return result


def migrate(path: Path) -> tuple[str, list[str]]:
    """The text of an old recipe in this version's form, comments kept, and the notices.

    Raises:
        RecipeError: where a key has no counterpart.
    """
    problems: list[str] = []
    sources = read_toml(path, problems)
    if problems:
        raise RecipeError(problems)
    settings = sources[-1]
    translated = translate(settings)
    if translated.problems:
        raise RecipeError(translated.problems)
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    for key, setting in settings.items():
        if translated.settings.get(key) != setting:
            _remove(document, key)
    for key, setting in translated.settings.items():
        if settings.get(key) != setting:
            table = document
            for section in key[:-1]:
                table = table.setdefault(section, tomlkit.table())
            table[key[-1]] = setting.value
    return tomlkit.dumps(document), translated.notices


def _remove(document: Any, key: KeyPath) -> None:
    """Take out a key, and the tables that it leaves empty."""
    tables = [document]
    for section in key[:-1]:
        tables.append(tables[-1][section])
    for table, name in zip(reversed(tables), reversed(key), strict=True):
        del table[name]
        if table:
            break
