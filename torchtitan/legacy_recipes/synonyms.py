"""Names that other software has for our settings and options, to suggest ours for them."""

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
