"""TRL's dataclasses, trainers and datasets for a configuration of ``shardwise train``."""

import copy
import importlib
import logging
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import torch
import transformers
import trl as _trl
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from transformers import PreTrainedModel
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.import_utils import is_vllm_available
from trl.trainer.utils import get_peft_config

from shardwise.core.consents import Ignore, Initialize
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.files.urls import redact, without_secrets
from shardwise.fsdp.policies import Classes, WrapPolicy
from shardwise.fsdp.torch_private import accelerator
from shardwise.fsdp.wrap import Sharding
from shardwise.integrations import ShardwiseTrainer, for_trainer
from shardwise.loading.from_pretrained import from_pretrained
from shardwise.loading.meta_model import PretrainedOptions
from shardwise.loading.prepare import LoadOptions
from shardwise.models.four_bit.config import Fp4, Nf4
from shardwise.models.tunings import Freeze, Full, Lora, Tuning
from shardwise.ranks.collective_errors import is_collective_error
from shardwise.ranks.outcomes import is_out_of_memory
from shardwise.ranks.world import World
from shardwise.training import dataset_loading, dataset_preparation, image_rows
from shardwise.training.arguments import REWARDED, SAMPLING, ShardwiseArguments, TrainMethod
from shardwise.training.dataset_loading import AnyDataset
from shardwise.training.run_config import RunConfig, trl_accelerate_config

_log = logging.getLogger(__name__)

trl: Any = _trl
"""TRL's names are loaded lazily, which a type checker does not see."""


@dataclass(frozen=True, slots=True)
class TrlArguments:
    """A configuration as parsed by TRL.

    Attributes:
        script: ``ScriptArguments``, or those of GRPO.
        training: ``SFTConfig`` or that of another trainer.
        model: ``ModelConfig``.
        mixture: ``DatasetMixtureConfig``.
        own: keys of shardwise.
        has_dtype: whether the configuration has ``dtype``. ``ModelConfig`` has a default.
    """

    script: Any
    training: Any
    model: Any
    mixture: Any
    own: ShardwiseArguments
    has_dtype: bool


class ResumableEarlyStopping(transformers.EarlyStoppingCallback):
    """Early stopping that continues to count when a run is resumed, with the current patience."""

    def on_train_begin(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **others: Any,
    ) -> None:
        super().on_train_begin(args, state, control, **others)  # type: ignore[no-untyped-call]
        states: Any = state.stateful_callbacks
        self.early_stopping_patience_counter = 0
        # Before the first step they are states of the callbacks, which may have counted in an earlier training.
        if state.global_step > 0 and (saved := states.get(type(self).__name__)):
            self.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True


_CLASSES: Final[Mapping[TrainMethod, tuple[str, str]]] = {
    "sft": ("trl", "SFT"),
    "dpo": ("trl", "DPO"),
    "kto": ("trl", "KTO"),
    "grpo": ("trl", "GRPO"),
    "reward": ("trl", "Reward"),
    "rloo": ("trl", "RLOO"),
    "distillation": ("trl", "Distillation"),
    "orpo": ("trl.experimental.orpo", "ORPO"),
    "cpo": ("trl.experimental.cpo", "CPO"),
    "tpo": ("trl.experimental.tpo", "TPO"),
    "gmpo": ("trl.experimental.gmpo", "GMPO"),
}
"""Modules and prefixes of the config and trainer classes by method."""


def trl_class(method: TrainMethod, kind: Literal["Config", "Trainer"]) -> Any:
    """Return the class of TRL for a method."""
    module, prefix = _CLASSES[method]
    with warnings.catch_warnings():  # experimental methods say so when they are imported, on every rank
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(module), prefix + kind)


def script_class(method: TrainMethod) -> Any:
    """Return TRL's class for the arguments of a method's script."""
    if method not in REWARDED:
        return trl.ScriptArguments
    return importlib.import_module("trl.scripts.grpo").GRPOScriptArguments  # RLOO's has the same fields


