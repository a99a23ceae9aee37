"""Files of ``shardwise train``: against TRL's own script, ended and called again, with states of 8 bits."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.world import run_forked as run_world
from tests.training import tiny
from tests.training.on_ranks import by_command, by_script, initial_adapter, prepare, write_vision, write_wide

ROOT = Path(__file__).parents[2]
TORCHAO = Path(sys.prefix, "peers", "torchao")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = prepare(tmp_path_factory.mktemp("commands"))
    (made / "chats").mkdir()
    tiny.write_chats(made / "chats" / "train.jsonl", 24)
    answers = [tiny.chat(f"What is {n}?", f"It is {n}.") for n in range(10, 18)]
    tiny.write_rows(made / "chats" / "test.jsonl", *answers)
    return made


def called(module: str, words: Sequence[str], place: Path, code: int = 0, **environment: str) -> str:
    """Run the command in a folder. Returns its errors and warnings, with ``--json`` with all but the outcome."""
    place.mkdir(exist_ok=True)
    paths = [str(ROOT), *filter(None, [environment.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", module, "train", *words],
        check=False,
        capture_output=True,
        text=True,
        cwd=place,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
    )
    assert done.returncode == code, done.stdout + done.stderr
    if "--json" in words:
        assert json.loads(done.stdout)["steps"]
        assert "'loss': " in done.stderr
    return done.stderr


def logged(place: Path, step: int, *keys: str) -> list[float]:
    """What the checkpoint of a step has in its log."""
    state = json.loads((place / "out" / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return [entry[key] for entry in state["log_history"] for key in keys if key in entry]


LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "assistant_only_loss": True}
STEPS = {"gradient_accumulation_steps": 2, "max_steps": 4, "save_steps": 4, "warmup_steps": 1, "max_grad_norm": 0.5}


@pytest.mark.parametrize("kind", ["full", "lora", "vision"])
def test_a_file_of_trl_s_script_trains_the_same_unchanged(folder: Path, kind: str) -> None:
    """TRL's in one process, ours on two ranks with as many rows a step. "vision": text, on a model for images."""
    given: dict[str, Any] = {"dataset_name": str(folder / "chats"), "seed": 7, **(LORA if kind == "lora" else {})}
    given["model_name_or_path"] = str(write_vision(folder) if kind == "vision" else folder / "model")
    adapter = folder / "first" if kind == "lora" else None
    if adapter is not None:
        run_world(1, initial_adapter, given, str(adapter))
    rows = {"per_device_train_batch_size": 4, "lr_scheduler_type": "cosine"}
    file = tiny.write_config(folder, kind, **rows, **STEPS, **EVALUATED, **given)
    run_world(1, by_script, file, folder / f"{kind}-trl", adapter)
    words = [str(file), "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "4"]
    run_world(2, by_command, words, folder / f"{kind}-ours")
    keys = ("loss", "eval_loss", "learning_rate")
    theirs, ours = (logged(folder / f"{kind}-{whose}", 4, *keys) for whose in ("trl", "ours"))
    assert len(theirs) == 4 + 2 + 4
    assert ours == pytest.approx(theirs, abs=1e-5)
    losses = logged(folder / f"{kind}-trl", 4, "loss")
    assert losses[0] - losses[-1] > 0.1


@pytest.mark.parametrize(
    ("method", "number", "code", "saved", "ranks"),
    [("sft", signal.SIGKILL, 2, 2, 3), ("dpo", signal.SIGTERM, 75, 4, 1)],
)
def test_a_lora_that_was_ended_resumes_on_other_ranks(
    folder: Path, method: str, number: signal.Signals, code: int, saved: int, ranks: int
) -> None:
    """As if it had never been ended, to 1e-5: losses and weights."""
    rows = {"sft": "chats.jsonl", "dpo": "pairs.jsonl"}[method]
    file = tiny.write_config(folder, method, dataset_name=str(folder / rows), max_steps=6, save_steps=2, **LORA)
    place, other = folder / method, folder / f"{method}-whole"

    def words(count: int) -> list[str]:
        return [method, str(file), "--per_device_train_batch_size", str(6 // count)]

    shown = {"TRANSFORMERS_VERBOSITY": "warning"}
    told = called(
        "tests.training.interrupted",
        [*words(2), "--nproc-per-node=2"],
        place,
        code,
        ENDED=f"1 4 {number.value}",
        **shown,
    )
    assert code == 75 or "rank 1" in told
    assert sorted(path.name for path in (place / "out").glob("checkpoint-*"))[-1] == f"checkpoint-{saved}"
    if ranks == 1:
        told += called("shardwise", [*words(1), "--json"], place, **shown)
    else:
        run_world(ranks, by_command, words(ranks), place)
    assert told.startswith("importing torch and TRL (about 10 s) ...\n")
    assert "FutureWarning" not in told
    assert "[transformers]" not in told
    run_world(1, by_command, words(1), other)
    assert len(set(logged(other, 6, "loss"))) == 6
    assert logged(place, 6, "num_tokens") == logged(other, 6, "num_tokens")
    assert logged(place, 6, "loss") == pytest.approx(logged(other, 6, "loss"), abs=1e-5)
    ours, expected = (load_file(there / "out" / "adapter_model.safetensors") for there in (place, other))
    assert all(torch.allclose(ours[name], expected[name], atol=1e-5) for name in expected)


@pytest.mark.skipif(not TORCHAO.is_dir(), reason="torchao is not installed. Run make .venv/project.")
def test_states_of_8_bits_train_on_two_ranks(folder: Path) -> None:
    """A shard that is no multiple of 256, and those that are small, stay in 32 bits, which is reported."""
    model = str(write_wide(folder))
    given = {"model_name_or_path": model, "max_steps": 4, "save_steps": 4, "learning_rate": "1e-3"}
    file = tiny.write_config(folder, "bits", **given)
    words = [str(file), "--per_device_train_batch_size", "2"]
    run_world(2, by_command, words, folder / "32-bits")
    words += ["--optim", "adamw_torch_8bit", "--nproc-per-node=2", "--json"]
    told = called("shardwise", words, folder / "8-bits", PYTHONPATH=str(TORCHAO), TORCHDYNAMO_DISABLE="1")
    assert "torchao's AdamW8bit: keeps 32 bits of " in told
    small = "such as model.embed_tokens.weight, whose shards have fewer than 4096 elements or no multiple of 256"
    assert small in told
    exact, reduced = (logged(folder / name, 4, "loss") for name in ("32-bits", "8-bits"))
    assert exact[0] - exact[-1] > 0.1
    assert reduced == pytest.approx(exact, abs=0.02)
    assert reduced != exact
