"""Published configurations of TRL on tiny models and rows. ``python -m tests.training.published CORPUS.jsonl``.

A line of the corpus is ``{"id": ..., "method": ..., "config": {...}}``. Names of models, rows and accounts and
sizes that take hours are replaced; every other key is as it was published. The losses of one rank and of two must
be equal, and those of TRL alone where it reads the file's rows itself. So must the norms of the gradients be: the
loss of GRPO is 0 where the policy that sampled is the one that is trained.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from tests.support.world import run_forked as run_world
from tests.training import on_ranks, tiny
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.core.errors import ConfigError
from shardwise.training.run_config import read_run_config

FOLDER = Path(__file__).with_name("published")

FAMILIES = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "llama": "llama",
    "mistral": "mistral",
    "gemma": "gemma2",
    "olmo": "olmo2",
    "smollm3": "smollm3",
    "smollm": "llama",
    "deepseek": "qwen2",
    "starcoder": "starcoder2",
}
"""Model types by the beginning of a masked name, such as ``<qwen2.5>``."""

UNRUN = ("use_liger_kernel", "use_liger", "use_liger_loss", "use_vllm", "torch_compile")
"""Keys of engines, kernels and compilers, which are checked (``test_run_config.py``) and not run."""

ROWS_A_STEP = 4


def write_family(folder: Path, model_type: str) -> Path:
    """Write a tiny model of a type, with the tokenizer and template of ``tiny``."""
    target = folder / model_type
    if not target.exists():
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 260,
            "hidden_size": 64,  # a block of 4-bit weights
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "head_dim": 16,
        }
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
        tokens = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.1}
        config = AutoConfig.for_model(model_type, **sizes, **heads, **tokens)
        AutoModelForCausalLM.from_config(config).save_pretrained(target)
        tiny.tokenizer().save_pretrained(target)
    return target


def write_rows(folder: Path) -> None:
    """Write a dataset of each format, with a split to train and one to test."""
    on_ranks.prepare(folder)
    for name in ("chats", "pairs", "prompts"):
        dataset = folder / name
        dataset.mkdir()
        text = (folder / f"{name}.jsonl").read_text("utf-8")
        for split in ("train", "test"):
            (dataset / f"{split}.jsonl").write_text(text, "utf-8")
    problems = [{"problem": f"What is {n}?", "solution": str(n)} for n in range(24)]
    (folder / "problems").mkdir()
    for split in ("train", "test"):
        tiny.write_rows(folder / "problems" / f"{split}.jsonl", *problems)


def adapt(published: dict[str, Any], method: str, folder: Path) -> dict[str, Any]:
    """Return the configuration with a tiny model, tiny rows, three steps, and no account."""
    values = {key: value for key, value in published.items() if key not in UNRUN}
    family = str(values.get("model_name_or_path", "")).strip("<>")
    model_type = next((kind for name, kind in FAMILIES.items() if family.startswith(name)), "qwen3")
    rows = folder / {"sft": "chats", "grpo": "prompts"}.get(method, "pairs")
    if "dataset_prompt_column" in values:
        rows, values["dataset_prompt_column"] = folder / "problems", "problem"
    if "dataset_mixer" in values:
        shares = values["dataset_mixer"].values()
        values["dataset_mixer"] = {str(rows) + "/" * number: share for number, share in enumerate(shares)}
        values["dataset_splits"] = ["train", "test"][: len(values.get("dataset_splits") or ("train",))]
        values.pop("dataset_configs", None)
    elif "dataset_mixture" in values:
        for entry in values["dataset_mixture"]["datasets"]:
            entry |= {"id": str(rows), "split": "train", "columns": None}
            entry.pop("config", None)
    else:
        values["dataset_name"] = str(rows)
        for key in ("dataset_config", "dataset_train_split", "dataset_test_split", "datasets", "dataset_configs"):
            values.pop(key, None)
    replaced = {
        "model_name_or_path": str(write_family(folder, model_type)),
        "max_steps": 3,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "logging_strategy": "steps",
        "bf16": False,
        "fp16": False,
        "tf32": None,
        "report_to": "none",
        "push_to_hub": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "do_eval": False,
        "disable_tqdm": True,
        "load_best_model_at_end": False,
        "dataloader_num_workers": 0,
        "dataset_num_proc": None,
        "gradient_accumulation_steps": min(int(values.get("gradient_accumulation_steps", 1)), 2),
    }
    if method == "grpo":
        replaced |= {"reward_funcs": ["tests.training.on_ranks.letters"], "reward_weights": [1.0]}
        replaced |= {"num_generations": 2, "max_completion_length": 8}
        replaced["gradient_accumulation_steps"] = 1
        if "mask_truncated_completions" in values:  # all are
            replaced["mask_truncated_completions"] = False
    if "dataset_mixer" in values or "dataset_mixture" in values:  # shares of few rows: a last batch is not whole
        replaced["gradient_accumulation_steps"] = 1
    if "lora_dropout" in values:  # ranks draw masks of their own
        replaced["lora_dropout"] = 0.0
    targets = values.get("lora_target_modules")
    if isinstance(targets, list):  # TRL of today refuses a LoRA of the head
        replaced["lora_target_modules"] = [name for name in targets if name != "lm_head"]
    for key in ("max_length", "max_seq_length"):
        if key in values:
            replaced[key] = 64
    for sized in (values, values.get("dataset_mixture", {})):
        if "test_split_size" in sized:
            sized["test_split_size"] = 2
    for key in ("evaluation_strategy", "preprocessing_num_workers", "system_prompt", "chat_template"):
        values.pop(key, None)
    if "system_prompt" in published and method == "grpo":
        replaced["system_prompt"] = "Think."
    if "chat_template" in published:
        replaced["chat_template"] = tiny.MARKED
    for key in ("dtype", "torch_dtype"):
        if key in values:
            replaced[key] = "float32"
    if "flash" in str(values.get("attn_implementation")):
        replaced["attn_implementation"] = "sdpa"
    values.pop("use_flash_attention_2", None)
    if "8bit" in str(values.get("optim")):
        replaced["optim"] = "adamw_torch"
    return {**values, **replaced}


def run(values: dict[str, Any], method: str, folder: Path) -> dict[str, list[float]]:
    """Train on one rank, on two, and by TRL if it reads such rows; the losses, and norms of gradients of ours."""
    losses: dict[str, list[float]] = {}
    norms: dict[str, list[float]] = {}
    for ranks in (1, 2):
        file = folder / f"{ranks}.yaml"
        sized = {
            **values,
            "per_device_train_batch_size": ROWS_A_STEP // ranks,
            "output_dir": str(folder / f"out{ranks}"),
        }
        file.write_text(yaml.safe_dump(sized), "utf-8")
        found = run_world(ranks, on_ranks.train_file, method, str(file))
        losses[f"{ranks} ranks"], norms[f"gradients on {ranks} ranks"] = found[0]
    scripts = {"dataset_mixer", "dataset_mixture", "dataset_prompt_column", "system_prompt", "chat_template"}
    if not scripts & values.keys() and not values.get("use_peft"):
        config = read_run_config([method, str(folder / "1.yaml")])
        today = {**config.values, "method": method, "dataset_name": f"{values['dataset_name']}/train.jsonl"}
        today["output_dir"] = str(folder / "theirs")
        [losses["TRL"]] = run_world(1, on_ranks.by_trl, today)
    return losses | norms


def find_differences(found: dict[str, list[float]]) -> list[str]:
    """Return what differs from one rank: losses by more than 1e-5, norms of gradients by more than 1e-4 of them."""
    differences = []
    for name, others in found.items():
        is_norm = name.startswith("gradients")
        one = found["gradients on 1 ranks" if is_norm else "1 ranks"]
        bounds = [1e-4 * number + 1e-6 if is_norm else 1e-5 for number in one]
        pairs = zip(one, others, bounds, strict=True)
        if len(one) != 3 or not all(abs(number - other) <= bound for number, other, bound in pairs):
            differences.append(name)
    return differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=45)
    parser.add_argument("--ids", type=int, nargs="*", help="of these only those")
    parser.add_argument("--dir", type=Path, required=True, help="an empty folder")
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.corpus.read_text("utf-8").splitlines()]
    passing = [line for line in lines if passes(line["config"], line["method"], arguments.dir)]
    write_rows(arguments.dir)
    failed = 0
    for line in random.Random(arguments.seed).sample(passing, arguments.count):
        if arguments.ids and line["id"] not in arguments.ids:
            continue
        folder = arguments.dir / str(line["id"])
        folder.mkdir()
        try:
            found = run(adapt(line["config"], line["method"], arguments.dir), line["method"], folder)
            result: dict[str, Any] = {**found, "differs": find_differences(found)}
        except Exception as error:
            result = {"differs": True, "error": str(error)[-600:]}
        failed += bool(result["differs"])
        sys.stdout.write(json.dumps({"id": line["id"], "method": line["method"], **result}) + "\n")
        sys.stdout.flush()
    sys.exit(failed > 0)


def passes(config: dict[str, Any], method: str, folder: Path) -> bool:
    """Return whether a published configuration passes the check of keys, without those of ``UNRUN``."""
    file = folder / "check.yaml"
    values = {key: value for key, value in config.items() if key not in UNRUN}
    if "dataset_splits" in values:  # masked
        values["dataset_splits"] = ["train", "test"][: len(values["dataset_splits"])]
    file.write_text(yaml.safe_dump(values), "utf-8")
    try:
        read_run_config([method, str(file)])
    except ConfigError:
        return False
    return True


if __name__ == "__main__":
    main()
