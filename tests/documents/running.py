"""A page run from its first block to its last, on a rank: in a folder with what pages speak of."""

import contextlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.cli.running import RUNNER
from tests.documents.blocks import PAGES, Block, blocks_of, commands
from tests.documents.given import GIVEN

from shardwise.cli import main

NAMES = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B")
"""What pages call models; here one that is small enough."""

_SHELL = 'set -eu\nshardwise() { "$PYTHON" -m shardwise "$@"; }\npip() { :; }\n'

_FSDP = """\
distributed_type: FSDP
mixed_precision: "no"
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_reshard_after_forward: true}
"""


def prepare(folder: Path) -> None:
    """A base, a cache of the hub that has it under the names of pages, data, and a configuration."""
    import torch
    from small_model import CHATS, train_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = train_tokenizer(CHATS, 1024)
    torch.manual_seed(0)
    sizes = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen3Config(**sizes, **heads, **tokens, max_position_embeddings=512)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    commit = "0" * 40
    for name in NAMES:
        repository = folder / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(commit)
        (repository / "snapshots").mkdir()
        (repository / "snapshots" / commit).symlink_to(folder / "base")
    lines = CHATS.read_text("utf-8").splitlines()[:24]
    for file in ("chats.jsonl", "held-out.jsonl", "ada.jsonl", "bob.jsonl"):
        (folder / file).write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text("model_name_or_path: base\ndataset_name: chats.jsonl\noutput_dir: out\n")
    (folder / "fsdp.yaml").write_text(_FSDP)


def run_page(name: str, prepared: str, folder: str, shell: Literal["run", "leave"]) -> list[str]:
    """Run the blocks of a page one after the other, as one program. What was run, by kind."""
    import torch.distributed as dist
    from huggingface_hub import constants

    [page] = [page for page in PAGES if page.name == name]
    place = Path(folder)
    shutil.copytree(prepared, place, symlinks=True, dirs_exist_ok=True)
    names: dict[str, Any] = {"__name__": "__main__"}
    before, ran, told = os.getcwd(), [], io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(told):
        patch.setattr(constants, "HF_HUB_CACHE", str(place / "hub"))
        patch.setattr(dist, "init_process_group", lambda *given, **others: None)  # there is one
        patch.setenv("HF_HUB_CACHE", str(place / "hub"))
        patch.chdir(place)
        try:
            for block in blocks_of(page):
                if _run(block, names, shell):
                    ran.append(block.kind)
        finally:
            os.chdir(before)
            _forget()
    return ran


def _run(block: Block, names: dict[str, Any], shell: Literal["run", "leave"]) -> bool:
    if block.title is not None:
        Path(block.title).write_text(block.code)
    if block.why_not_run is not None:
        return False
    if given := GIVEN.get(block.page, {}).get(block.number):
        exec(compile(given, f"given to {block}", "exec"), names)
    if block.kind == "python":
        exec(compile(block.code, str(block), "exec"), names)
        return True
    if block.kind == "sh" and shell == "run":
        calls = [shlex.split(line, comments=True) for line in commands(block.code)]
        if all(call[0] == "shardwise" and call[1] != "train" for call in calls):
            for _, *words in calls:  # here, where all is imported
                result = RUNNER.invoke(main, words, catch_exceptions=False)
                assert result.exit_code == 0, f"{block}:\n{block.code}\n{result.output}"
            return True
        environment = {**os.environ, "PYTHON": sys.executable}
        command = ["bash", "-c", _SHELL + block.code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{block}:\n{block.code}\n{done.stdout}\n{done.stderr}"
        return True
    if block.kind == "json":
        json.loads(block.code)
    return False


def _forget() -> None:
    """accelerate keeps what it was told, for the process."""
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