def parse(config: RunConfig, planned_ranks: int | None = None) -> TrlArguments:
    """Parse a configuration by TRL's parser.

    Args:
        config: the configuration.
        planned_ranks: number of ranks of a training that is only planned, maybe on a machine without vLLM. By
            default it is that of this process.

    Raises:
        ConfigError: TRL or transformers rejects a value or lacks a key, or the optimizer or its schedule cannot be
            created.
    """
    config_class = trl_class(config.method, "Config")
    if planned_ranks is not None:  # a property, by which TRL checks batches
        config_class = type(config_class.__name__, (config_class,), {"world_size": planned_ranks})
    parser = trl.TrlParser((script_class(config.method), config_class, trl.ModelConfig, trl.DatasetMixtureConfig))
    values = copy.deepcopy(dict(config.values))  # TRL replaces the entries of datasets in place
    # Defaults of shardwise, where those of TRL and transformers do not fit.
    if accelerator() is None:
        values["use_cpu"] = True
    values.setdefault("log_level_replica", "error")  # the first rank shows warnings
    values.setdefault("logging_nan_inf_filter", False)  # which would log 0.0 for a loss that is NaN
    parser.error = _raise_usage_error
    left_over = parser.set_defaults_with_config(**values)  # --KEY VALUE --KEY VALUE ...
    if absent := [text.removeprefix("--") for text in left_over[::2]]:
        raise ConfigError(
            f"{config.source}: {', '.join(absent)}: transformers {transformers.__version__} and TRL "
            f"{trl.__version__} do not have this. Update them, or set what they have instead"
        )
    try:
        script, training, model, mixture, *_ = parser.parse_args_into_dataclasses(args=[])
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"{config.source}: is rejected by TRL. {error}") from error
    if not model.model_name_or_path:
        raise ConfigError("model_name_or_path: is missing. Set it to a folder, a name on the hub or a URL")
    # The Trainer would find these only after the model is loaded.
    try:
        transformers.Trainer.get_optimizer_cls_and_kwargs(training)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"optim: {training.optim.value} cannot be created, {error}. Set another") from error
    _require_schedule(config.source, training)
    for tracker in training.report_to if planned_ranks is None else ():
        try:
            for callback_class in get_reporting_integration_callbacks([tracker]):
                callback_class()
        except (RuntimeError, ValueError, ImportError) as error:
            raise ConfigError(
                f"report_to: {tracker} cannot be used, {str(error).rstrip('.')}. Correct this, or remove it"
            ) from error
    if planned_ranks is None and getattr(training, "use_vllm", False) and not is_vllm_available():
        raise ConfigError("use_vllm: vLLM is not installed. Run pip install vllm, or remove it")
    # The mesh is one of accelerators, and the Trainer's device would be another.
    if planned_ranks is None and training.use_cpu and (kind := accelerator()) is not None:
        raise ConfigError(
            f"use_cpu: ranks of this machine compute on {kind.type}. Hide its devices (CUDA_VISIBLE_DEVICES=) "
            "to train on the CPU, or remove it"
        )
    if getattr(training, "activation_offloading", False):
        # TRL leaves out what shares the memory of a parameter, of which each rank has a shard.
        if training.world_size > 1 and not training.gradient_checkpointing:
            raise ConfigError(
                "activation_offloading: without gradient_checkpointing TRL would copy the gathered weights of all "
                "blocks to host memory, on every rank. Set gradient_checkpointing: true, or remove it"
            )
        if planned_ranks is None and accelerator() is None:
            raise ConfigError("activation_offloading: needs an accelerator. Remove it")
    has_dtype = config.values.get("dtype") is not None
    return TrlArguments(script, training, model, mixture, config.own, has_dtype)


def _raise_usage_error(message: str) -> NoReturn:
    """Raise what argparse would print after its usage before it exits."""
    raise ValueError(message)


