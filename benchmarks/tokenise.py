"""Chats as tokens, timed: rows per second of one process and of two, against tokenising row by row in one. ``python
-m benchmarks.tokenise``.

The peer is what shardwise did before: transformers' ``apply_chat_template`` for each row where the template marks
answers, and where it does not, twice for each answer, over all messages up to it. Both arms make the same tokens,
which is checked; of what is learned, the peer's answers by prefixes also have the white space behind their last
token. The words are few and made up, or, as "prose", paragraphs of Python's own documentation, code and all.
Encoders begin anew in each turn, with no word known; two processes are up, and have seen one block each, before the
clock starts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shardwise.training.data.encoding import EncodedBlock, Encoding
from shardwise.training.data.row_blocks import RowBlock
from shardwise.training.data.row_files import JsonLines
from shardwise.training.data.tokenising import EncoderPool
from shardwise.training.example import CHAT_TEMPLATE
from shardwise.training.texts.layouts import RowWords
from shardwise.training.texts.masking import Encoder
from shardwise.training.texts.rows import Chat, RowFault

UNMARKED = CHAT_TEMPLATE.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
WORDS = 60


def measure(rows: int, turns: int, repeats: int) -> dict[str, Any]:
    """Rows per second of both arms, in turns, and their ratio in each turn."""
    words, prose = made_chats(rows, turns), prose_chats(rows, turns)
    return {
        "rows": rows,
        "turns": turns,
        "arms": {
            "marks": _compare(words, CHAT_TEMPLATE, by_marks, repeats),
            "prefixes": _compare(words, UNMARKED, by_prefixes, repeats),
            "marks, prose": _compare(prose, CHAT_TEMPLATE, by_marks, repeats),
        },
    }


def _compare(
    chats: Sequence[Chat], template: str, peer: Callable[[Chat, PreTrainedTokenizerFast], list[int]], repeats: int
) -> dict[str, Any]:
    tokenizer = trained_tokenizer(chats, template)
    ours, twos, theirs = [], [], []
    for _ in range(repeats):
        encoder = Encoder(tokenizer)
        encoder.encode_many(chats[:1])
        start = time.perf_counter()
        made = encoder.encode_many(chats)
        between = time.perf_counter()
        expected = [peer(chat, tokenizer) for chat in chats]
        theirs.append(len(chats) / (time.perf_counter() - between))
        ours.append(len(chats) / (between - start))
        twos.append(_by_two(chats, Encoder(tokenizer), [token for tokens in expected for token in tokens]))
        for row, tokens in zip(made, expected, strict=True):
            if isinstance(row, RowFault) or [example.tokens.tolist() for example in row] != [tokens]:
                raise RuntimeError("the arms make different tokens")
    return {
        "tokens_per_row": statistics.mean(len(tokens) for tokens in expected),
        "rows_per_second": [round(value) for value in ours],
        "peer_rows_per_second": [round(value) for value in theirs],
        "ratio": [round(one / other, 2) for one, other in zip(ours, theirs, strict=True)],
        "two_processes": {
            "rows_per_second": [round(value) for value in twos],
            "ratio": [round(one / other, 2) for one, other in zip(twos, theirs, strict=True)],
        },
    }


def _by_two(chats: Sequence[Chat], encoder: Encoder, expected: list[int]) -> float:
    """Rows per second of two processes, from a file to arrays."""
    encoding = Encoding(encoder, RowWords(), 1 << 30)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "chats.jsonl")
        file.write_text("".join(json.dumps({"messages": chat.messages}) + "\n" for chat in chats))
        blocks = list(JsonLines(str(file)).blocks(64 << 10, encoding.words))
        pool = EncoderPool.started(2, encoding)
        if pool is None:
            raise RuntimeError("no process could be started")
        with pool:
            _answered(pool, blocks[:2])
            start = time.perf_counter()
            made = _answered(pool, blocks)
            seconds = time.perf_counter() - start
    if np.concatenate([made[number].tokens for number in range(len(blocks))]).tolist() != expected:
        raise RuntimeError("the arms make different tokens")
    return len(chats) / seconds


def _answered(pool: EncoderPool, blocks: Sequence[RowBlock]) -> dict[int, EncodedBlock]:
    made: dict[int, EncodedBlock] = {}
    given = 0
    while len(made) < len(blocks):
        while given < len(blocks) and pool.has_room:
            pool.give(given, blocks[given])
            given += 1
        made |= dict(pool.answers())
    return made


def by_marks(chat: Chat, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """One call of transformers for a row."""
    found: Any = tokenizer.apply_chat_template(
        [dict(message) for message in chat.messages],
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},
    )
    tokens: list[int] = found["input_ids"]
    return tokens


def by_prefixes(chat: Chat, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Each answer is what is added to the tokens of the messages before it and the prompt for it."""

    def templated(count: int, *, asks: bool) -> list[int]:
        found: Any = tokenizer.apply_chat_template(
            [dict(message) for message in chat.messages[:count]], add_generation_prompt=asks, return_dict=False
        )
        return list(found)

    whole = templated(len(chat.messages), asks=False)
    for index, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            before, after = templated(index, asks=True), templated(index + 1, asks=False)
            if after[: len(before)] != before or whole[: len(after)] != after:
                raise RuntimeError("the template does not write the beginning alike")
    return whole


def made_chats(rows: int, turns: int) -> list[Chat]:
    """Chats of words that nobody has said, each of so many questions and answers."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2000)]
    return [
        Chat(
            number,
            tuple(
                {"role": role, "content": " ".join(rng.choices(words, k=WORDS))}
                for _ in range(turns)
                for role in ("user", "assistant")
            ),
        )
        for number in range(1, rows + 1)
    ]


def prose_chats(rows: int, turns: int) -> list[Chat]:
    """The same of paragraphs of Python's documentation."""
    rng = random.Random(0)
    paragraphs = [part for topic in topics.topics.values() for part in topic.split("\n\n\n") if part.strip()]
    return [
        Chat(
            number,
            tuple(
                {"role": role, "content": rng.choice(paragraphs)[:600]}
                for _ in range(turns)
                for role in ("user", "assistant")
            ),
        )
        for number in range(1, rows + 1)
    ]


def trained_tokenizer(chats: Sequence[Chat], template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of these chats."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (message["content"] for chat in chats[:100] for message in chat.messages), trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokenise", description=__doc__)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(argv)
    print(json.dumps(measure(arguments.rows, arguments.turns, arguments.repeats), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
