"""The table of every key of TorchTitan v0.1 and v0.2 that is not ours, with its translation.

It is split by the last version that had a key, which identifies the version of a recipe.
"""

from collections.abc import Mapping
from typing import Any

from torchtitan.legacy_recipes import converters
from torchtitan.legacy_recipes.translations import (
    Converted,
    Gone,
    Kept,
    Moved,
    Together,
    always,
    falsy,
    just,
)


def _inverted(value: Any) -> Any:
    return not value if isinstance(value, bool) else value


def _fused(value: Any) -> Any:
    return {True: "fused", False: "foreach"}[value] if isinstance(value, bool) else value


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _ring(value: Any) -> Any:
    return "ring" if value == "alltoall" else value


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
    "pipeline_parallel_schedule_csv",
    "context_parallel_degree",
    "enable_async_tensor_parallel",
)
DATA_PARALLEL = "parallelism.data_parallel_impl"
SPLIT_POINTS = "list the modules of each stage in parallelism.module_fqns_per_model_part"
MICROBATCHES = "the number follows from parallelism.pipeline_parallel_microbatch_size"
NO_ESTIMATION = "torchtitan check estimates the memory of a rank, without this"
NO_SEMI_SYNC = "replica groups sum their gradients in every step"
ONLY_SEMI_SYNC = "it only has an effect with fault_tolerance.semi_sync_method"
SEMI_SYNC = (
    "sync_steps",
    "should_quantize",
    "fragment_sync_delay",
    "fragment_update_alpha",
    "module_fragments",
)
CHECKPOINT_OPTION = "this version has mode, selective_ac_option and memory_budget only"
FORCED_BALANCE = "experts are always chosen by their router"
WORKERS = "validation reads its batches in the step, so it has no workers"

Rows = Mapping[str, Moved | Gone | Kept | Converted | Together]

OURS: Rows = {
    "parallelism.data_parallel_impl": Moved("sharding.name"),
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
    "model.expert_products": Gone("products of experts are always grouped", just(None, "grouped")),
}
"""Keys that this project once had."""

UNTIL_V0_1: Rows = {
    "job.print_args": Moved("job.print_config"),
    "job.use_for_integration_test": Gone("the tests name the recipes they run", always),
    "experimental.custom_model_path": Moved("job.imports", _as_list),
    "model.norm_type": Gone('every model has the norm of its paper ("rmsnorm")', just("rmsnorm")),
    "training.batch_size": Moved("training.local_batch_size"),
    "training.warmup_steps": Moved("lr_scheduler.warmup_steps"),
    "training.compile": Moved("compile.enable"),
    "training.data_parallel_degree": Moved("parallelism.data_parallel_shard_degree"),
    "training.enable_loss_parallel": Moved("parallelism.disable_loss_parallel", _inverted),
    "optimizer.fused": Moved("optimizer.implementation", _fused),
    "lr_scheduler.lr_min": Moved("lr_scheduler.min_lr_factor"),
    "parallelism.pipeline_parallel_split_points": Gone(SPLIT_POINTS, falsy),
    "checkpoint.enable_checkpoint": Moved("checkpoint.enable"),
    "checkpoint.initial_load_model_weights_only": Moved("checkpoint.initial_load_model_only"),
    "checkpoint.last_save_model_weights_only": Moved("checkpoint.last_save_model_only"),
    "checkpoint.model_weights_only": Moved("checkpoint.last_save_model_only"),
    "checkpoint.interval_type": Gone("checkpoint.interval counts steps", just("steps")),
    "metrics.enable_color_printing": Moved("metrics.disable_color_printing", _inverted),
    "metrics.rank_0_only": Moved("metrics.save_for_all_ranks", _inverted),
    "memory_estimation.enabled": Gone(NO_ESTIMATION, falsy),
    **converters.UNTIL_V0_1,
    **{f"fault_tolerance.{key}": Gone(ONLY_SEMI_SYNC, always) for key in SEMI_SYNC},
    **{f"training.{key}": Moved(f"parallelism.{key}") for key in PARALLELISM},
    **{f"experimental.{key}": Moved(f"parallelism.{key}") for key in PARALLELISM},
    "experimental.enable_compiled_autograd": Gone("torch.compile works without it", falsy),
    "experimental.pipeline_parallel_microbatches": Gone(MICROBATCHES, always),
    "experimental.pipeline_parallel_split_points": Gone(SPLIT_POINTS, falsy),
    "experimental.context_parallel_rotate_method": Moved(
        "parallelism.context_parallel_rotate_method", _ring
    ),
}
"""Keys that v0.2.0 no longer had."""