def _require_schedule(source: str, training: Any) -> None:
    """Create the learning-rate schedule once, of an optimizer without a model.

    Raises:
        ConfigError: it cannot be created.
    """
    kind, settings = training.lr_scheduler_type, training.lr_scheduler_kwargs
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=training.learning_rate)
    try:
        with warnings.catch_warnings():  # they come again when the training begins
            warnings.simplefilter("ignore")
            transformers.get_scheduler(kind, optimizer, 1, 10, scheduler_specific_kwargs=settings)
    except (ValueError, TypeError) as error:
        has_text = any(isinstance(value, str) for value in (settings or {}).values())
        raise ConfigError(
            f"{source}: lr_scheduler_kwargs {settings or {}} do not fit lr_scheduler_type {kind.value}, {error}. "
            f"Correct them{' (YAML reads 1e-6 as text, and 1.0e-6 as a number)' if has_text else ''}"
        ) from error


def load_model(arguments: TrlArguments) -> PreTrainedModel:
    """Load the model, sharded over all ranks and ready to train. Collective: yes.

    Raises:
        ConfigError: keys contradict each other.
        ShardwiseError: as for :func:`~shardwise.loading.from_pretrained.from_pretrained`.
    """
    keywords = model_options(arguments)
    if arguments.training.use_liger_kernel and accelerator() is None and arguments.training.process_index == 0:
        _log.warning("use_liger_kernel: Liger's kernels need a GPU. The training runs without them")
    keywords["tuning"] = tuning = build_tuning(arguments)
    if isinstance(tuning, Full):
        keywords["trained_dtype"] = "unchanged"  # TRL trains in the dtype that is loaded
    name = arguments.model.model_name_or_path
    model, report = from_pretrained(name, **keywords, output_loading_info=True)
    # A head that is initialized is right for a language model, of which a reward model is made. A reward model has
    # one already, and without it would score at random.
    heads = [tensor for tensor in report.initialized if not {"score", "classifier"}.isdisjoint(tensor.split("."))]
    if heads and any("ForSequenceClassification" in kind for kind in model.config.architectures or ()):
        raise ConfigError(f"{without_secrets(name)}: is a reward model without {heads[0]}. Save it again")
    return for_trainer(_without_secrets(model))


def _without_secrets(model: PreTrainedModel) -> PreTrainedModel:
    """Mask credentials in the names with which a model and its adapters are saved and logged."""
    name = without_secrets(str(model.name_or_path))
    if name != model.name_or_path:
        model.name_or_path = name
        model.config._name_or_path = name
        for adapter in (getattr(model, "peft_config", None) or {}).values():
            adapter.base_model_name_or_path = name
    return model


