"""Loops of tinker_cookbook, with unmodified source: ``python -m tests.serve.cookbook_loops URL FOLDER LOOPS``.

Replaced are the data sets, the tokenizer, and the reward, which a model with random weights never earns. FOLDER
gets what each loop logs, and ``errors.json`` with the tracebacks of those that raised.
"""

import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.peers import use_peers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PEERS = ("blobfile", "chz", "lxml", "pylatexenc", "termcolor", "tinker_cookbook", "urllib3")

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""The served name. The cookbook has a renderer for it."""

VOCAB_SIZE = 264
MAX_LENGTH = 768


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, with the tokens of the renderer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<think>", "</think>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=special
    )
    tokenizer.name_or_path = MODEL
    return tokenizer


def make_datasets() -> dict[str, Any]:
    from datasets import Dataset, DatasetDict

    def split(rows: list[dict[str, Any]]) -> Any:
        return DatasetDict({"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[:4])})

    chats = [
        [{"role": "user", "content": f"Is {number} a number?"}, {"role": "assistant", "content": "yes it is"}]
        for number in range(24)
    ]
    pairs = [f"\n\nHuman: Is {number} a number?\n\nAssistant: " for number in range(24)]
    return {
        "HuggingFaceH4/no_robots": split([{"messages": chat} for chat in chats]),
        "openai/gsm8k": split([{"question": f"What is {number}?", "answer": "#### 1"} for number in range(24)]),
        "Anthropic/hh-rlhf": split([{"chosen": f"{text}yes", "rejected": f"{text}no"} for text in pairs]),
    }


def get_reward(response: str, answer: str) -> float:
    """Return the share of ASCII characters, in place of a right answer."""
    return sum(letter.isascii() for letter in response) / max(len(response), 1)


def learn(url: str, folder: Path) -> None:
    from tinker_cookbook.recipes import sl_loop

    sl_loop.main(
        sl_loop.Config(
            base_url=url, log_path=str(folder), model_name=MODEL, batch_size=4, learning_rate=0.02, save_every=2
        )
    )


def reinforce(url: str, folder: Path) -> None:
    from tinker_cookbook.recipes import rl_loop

    rl_loop.get_reward = get_reward
    rl_loop.main(
        rl_loop.Config(
            base_url=url,
            log_path=str(folder),
            model_name=MODEL,
            batch_size=2,
            group_size=16,
            learning_rate=0.02,
            save_every=8,
            max_tokens=2,
            loss_fn="importance_sampling",
        )
    )


def prefer(url: str, folder: Path) -> None:
    from tinker_cookbook.recipes.preference.dpo import train

    train.cli_main(
        train.CLIConfig(
            base_url=url,
            log_path=str(folder),
            model_name=MODEL,
            batch_size=4,
            learning_rate=0.01,
            lr_schedule="constant",
            max_length=MAX_LENGTH,
        )
    )


def distill(url: str, folder: Path) -> None:
    """Learn from what ``learn`` has made."""
    from tinker_cookbook.distillation import train_off_policy
    from tinker_cookbook.distillation.datasets import TeacherConfig
    from tinker_cookbook.recipes.chat_sl.chat_datasets import NoRobotsBuilder
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

    last = (folder.parent / "learn" / "checkpoints.jsonl").read_text().splitlines()[-1]
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=MODEL, renderer_name="qwen3_instruct", max_length=MAX_LENGTH, batch_size=4
    )
    taught = train_off_policy.DatasetWithTeacher(
        dataset_builder=NoRobotsBuilder(common_config=common),
        teacher_config=TeacherConfig(base_model=MODEL, load_checkpoint_path=json.loads(last)["sampler_path"]),
    )
    config = train_off_policy.Config(
        base_url=url,
        log_path=str(folder),
        model_name=MODEL,
        recipe_name="off_policy",
        dataset_configs=[taught],
        learning_rate=0.02,
        n_teacher_targets=8,
        batch_size=4,
        save_every=3,
    )
    asyncio.run(train_off_policy.main(config))


LOOPS: dict[str, Callable[[str, Path], None]] = {
    each.__name__: each for each in (learn, reinforce, prefer, distill)
}


def main(url: str, folder: Path, names: list[str]) -> None:
    use_peers(*PEERS)
    import datasets
    from tinker_cookbook.tokenizer_utils import register_tokenizer

    found = make_datasets()
    datasets.load_dataset = lambda name, *_args, **_options: found[name]
    tokenizer = make_tokenizer()
    assert len(tokenizer) <= VOCAB_SIZE
    register_tokenizer(MODEL, lambda: tokenizer)
    errors = {}
    for name in names:
        try:
            LOOPS[name](url, folder / name)
        except Exception:
            errors[name] = traceback.format_exc()
    (folder / "errors.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
