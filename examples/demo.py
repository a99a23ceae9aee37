"""A training of a small model that is killed, resumed on another number of ranks, saved and loaded."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import yaml

import shardwise
from shardwise.cli.launch import read_launch
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.ranks.processes import run_spawned

QUESTIONS = ("What color is grass?", "What is the capital of France?", "How many legs does a spider have?")

_MARK = ".made-by-shardwise-demo"
_ROWS_PER_STEP = 16
_STEPS = 90
_SAVE_STEPS = 30
_QUIET: Final = {"PYTHONWARNINGS": "ignore", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
_TIMEOUT_S = 3600


@click.command()
@click.option("--out", default="demo-out", show_default=True, type=click.Path(path_type=Path), help="A folder.")
@click.option("--steps", default=_STEPS, show_default=True, type=click.IntRange(2), help="Steps of the training.")
def main(*, out: Path, steps: int) -> None:
    """Create a small model, train it on two ranks, kill them, resume on one rank, save the model, and load it.

    Needs no network, no GPU and no model: everything is created in the folder OUT, in about a minute.
    """
    begun = time.monotonic()
    try:
        if read_launch(os.environ) is not None:
            raise ConfigError("demo: starts its ranks itself. Run it without torchrun.")
        prepare_folder(out)
        faults = run_demo(out, steps)
    except ShardwiseError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"\n{'failed' if faults else 'done'} in {time.monotonic() - begun:.0f} s; everything is in {out}")
    for fault in faults:
        click.echo(f"error: {fault}", err=True)
    sys.exit(1 if faults else 0)


def run_demo(out: Path, steps: int) -> list[str]:
    """Run all parts of the demo. Return failures."""
    print_heading("1. A small Qwen3 with random weights and its tokenizer, written by transformers")
    import small_model as example

    tokenizer = example.train_tokenizer(example.CHATS, 1024)
    written = example.write_model(out / "start", tokenizer, seed=0)
    click.echo(f"   {written.parameters:,} parameters in {len(written.files)} safetensors files")
    config, every = write_config(out, steps), min(_SAVE_STEPS, steps - 1)

    print_heading(f"2. shardwise train on 2 ranks, killed after the checkpoint of step {every}")
    train_and_kill(train_command(config, 2, *rows_of(2)), out / "trained" / f"checkpoint-{every}")
    click.echo(f"   killed; checkpoint-{every} is complete")

    print_heading("3. The same command on 1 rank: resumes, and saves the model")
    done = finish(train_command(config, 1, *rows_of(1)))

    print_heading("4. The saved model, read again and compared with the checksums of the save")
    verified = finish([sys.executable, "-m", "shardwise", "verify", str(out / "trained")])

    print_heading("5. The same model on 2 ranks and by transformers in one process, compared bit by bit")
    differing = sorted(set().union(*run_spawned(2, differing_tensors, str(out / "trained"))))
    click.echo(f"   on 2 ranks: {f'{len(differing)} tensors differ' if differing else 'bitwise equal'}")
    different = f"on 2 ranks {', '.join(differing)} differ from transformers'" if differing else ""

    print_heading("6. The trained model, loaded by transformers, answers")
    model, _ = example.load_by_transformers(str(out / "trained"))
    for question in QUESTIONS:
        click.echo(f"   {question} {example.answer(model, tokenizer, question)}")
    return [fault for fault in (done, verified, different) if fault]


def differing_tensors(folder: str) -> list[str]:
    """Return the names of tensors that differ from transformers'. Runs on a rank."""
    import torch
    from transformers import AutoModelForCausalLM

    state = shardwise.get_model_state_dict(shardwise.from_pretrained(folder), "full_on_all_ranks")
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert state.keys() <= expected.keys()
    return [name for name, tensor in state.items() if not torch.equal(tensor, expected[name])]


def write_config(out: Path, steps: int) -> Path:
    """Write the configuration of the training."""
    file = out / "config.yaml"
    values = {
        "model_name_or_path": str(out / "start"),
        "dataset_name": str(Path(__file__).resolve().parent / "small_model" / "chats.jsonl"),
        "output_dir": str(out / "trained"),
        "assistant_only_loss": True,
        "max_length": 128,
        "max_steps": steps,
        "learning_rate": 2.0e-3,
        "warmup_steps": 0.1,
        "save_steps": min(_SAVE_STEPS, steps - 1),
        "logging_steps": 10,
        "gradient_checkpointing": False,
        "bf16": False,
        "disable_tqdm": True,
        "report_to": "none",
    }
    file.write_text(yaml.safe_dump(values, sort_keys=False), "utf-8")
    return file


def rows_of(ranks: int) -> list[str]:
    """Return the key that keeps the rows of a step on another number of ranks."""
    return ["--per_device_train_batch_size", str(_ROWS_PER_STEP // ranks)]


def train_command(config: Path, ranks: int, *keys: str) -> list[str]:
    """Print a call of ``shardwise train``, and return it."""
    arguments = ["train", str(config), "--nproc-per-node", str(ranks), *keys]
    click.echo(f"   shardwise {' '.join(arguments)}")
    return [sys.executable, "-m", "shardwise", *arguments]


def train_and_kill(command: Sequence[str], checkpoint: Path) -> None:
    """Run a training until it has a checkpoint, and kill all of its processes.

    Raises:
        ConfigError: it ends without a checkpoint.
    """
    with subprocess.Popen(command, start_new_session=True, env={**os.environ, **_QUIET}) as process:
        try:
            end = time.monotonic() + _TIMEOUT_S
            while not (checkpoint / "shardwise.trainer.json").exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise ConfigError(f"demo: the training ended without {checkpoint}. See what it printed.")
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def finish(command: Sequence[str]) -> str:
    """Run a command to its end. Return the failure, or ""."""
    code = subprocess.run(command, check=False, timeout=_TIMEOUT_S, env={**os.environ, **_QUIET}).returncode
    return f"{' '.join(command[2:])}: has ended with exit code {code}" if code else ""


def print_heading(text: str) -> None:
    """Print the heading of a part of a demo."""
    click.echo(f"\n{text}")


def prepare_folder(out: Path) -> None:
    """Make an empty folder for the demo, removing the files of an earlier demo.

    Raises:
        ConfigError: the folder has other files, or cannot be written.
    """
    mark = out / _MARK
    try:
        if out.is_dir() and any(out.iterdir()) and not mark.is_file():
            raise ConfigError(f"{out}: is not empty, and not of an earlier demo. Give another folder with --out.")
        out.mkdir(parents=True, exist_ok=True)
        mark.touch()
        for made in ("start", "trained"):
            shutil.rmtree(out / made, ignore_errors=True)
        (out / "start").mkdir()
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written, {error.strerror or error}. Give another --out.") from error


if __name__ == "__main__":
    main()