def load_frozen(arguments: TrlArguments, functions: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Load the reference, teacher and reward models of a method, sharded and frozen. Collective: yes.

    Return them and the reward functions as arguments of the trainer, which would load each whole on every rank. The
    reference of a LoRA is the model without it.

    Args:
        arguments: of the training.
        functions: those of ``import_reward_functions``.

    Raises:
        ConfigError: a key of the teacher has no counterpart.
        ShardwiseError: as for :func:`~shardwise.loading.from_pretrained.from_pretrained`.
    """
    method, training = arguments.own.method, arguments.training
    frozen: dict[str, Any] = {}
    # The reference is the model as it is before the training, so it is loaded in the same way.
    if has_reference(method, training) and not arguments.model.use_peft:
        frozen["ref_model"] = _load_frozen(arguments.model.model_name_or_path, model_options(arguments))
    if method == "distillation":
        options = _frozen_options(arguments, training.teacher_model_revision)
        settings = dict(training.teacher_model_init_kwargs or {})
        training.teacher_model_init_kwargs = None  # TRL refuses them beside a model
        if unknown := settings.keys() - {"dtype", "attn_implementation", "revision", "trust_remote_code"}:
            raise ConfigError(f"teacher_model_init_kwargs: {min(unknown)} cannot be passed on. Remove it")
        options |= settings  # type: ignore[typeddict-item]
        frozen["teacher_model"] = _load_frozen(training.teacher_model_name_or_path, options)
    if method in REWARDED:
        frozen["reward_funcs"] = _load_rewards(arguments, functions)
    return frozen


def import_reward_functions(arguments: TrlArguments) -> dict[str, Callable[..., Any]]:
    """Return reward functions by their names in ``trl.rewards`` or their import paths. Collective: yes.

    Raises:
        ConfigError: one cannot be imported, or makes reward functions. The same on every rank.
    """
    if arguments.own.method not in REWARDED:
        return {}
    names: list[str] = arguments.script.reward_funcs or []
    with World.current(call="train") as world, world.collective("import reward functions"):
        sys.path.insert(0, os.getcwd())  # as TRL's own command does
        # What has a slash is a reward model: a folder, or a repository on the hub.
        return {name: _import_reward_function(name) for name in names if not ("/" in name or Path(name).is_dir())}


def _load_rewards(arguments: TrlArguments, functions: Mapping[str, Callable[..., Any]]) -> list[Any]:
    """Return the reward functions, and the sharded reward models, in the order of their names."""
    script = arguments.script
    names: list[str] = [*filter(None, [script.reward_model_name_or_path]), *(script.reward_funcs or ())]
    options = _frozen_options(arguments, None) | {"model_class": transformers.AutoModelForSequenceClassification}
    options["config_overrides"] = {"num_labels": 1}
    rewards: dict[str, Any] = dict(functions)
    for name in names:
        if name not in rewards:
            rewards[name] = _load_frozen(name, options)
    return [rewards[name] for name in names]


def has_reference(method: TrainMethod, training: Any) -> bool:
    return method in ("dpo", "kto") or (method in REWARDED and training.beta != 0)


def _load_frozen(name: str, options: PretrainedOptions) -> PreTrainedModel:
    model = for_trainer(_without_secrets(from_pretrained(name, **options)))
    model.requires_grad_(False)
    return model


def _frozen_options(arguments: TrlArguments, revision: str | None) -> PretrainedOptions:
    """Return the options of a teacher or reward model.

    They are those of the trained one, without its quantization, overrides and revision.
    """
    options = model_options(arguments)
    options.pop("quantization", None)
    options.pop("config_overrides", None)
    options.pop("revision", None)
    if revision is not None:
        options["revision"] = revision
    # The names of layers to wrap are those of the trained model.
    options["sharding"] = replace(options["sharding"], wrap="auto")
    return options


def load_base(arguments: TrlArguments) -> PreTrainedModel:
    """Load the base of many LoRAs, sharded and frozen, in bfloat16 if ``bf16`` is set. Collective: yes."""
    return _without_secrets(from_pretrained(arguments.model.model_name_or_path, **base_options(arguments)))


def base_options(arguments: TrlArguments) -> PretrainedOptions:
    options = model_options(arguments)
    if arguments.training.bf16 and not arguments.has_dtype:
        options["dtype"] = "bfloat16"
    if arguments.training.gradient_checkpointing:
        # That of transformers needs training mode, in which a base may have dropout of its own.
        options["sharding"] = recompute_blocks(options["sharding"], arguments)
    return options


def recompute_blocks(sharding: Sharding, arguments: TrlArguments) -> Sharding:
    """Return a sharding that recomputes those blocks that ``gradient_checkpointing`` recomputes in the Trainer."""
    every = (arguments.training.gradient_checkpointing_kwargs or {}).get("every_n_layers", 1)
    return replace(sharding, activation_checkpointing=every)


_HEAD: Final = tuple(f"{wrapper}{name}.*" for wrapper in ("", "*.") for name in ("score", "classifier"))
"""Tensors of the head of a reward model, also inside PEFT's modules."""


def model_options(arguments: TrlArguments) -> PretrainedOptions:
    model, training = arguments.model, arguments.training
    options: PretrainedOptions = {
        "sharding": _sharding(arguments),
        "dtype": model.dtype or "auto",
        "revision": model.model_revision,
        "trust_remote_code": training.trust_remote_code,
        "options": LoadOptions(seed=training.seed),
        "attn_implementation": model.attn_implementation,
        "use_kernels": arguments.own.use_kernels,
        "config_overrides": arguments.own.config_overrides or {},
    }
    if training.use_liger_kernel and accelerator() is not None:
        # As TRL's trainers do, whose losses need the hidden states before the head.
        options["liger_kernel_config"] = {
            **(training.liger_kernel_config or {}),
            "fused_linear_cross_entropy": False,
        }
    if training.torch_compile:
        compiled = {"backend": training.torch_compile_backend, "mode": training.torch_compile_mode}
        options["sharding"] = replace(options["sharding"], compile=compiled)
    # In place of the head for tokens, a reward model has one for a score.
    if arguments.own.method == "reward":
        options |= {
            "model_class": transformers.AutoModelForSequenceClassification,
            "config_overrides": {**options["config_overrides"], "num_labels": 1},
            "on_missing": Initialize(only=_HEAD),  # of a language model, as transformers does
            "on_unexpected": Ignore(only=("lm_head.*",)),
        }
    if model.load_in_4bit:
        scales = bool(model.use_bnb_nested_quant)
        is_nf4 = model.bnb_4bit_quant_type == "nf4"
        options["quantization"] = Nf4(double_quant=scales) if is_nf4 else Fp4(double_quant=scales)
    return options


def _sharding(arguments: TrlArguments) -> Sharding:
    """Return the sharding of the keys, or of the file ``accelerate_config``.

    Raises:
        ConfigError: the file cannot be used, or computes in float16 and the training has no loss scale.
    """
    own = arguments.own
    if own.accelerate_config:
        sharding = Sharding.from_accelerate(trl_accelerate_config(own.accelerate_config))
        if sharding.mp_policy.param_dtype == torch.float16 and not arguments.training.fp16:
            raise ConfigError(
                "accelerate_config: mixed_precision fp16 needs fp16: true, which scales the loss (not with "
                "adapters). Set mixed_precision: bf16, or fp16: true"
            )
        return sharding
    layers = own.transformer_layer_cls_to_wrap
    wrap: WrapPolicy = Classes(tuple(layers)) if layers else "auto"
    offload = CPUOffloadPolicy() if own.cpu_offload else OffloadPolicy()
    return Sharding(replicas=own.dp_replicate_size, wrap=wrap, offload_policy=offload)


def lora_config(arguments: TrlArguments) -> Any:
    """Return PEFT's config, or None."""
    config: Any = get_peft_config(arguments.model)
    if config is not None and isinstance(config.target_modules, str) and config.target_modules.isidentifier():
        config.target_modules = {config.target_modules}  # TRL makes a pattern of a list of one name
    return config


def build_tuning(arguments: TrlArguments) -> Tuning:
    keys = arguments.own
    config = lora_config(arguments)
    if config is not None:
        return Lora(config, placement="sharded" if keys.shard_adapters else "replicated")
    modules, extra_modules = tuple(keys.trainable_modules or ()), tuple(keys.extra_modules or ())
    if keys.trainable_layers or modules or extra_modules:
        return Freeze(keys.trainable_layers, modules, extra_modules)
    return Full()


def load_processor(arguments: TrlArguments) -> Any:
    """Load the processor of a vision-language model, or the tokenizer, as TRL does.

    Raises:
        ConfigError: it cannot be loaded, ``eos_token`` or ``pad_token`` is not in its vocabulary, or
            ``chat_template_path`` is not a template.
    """
    name, revision = arguments.own.tokenizer_name_or_path, None
    if not name:
        name, revision = arguments.model.model_name_or_path, arguments.model.model_revision
    kind = transformers.AutoTokenizer if arguments.own.method == "reward" else transformers.AutoProcessor
    settings = arguments.own.processor_kwargs or {}
    try:
        processor: Any = kind.from_pretrained(
            name, revision=revision, trust_remote_code=arguments.training.trust_remote_code, **settings
        )
    except ImportError as error:  # of Pillow, or of torchvision by processors that also take videos
        why = str(error).strip().partition(". ")[0]
        remedy = "Install pillow, and the release of torchvision for this torch from the index that torch came from"
        raise ConfigError(f"{without_secrets(name)}: its processor cannot be loaded, {why}. {remedy}") from error
    except (OSError, ValueError, KeyError) as error:
        message = redact(f"{name}: its tokenizer cannot be loaded, {error}", name, {})
        where = "the folder" if Path(name).exists() else "the name (there is no such folder on this machine)"
        raise ConfigError(f"{message}. Check {where}, or set tokenizer_name_or_path") from error
    # A setting that the processor does not have would have no effect.
    known = getattr(getattr(processor, "image_processor", None), "valid_kwargs", None)
    for key in settings:
        if known is not None and key not in known.__annotations__ and not hasattr(processor, key):
            raise ConfigError(f"processor_kwargs: {key} is no setting of the model's processor. Remove it")
    # TRL's key is the path of a template, and that of shardwise a path or the template itself.
    template = getattr(arguments.training, "chat_template_path", None)
    if template and not (Path(template).is_file() and template.endswith((".jinja", ".j2"))):
        raise ConfigError(
            f"chat_template_path: {template} is not a .jinja file. The template of another model may need new "
            "tokens, which a sharded model cannot get. Save the template as a file"
        )
    if template:
        processor.chat_template = Path(template).read_text("utf-8")
    if own_template := arguments.own.chat_template:
        # A template has braces or several lines. Names of files that do not exist are mistakes.
        is_text = "{" in own_template or "\n" in own_template
        if not is_text and not Path(own_template).is_file():
            raise ConfigError(f"chat_template: {own_template} is neither a template nor a file. Check the path")
        processor.chat_template = own_template if is_text else Path(own_template).read_text("utf-8")
    tokenizer = dataset_preparation.get_tokenizer(processor)
    for key in ("eos_token", "pad_token"):
        if token := getattr(arguments.training, key, None):
            if token not in tokenizer.get_vocab():
                raise ConfigError(f"{key}: {token} is not in the vocabulary. Set another")
            setattr(tokenizer, key, token)  # as TRL's trainers do, but before templates are rendered
    return processor


def load_data(arguments: TrlArguments, processor: Any, local_rank: int) -> tuple[AnyDataset, AnyDataset | None]:
    """Load rows for training and evaluation, tokenized if TRL has no masks for the chat template or their weights.

    Collective: yes.

    Raises:
        ConfigError: a dataset or a row cannot be used.
    """
    script, training, method = arguments.script, arguments.training, arguments.own.method
    num_proc = getattr(training, "dataset_num_proc", None)
    is_masked = method == "sft" and training.assistant_only_loss
    with dataset_preparation.first_local_rank_first(local_rank):
        # The splits that are used, each of which must have rows.
        train_splits, test_splits = dataset_loading.load(script, arguments.mixture, arguments.own)
        used = [(train_splits, script.dataset_train_split)]
        if training.eval_strategy != "no":
            used.append((test_splits, script.dataset_test_split))
        for splits, name in used:
            if name not in splits:
                raise ConfigError(
                    f"{name}: is not a split of the dataset, which has {', '.join(splits)}. Set "
                    "dataset_train_split, dataset_test_split or test_split_size"
                )
            if next(iter(dataset_preparation.without_decoding(splits[name])), None) is None:
                raise ConfigError(f"{name}: has no rows. Check the dataset, or set another split")
        # Chats of all formats become messages, unless one column has the prompts.
        datasets = []
        for splits, name in used:
            rows = splits[name]
            prompt, column = arguments.own.system_prompt, arguments.own.dataset_prompt_column
            if column is None:
                rows = dataset_preparation.convert_to_messages(rows, method, num_proc=num_proc)
                rows = dataset_preparation.drop_other_chats(rows, method)
            rows = dataset_preparation.add_system_prompt(rows, prompt, column, num_proc=num_proc)
            if method not in SAMPLING:
                rows = dataset_preparation.convert_answers(rows, num_proc=num_proc)
                if dataset_preparation.find_image_column(rows) is None:  # others are checked below
                    dataset_preparation.require_columns(rows, method, _text_field(training))
            dataset_preparation.require_prompts(rows, method)
            datasets.append(rows)
        # Rows with images are checked, and rows of text are tokenized here if TRL's masks would not be right.
        check: image_rows.ImageRowCheck | None = None
        if column := dataset_preparation.find_image_column(datasets[0]):  # TRL's collators tokenize and mask these
            check = _make_image_check(arguments, processor, column, datasets)
            datasets = [image_rows.check_when_read(one, check) for one in datasets]
        elif is_masked and "input_ids" not in (first := next(iter(datasets[0]))):
            if not isinstance(first.get("prompt") or first.get("messages"), list):
                raise ConfigError(
                    "assistant_only_loss: the rows have no chats. Write messages, or prompt and completion as "
                    "messages, or remove that key"
                )
            template = _training_template(processor)
            if template is None or any(map(dataset_preparation.needs_masks, datasets)):
                # A copy: TRL's template is for these masks only, and is not saved with the model.
                tokenizer = copy.copy(dataset_preparation.get_tokenizer(processor))
                tokenizer.chat_template = template or processor.chat_template
                completion_only = training.completion_only_loss is not False
                datasets = [
                    dataset_preparation.tokenize_with_masks(
                        rows, tokenizer, completion_only=completion_only, num_proc=num_proc
                    )
                    for rows in datasets
                ]
                training.assistant_only_loss = False  # TRL would require marks in the chat template
        # Rows that TRL tokenizes. It would not say which one is malformed.
        if not column and "input_ids" not in dataset_preparation.get_column_names(datasets[0]):
            datasets = [
                dataset_preparation.check_when_read(rows, _text_field(training), method, num_proc=num_proc)
                for rows in datasets
            ]
    # All ranks at once, since nothing is cached: each reads a share of the rows.
    if check is not None:
        for dataset in datasets:
            image_rows.require_usable(dataset, check)
    return datasets[0], datasets[1] if len(datasets) > 1 else None


def _make_image_check(
    arguments: TrlArguments, processor: Any, column: str, datasets: Sequence[AnyDataset]
) -> image_rows.ImageRowCheck:
    """Return the check of rows with images, for a configuration that can train on them.

    Raises:
        ConfigError: it cannot.
    """
    image_rows.require_processor(column, arguments.own.method, processor)
    if any(dataset_preparation.find_image_column(one) != column for one in datasets):
        raise ConfigError(
            f"{column}: is no column of the rows to evaluate on, which TRL pads as those to train on. Add it"
        )
    training, is_dpo = arguments.training, arguments.own.method == "dpo"
    is_chat = not is_dpo and "messages" in dataset_preparation.get_column_names(datasets[0])
    is_masked = getattr(training, "assistant_only_loss", False)
    if is_masked and (not is_chat or _training_template(processor) is None):
        raise ConfigError(
            "assistant_only_loss: needs, for images, messages and a chat template with {% generation %} marks. "
            "Set chat_template to a file with them, or write rows of prompt and completion"
        )
    if is_chat and training.completion_only_loss:
        raise ConfigError("completion_only_loss: needs, for images, rows of prompt and completion. Remove it")
    if not is_chat and training.pad_to_multiple_of:
        raise ConfigError("pad_to_multiple_of: beside images, TRL pads rows of messages only. Remove it")
    return image_rows.ImageRowCheck(arguments, processor, column)


def _training_template(processor: Any) -> Any:
    """Return the chat template by whose marks TRL masks chats, or None if it does not know that of the model."""
    if not processor.chat_template or has_generation_markers(processor.chat_template):
        return processor.chat_template
    try:
        return get_training_chat_template(processor)
    except ValueError:
        return None


def _text_field(training: Any) -> str:
    return getattr(training, "dataset_text_field", "text")


def make_trainer(
    arguments: TrlArguments,
    model: PreTrainedModel,
    frozen: Mapping[str, Any],
    processor: Any,
    data: tuple[AnyDataset, AnyDataset | None],
    local_rank: int,
) -> Any:
    """Make the TRL trainer of a method, with checkpoints of shardwise. Collective: yes.

    Raises:
        ConfigError: TRL or transformers rejects a key or a row, or a required package is not installed. The same
            on every rank.
    """
    method, training = arguments.own.method, arguments.training
    # from_pretrained has applied Liger's kernels and compiled the blocks. The Trainer would do both again, to the
    # whole sharded model. "no", because accelerate reads None from its environment.
    training.use_liger_kernel = training.torch_compile = False
    training.torch_compile_backend, training.torch_compile_mode = "no", None
    base = trl_class(method, "Trainer")
    # ShardwiseTrainer first: its methods override those of TRL and the Trainer, and call them by super().
    trainer_class = type(f"Shardwise{base.__name__}", (ShardwiseTrainer, base), {})
    train, test = data
    keywords: dict[str, Any] = {"train_dataset": train, "eval_dataset": test, "processing_class": processor}
    keywords |= frozen
    if patience := arguments.own.early_stopping_patience:
        keywords["callbacks"] = [ResumableEarlyStopping(patience)]
    # The failure of one rank is kept until the block below, which raises it on all ranks.
    failure, trainer = None, None
    try:
        with dataset_preparation.preparing_together(base, local_rank, data, method, training):
            trainer = trainer_class(model=model, args=arguments.training, **keywords)
    except ShardwiseError:
        raise
    except Exception as error:  # of TRL, a tracker, the hub: any, and maybe on the first rank only
        if is_out_of_memory(error) or is_collective_error(error):
            raise  # other ranks are in a collective of the model, and cannot meet in the block below
        failure = ConfigError(f"{method}: {redact(f'{base.__name__} cannot be created, {error}', '', {})}")
        failure.__cause__ = error
    with World.current(call="train") as world, world.collective("create the trainer"):
        if failure is not None:
            raise failure
        _require_trainable_data(trainer, arguments)
    assert trainer is not None
    if method == "sft":
        # TRL's loss divides by the tokens of all ranks. transformers does not count them for classes whose own loss
        # does not take the number (Gemma 3, Qwen-VL). Then the means of ranks with few and many tokens count alike.
        trainer.model_accepts_loss_kwargs = True
    return trainer


def _require_trainable_data(trainer: Any, arguments: TrlArguments) -> None:
    """Check that TRL has left rows to train and to evaluate on, whose tokens have embeddings.

    Raises:
        ConfigError: it has not.
    """
    script, max_length = arguments.script, getattr(arguments.training, "max_length", None)
    splits = {"train_dataset": script.dataset_train_split, "eval_dataset": script.dataset_test_split}
    for attribute, split in splits.items():
        if (dataset := getattr(trainer, attribute)) is not None:
            dataset_preparation.require_trainable_rows(dataset, split, max_length)
            embedded = dataset_preparation.require_embedded_tokens(dataset, trainer.processing_class, trainer.model)
            setattr(trainer, attribute, embedded)


def _import_reward_function(name: str) -> Callable[..., Any]:
    """Return the reward function of a name in ``trl.rewards`` or of an import path.

    Raises:
        ConfigError: it cannot be imported, or makes reward functions.
    """
    if name.startswith("get_") and "." not in name and name != "get_soft_overlong_punishment":
        raise ConfigError(f"reward_funcs: {name} makes a reward function. Call it in a file, and name its result")
    try:
        function: Callable[..., Any] = pkgutil.resolve_name(name if "." in name else f"trl.rewards.{name}")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"reward_funcs: {name} cannot be imported, {error}. Check the path") from error
    if name == "get_soft_overlong_punishment":
        function = function(max_completion_len=1280, soft_punish_cache=256)  # as TRL's script does
    return function