UNTIL_V0_2_0: Rows = {
    "training.seed": Moved("debug.seed"),
    "training.deterministic": Moved("debug.deterministic"),
    "training.debug_moe_force_load_balance": Gone(FORCED_BALANCE, falsy),
    "parallelism.enable_compiled_autograd": Gone("torch.compile works without it", falsy),
}
"""Keys that v0.2.2 no longer had."""

UNTIL_V0_2_2: Rows = {
    "job.save_config_file": Gone(
        "the resolved recipe is always written to the dump folder", always
    ),
    "job.custom_config_module": Gone("settings belong to their component", falsy),
    "experimental.custom_import": Moved("job.imports", _as_list),
    "experimental.custom_args_module": Gone("settings belong to their component", falsy),
    "model.hf_assets_path": Moved("model.tokenizer_path"),
    "model.print_after_conversion": Gone("the converted modules are always logged", always),
    "training.dataset": Moved("data.dataset"),
    "training.dataset_path": Moved("data.dataset_path"),
    "training.dataloader.num_workers": Moved("data.num_workers"),
    "training.dataloader.prefetch_factor": Moved("data.prefetch_factor"),
    "training.dataloader.persistent_workers": Gone(
        "workers always last as long as the run", always
    ),
    "training.dataloader.pin_memory": Gone("the device decides", always),
    "training.gc_debug": Gone("use a Python profiler", falsy),
    "debug.moe_force_load_balance": Gone(FORCED_BALANCE, falsy),
    "parallelism.pipeline_parallel_first_stage_less_layers": Moved(
        "parallelism.pipeline_parallel_embedding_weight"
    ),
    "parallelism.pipeline_parallel_last_stage_less_layers": Moved(
        "parallelism.pipeline_parallel_head_weight"
    ),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Gone(
        "the exchange of tokens does not overlap with other microbatches", always
    ),
    "parallelism.context_parallel_rotate_method": Moved(
        "parallelism.context_parallel_rotate_method", _ring
    ),
    "parallelism.context_parallel_load_balancer": Kept(
        {"ptrr": 'it balances masks of FlexAttention; use "headtail"'}
    ),
    "parallelism.expert_tensor_parallel_degree": Gone(
        "experts are split over all tensor-parallel ranks", always
    ),
    "parallelism.expert_parallel_comm_backend": Gone(
        "tokens are exchanged by all-to-all", just("standard")
    ),
    "checkpoint.exclude_from_loading": Moved("checkpoint.exclude_from_loading", _excluded),
    "checkpoint.create_seed_checkpoint": Gone(
        "every layout starts from the same weights, so no seed checkpoint is needed", falsy
    ),
    "checkpoint.initial_load_in_hf": Together(
        "without checkpoint.initial_load_path, that is the folder of model.tokenizer_path; the "
        "format of weights is detected from their files"
    ),
    "checkpoint.initial_load_in_hf_quantized": Gone(
        "quantized weights are not read in this version", falsy, "checkpoint.initial_load_in_hf"
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": Gone(
        "the data position is in every checkpoint", always
    ),
    "activation_checkpoint.selective_ac_option": Moved(
        "activation_checkpoint.selective_ac_option", _number
    ),
    "activation_checkpoint.visualize_memory_budget_pareto": Gone(CHECKPOINT_OPTION, falsy),
    "activation_checkpoint.early_stop": Gone(
        "it only decides where a recomputation ends, and changes no result", always
    ),
    "activation_checkpoint.preserve_rng_state": Gone("it is always preserved", always),
    "activation_checkpoint.determinism_check": Gone(CHECKPOINT_OPTION, just("default")),
    "activation_checkpoint.debug": Gone(CHECKPOINT_OPTION, falsy),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Gone(
        "products with these shapes, those of routers, are recomputed like others",
        just([], ["moe.router.gate"]),
    ),
    **{
        f"validation.dataloader.{key}": Gone(WORKERS, always)
        for key in ("num_workers", "persistent_workers", "pin_memory", "prefetch_factor")
    },
    "comm.mode": Gone("the fake backend is not part of this version", just("default")),
    **converters.TABLE,
    "memory_estimation.enable": Gone(NO_ESTIMATION, falsy),
    "memory_estimation.disable_fake_mode": Gone(NO_ESTIMATION, always),
    "fault_tolerance.process_group": Gone(
        "replica groups communicate by gloo", just("gloo"), "fault_tolerance.enable"
    ),
    "fault_tolerance.process_group_timeout_ms": Gone(
        "the limit is half of comm.train_timeout_seconds", always
    ),
    "fault_tolerance.semi_sync_method": Gone(NO_SEMI_SYNC, falsy, "fault_tolerance.enable"),
}

TABLE: Rows = {**OURS, **UNTIL_V0_1, **UNTIL_V0_2_0, **UNTIL_V0_2_2}
