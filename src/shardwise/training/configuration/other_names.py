"""What other trainers call our keys: axolotl's, LLaMA-Factory's, TRL's and those of ``TrainingArguments``.

A key of theirs is answered with ours, or with why there is none. It is not taken for ours: what it means there (per
device or for all, in steps or in epochs) may be something else here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NoCounterpart:
    """Why there is no such key here, as the end of a sentence."""

    why: str


def counterpart(name: str) -> str | NoCounterpart | None:
    """Our path for what others call so, or why there is none; None for a name that is not known."""
    return OURS.get(name) or NONE.get(name)


OURS: Mapping[str, str] = {
    # the model
    "base_model": "model.name",
    "model_name": "model.name",
    "model_name_or_path": "model.name",
    "model_id": "model.name",
    "pretrained_model_name_or_path": "model.name",
    "model_revision": "model.revision",
    "revision_of_model": "model.revision",
    "base_model_config": "model.name",
    "tokenizer_name": "model.tokenizer",
    "tokenizer_name_or_path": "model.tokenizer",
    "tokenizer_config": "model.tokenizer",
    "processor_config": "model.tokenizer",
    "flash_attn": "model.attn_implementation",
    "flash_attention": "model.attn_implementation",
    "flash_attention_2": "model.attn_implementation",
    "sdp_attention": "model.attn_implementation",
    "eager_attention": "model.attn_implementation",
    "use_flash_attention_2": "model.attn_implementation",
    "resize_token_embeddings_to_32x": "model.resize_vocab",
    "new_vocab_size": "model.resize_vocab",
    # what is trained
    "finetuning_type": "tuning.method",
    "adapter": "tuning.method",
    "use_peft": "tuning.method",
    "peft": "tuning.method",
    "peft_method": "tuning.method",
    "lora": "tuning",
    "lora_config": "tuning",
    "peft_config": "tuning",
    "lora_r": "tuning.r",
    "lora_rank": "tuning.r",
    "alpha": "tuning.lora_alpha",
    "dropout": "tuning.lora_dropout",
    "lora_target": "tuning.target_modules",
    "lora_target_modules": "tuning.target_modules",
    "lora_target_linear": "tuning.target_modules",
    "lora_target_parameters": "tuning.target_parameters",
    "lora_modules_to_save": "tuning.modules_to_save",
    "additional_target": "tuning.modules_to_save",
    "peft_use_dora": "tuning.use_dora",
    "peft_use_rslora": "tuning.use_rslora",
    "lora_use_dora": "tuning.use_dora",
    "lora_use_rslora": "tuning.use_rslora",
    "lora_model_dir": "tuning.adapter",
    "adapter_name_or_path": "tuning.adapter",
    "freeze_trainable_layers": "tuning.trainable_layers",
    "freeze_trainable_modules": "tuning.trainable_modules",
    "freeze_extra_modules": "tuning.extra_modules",
    "unfrozen_parameters": "tuning.extra_modules",
    # data
    "dataset": "data.train",
    "datasets": "data.train",
    "dataset_name": "data.train",
    "dataset_path": "data.train",
    "train_file": "data.train",
    "train_data": "data.train",
    "train_dataset": "data.train",
    "dataset_train_split": "data.split",
    "dataset_config": "data.subset",
    "dataset_config_name": "data.subset",
    "cutoff_len": "data.max_length",
    "max_seq_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "model_max_length": "data.max_length",
    "seq_length": "data.max_length",
    "sequence_len": "data.max_length",
    "sequence_length": "data.max_length",
    "sample_packing": "data.packing",
    "neat_packing": "data.packing",
    "padding_free": "data.packing",
    # how long, in which steps
    "num_epochs": "training.epochs",
    "num_train_epochs": "training.epochs",
    "max_train_steps": "training.max_steps",
    "micro_batch_size": "training.batch_size",
    "per_device_batch_size": "training.batch_size",
    "per_device_train_batch_size": "training.batch_size",
    "train_batch_size": "training.batch_size",
    "grad_accum_steps": "training.gradient_accumulation_steps",
    "gradient_accumulation": "training.gradient_accumulation_steps",
    "data_seed": "training.seed",
    "val_set_size": "data.validation_fraction",
    "val_size": "data.validation_fraction",
    "validation_split_percentage": "data.validation_fraction",
    "preprocessing_num_workers": "data.processes",
    "dataset_num_proc": "data.processes",
    "dataset_processes": "data.processes",
    "overwrite_cache": "data.cache",
    "dataset_prepared_path": "data.cache_dir",
    "mask_history": "data.learn",
    # optimizer and schedule
    "lr": "optimizer.learning_rate",
    "optim": "optimizer.name",
    "optimizer_type": "optimizer.name",
    "use_muon": "optimizer.name",
    "optim_args": "optimizer.options",
    "optimizer_kwargs": "optimizer.options",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "epsilon": "optimizer.eps",
    "clip_grad": "optimizer.max_grad_norm",
    "gradient_clipping": "optimizer.max_grad_norm",
    "loraplus_lr_ratio": "optimizer.lora_plus_ratio",
    "loraplus_ratio": "optimizer.lora_plus_ratio",
    "lr_scheduler": "schedule.name",
    "lr_scheduler_type": "schedule.name",
    "scheduler": "schedule.name",
    "lr_scheduler_kwargs": "schedule.options",
    "num_warmup_steps": "schedule.warmup_steps",
    "cosine_min_lr_ratio": "schedule.options",
    # sharding
    "bf16": "sharding.precision",
    "fp16": "sharding.precision",
    "mixed_precision": "sharding.precision",
    "float32": "sharding.precision",
    "dtype": "sharding.precision",
    "torch_dtype": "sharding.precision",
    "gradient_checkpointing": "sharding.activation_checkpointing",
    "disable_gradient_checkpointing": "sharding.activation_checkpointing",
    "torch_compile": "sharding.compile",
    "fsdp": "sharding",
    "fsdp_config": "sharding",
    "fsdp_offload_params": "sharding.offload",
    "fsdp_cpu_offload": "sharding.offload",
    "fsdp_reshard_after_forward": "sharding.reshard_after_forward",
    "fsdp_sharding_strategy": "sharding.reshard_after_forward",
    "fsdp_auto_wrap_policy": "sharding.wrap",
    "fsdp_transformer_layer_cls_to_wrap": "sharding.wrap.classes",
    "fsdp_min_num_params": "sharding.wrap.min_parameters",
    "fsdp_activation_checkpointing": "sharding.activation_checkpointing",
    "dp_replicate_size": "sharding.replicas",
    # checkpoints
    "save_steps": "checkpoints.every",
    "save_strategy": "checkpoints.every",
    "saves_per_epoch": "checkpoints.every",
    "save_total_limit": "checkpoints.keep",
    "resume_from_checkpoint": "checkpoints.resume",
    "auto_resume_from_checkpoints": "checkpoints.resume",
    # evaluation
    "eval_dataset": "evaluation.data",
    "test_datasets": "evaluation.data",
    "validation_file": "evaluation.data",
    "dataset_test_split": "evaluation.split",
    "eval_steps": "evaluation.every",
    "eval_strategy": "evaluation.every",
    "evaluation_strategy": "evaluation.every",
    "evals_per_epoch": "evaluation.every",
    "eval_batch_size": "evaluation.batch_size",
    "per_device_eval_batch_size": "evaluation.batch_size",
    "load_best_model_at_end": "evaluation.keep_best",
    "early_stopping_patience": "evaluation.patience",
    "early_stopping_steps": "evaluation.patience",
    "early_stopping_threshold": "evaluation.min_delta",
    # log and output
    "logging_steps": "log.every",
    "report_to": "log.trackers",
    "use_wandb": "log.trackers",
    "use_tensorboard": "log.trackers",
    "wandb_project": "log.project",
    "comet_project_name": "log.project",
    "mlflow_experiment_name": "log.project",
    "project_name": "log.project",
    "run_name": "log.tracker_options",
    "wandb_name": "log.tracker_options",
    "wandb_run_id": "log.tracker_options",
    "wandb_entity": "log.tracker_options",
    "output_dir": "output.directory",
    "overwrite_output_dir": "output.overwrite",
    "hub_model_id": "output.push_to_hub",
    "export_hub_model_id": "output.push_to_hub",
    "hub_private_repo": "output.private",
    "save_dtype": "output.dtype",
    "load_in_4bit": "quantization",
    "quantization_bit": "quantization",
    "bnb_4bit_quant_type": "quantization.form",
    "bnb_4bit_use_double_quant": "quantization.scales",
    "bnb_4bit_compute_dtype": "quantization.compute_dtype",
}
"""Their name: our path."""

_ROWS = "rows say by their form what is learned of them; see `data` in docs/train.md"
_QUANTISED = "bases are kept in four bits (quantization: nf4), or as the checkpoint of model.name has them"
_FEWER_KERNELS = (
    "logits never exist whole anyway (training.loss_chunk_tokens); other kernels are not put into models"
)
_OTHER_TASK = "this trains language models on tokens; no preferences or rewards"
_OTHER_ENGINE = "ranks are sharded by FSDP2 alone; see `sharding` in docs/train.md"
_RANKS = "ranks come from --nproc-per-node or a launcher, not from the configuration"
_IN_ORDER = "each rank makes its own batches of tokens that are in memory"

NONE: Mapping[str, NoCounterpart] = {
    name: NoCounterpart(why)
    for why, names in (
        (
            _ROWS,
            ("train_on_inputs", "train_on_prompt", "template", "dataset_text_field", "dataset_dir"),
        ),
        (
            _QUANTISED,
            ("load_in_8bit", "quantization_method", "gptq", "bnb_config"),
        ),
        (
            _FEWER_KERNELS,
            ("use_liger_kernel", "enable_liger_kernel", "cut_cross_entropy", "use_unsloth", "plugins"),
        ),
        (_OTHER_TASK, ("rl", "stage", "pref_beta", "pref_loss", "dpo_beta", "reward_model", "ref_model")),
        (_OTHER_ENGINE, ("deepspeed", "ddp_timeout", "ddp_find_unused_parameters", "tensor_parallel_size")),
        (_OTHER_ENGINE, ("context_parallel_size", "sequence_parallel_degree", "fsdp_version", "dp_shard_size")),
        (_OTHER_ENGINE, ("fsdp_state_dict_type", "fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading")),
        (_OTHER_ENGINE, ("fsdp_use_orig_params", "fsdp_backward_prefetch", "fsdp_forward_prefetch")),
        (_RANKS, ("local_rank", "num_processes", "nproc_per_node", "world_size", "n_gpu", "num_gpus")),
        (_IN_ORDER, ("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor")),
        (_IN_ORDER, ("remove_unused_columns",)),
        (
            "the seed alone decides the order of rows; data.packing saves the padding",
            ("group_by_length", "pad_to_sequence_len", "length_column_name", "eval_sample_packing"),
        ),
        ("it is torch's own switch: NVIDIA_TF32_OVERRIDE in the environment", ("tf32",)),
        ("trained weights are float32, and computed in sharding.precision", ("pure_bf16", "bfloat16", "float16")),
        ("recomputing is exact, and has no variants here", ("gradient_checkpointing_kwargs",)),
        ("what is trained, and data, say what is done", ("do_train", "do_eval", "do_predict", "task_type")),
        ("every run writes metrics.jsonl, of which any plot can be made", ("plot_loss", "eval_table_size")),
        ("last/ has the model alone, checkpoints/ the rest", ("save_only_model", "save_safetensors")),
        ("embeddings are not disturbed here", ("neftune_noise_alpha",)),
        ("tokens are the tokenizer's; prepare one, and name its folder as model.tokenizer", ("special_tokens",)),
        ("it is made by the tokenizer, of which model.tokenizer says which", ("tokenizer_type",)),
        ("the model's config says its class", ("model_type", "is_llama_derived_model", "type_of_model")),
        ("it is a setting of the model's own; save the model with it", ("rope_scaling", "rope_theta")),
        ("memory of gradients and moments is sharded already", ("use_galore", "use_apollo", "use_badam", "lisa")),
        ("the hub's cache is chosen by HF_HOME in the environment", ("hub_token", "hf_hub_token")),
        ("pushed is what is saved at the end, once", ("hub_strategy", "hub_always_push")),
        ("keys that do not exist are always refused", ("strict",)),
    )
    for name in names
}
"""Their name, and why there is none of it here."""
