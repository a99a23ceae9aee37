"""Texts as tokens word by word: what the tokenizer makes of the whole text, and of which characters, to the bit."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.training import shipped, tiny
from tests.training.test_chat_templates import ROWS
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import BertTokenizer, PreTrainedTokenizerFast

from shardwise.training.texts import masking
from shardwise.training.texts.masking import Encoder
from shardwise.training.texts.rows import Chat, Completion, Row, RowFault, Text, row_of
from shardwise.training.texts.token_spans import tokenise, tokens_within
from shardwise.training.texts.word_tokens import WordTokens

END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K += (
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
DEEPSEEK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
DEEPSEEK += (
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"  # with line breaks as such, as its file has them
)
PATTERNS: dict[str, tuple[str, ...]] = {
    "qwen2": (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + END,),
    "llama3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + END,
    ),
    "qwen3.5": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + END,
    ),
    "gpt-oss": (O200K + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + END,),
    "mistral": (O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + END,),
    "deepseek": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        DEEPSEEK,
    ),
}
KINDS = [*PATTERNS, "gpt2", "digits, gpt2", "nothing"]
CORPUS = ["foo  bar\n\n  baz", "a.\n\nB 12/34 x", "it's ok, it'S\n", ") (\n\t", "é中文 ー", "  \n   foo.\n- bar\n"]


def byte_level(**asked: Any) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, **asked)


def stages(kind: str) -> Any:
    if kind == "nothing":
        return byte_level(use_regex=False)
    if kind == "gpt2":
        return byte_level()
    if kind == "digits, gpt2":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()])
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[kind]]
    return pre_tokenizers.Sequence([*splits, byte_level(use_regex=False)])


@lru_cache(maxsize=32)
def tokenizer(kind: str, trim: str = "", template: str = tiny.UNMARKED) -> PreTrainedTokenizerFast:
    """A tokenizer that has merges of whatever its patterns leave together; added tokens of every kind."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = stages(kind) if kind != "nothing" else byte_level()
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[tiny.PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS * 9, trainer)
    made.pre_tokenizer = stages(kind)
    special = {tiny.START, tiny.END, *shipped.specials(template)}
    made.add_special_tokens(sorted(special))
    made.add_tokens([AddedToken("<th>", normalized=False)])
    if kind in ("mistral", "digits, gpt2"):
        made.add_tokens([AddedToken("   ", normalized=True), AddedToken("\n ", normalized=True)])
    if kind in ("llama3", "gpt2"):
        made.add_tokens([AddedToken("th>", normalized=True), AddedToken("BAR", normalized=False)])
    made.normalizer = normalizers.NFC()
    if trim:
        made.post_processor = processors.ByteLevel(
            trim_offsets=trim != "kept", add_prefix_space=trim == "prefix, trimmed", use_regex=False
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=tiny.END, pad_token=tiny.PAD, chat_template=template
    )


BLANKS = [
    *("\u00a0", "\u2028", "\u3000", "\x1c", "\x1f", "\x0b", "\x85", "\u200b"),
    *" \t\r\n",
    "  ",
    "\n\n",
    "\r\n",
]
SAID = ["a", "B", "foo", " foo", "BAR", "'s", "'S", "1", "1234", ".", ") (", "/", "//", "-", "_", "Ab.\n", "\n- x"]
OTHERS = [
    "\u00e9",
    "e\u0301",
    "\u0301",
    "\u4e2d\u6587",
    "\u30fc",
    "\u0378",
    "\x00",
    "\U0001f4a5",
    "\u017f",
    "\u00b2",
]
ADDED = ["   ", tiny.START, tiny.END, "<|", "<", "<th>", "th>"]
pieces = st.sampled_from([*BLANKS, *SAID, *OTHERS, *ADDED])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=400)
@given(
    parts=st.lists(pieces, max_size=14),
    ends=st.lists(st.integers(0, 60), max_size=6),
    trim=st.sampled_from(["", "kept", "trimmed", "prefix, trimmed"]),
)
@example(parts=["foo", "  ", "1"], ends=[], trim="")
@example(parts=[".", "\n\n", "a", ".", "\n", "/", "a"], ends=[3, 4], trim="")
@example(parts=["a", "\n\n", "foo", "\n", "  ", "foo"], ends=[0, 3, 6, 9], trim="trimmed")
@example(parts=[".", "\n", " ", "/"], ends=[], trim="")
@example(parts=[" ", " ", "th>"], ends=[], trim="")
@example(parts=["1", "  ", "BAR"], ends=[], trim="")
def test_words_are_the_whole_text(kind: str, parts: list[str], ends: list[int], trim: str) -> None:
    made = tokenizer(kind, trim)
    words = WordTokens.of(made)
    assert words is not None
    text = "".join(parts)
    at = sorted(min(end, len(text)) for end in ends)
    spans = list(zip(at[::2], at[1::2], strict=False))
    [whole] = tokenise(made, [text], add_special_tokens=False)
    assert not isinstance(whole, ValueError)
    asked = tokens_within(made, text, whole, spans)
    for _ in range(2):  # once tokenised, once kept
        [bare], [found] = words.tokenise([text], [[]]), words.tokenise([text], [spans])
        assert bare is not None
        assert bare[0].tolist() == whole.ids.tolist()
        if found is not None:  # else it has to be asked as it was here
            assert found[0].tolist() == whole.ids.tolist()
            assert found[1].tolist() == asked.tolist()
        assert found is not None or trim or "\u0301" in text


def changed(**settings: Any) -> PreTrainedTokenizerFast:
    """A tokenizer as of Qwen2, but for what is changed in its description."""
    described = json.loads(tokenizer("qwen2").backend_tokenizer.to_str())
    for place, value in settings.items():
        *names, last = place.split("__")
        inner = described
        for name in names:
            inner = inner[int(name) if name.isdigit() else name]
        inner[last] = value
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)))


def added(content: str, **asked: bool) -> PreTrainedTokenizerFast:
    described = json.loads(tokenizer("qwen2").backend_tokenizer.to_str())
    described["added_tokens"][-1] |= {"content": content, **asked}
    described["model"]["vocab"] |= {content: described["added_tokens"][-1]["id"]}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)))


SPLIT = "pre_tokenizer__pretokenizers__0"
QWEN2 = PATTERNS["qwen2"][0]


def test_what_is_not_understood_is_not_cut() -> None:
    assert WordTokens.of(changed()) is not None
    for other in (
        changed(**{f"{SPLIT}__pattern": {"Regex": QWEN2.replace(r" ?[^\s", r" ?[^")}}),
        changed(**{f"{SPLIT}__pattern": {"Regex": r"[a-z ]+|" + QWEN2}}),
        changed(**{f"{SPLIT}__pattern": {"Regex": QWEN2.removesuffix(r"|\s+")}}),
        changed(**{f"{SPLIT}__pattern": {"String": " "}}),
        changed(**{f"{SPLIT}__behavior": "MergedWithNext"}),
        changed(**{f"{SPLIT}__invert": True}),
        changed(pre_tokenizer__pretokenizers__1__add_prefix_space=True),
        changed(pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}),
        changed(pre_tokenizer=None),
        changed(normalizer={"type": "Lowercase"}),
        changed(
            normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "x"}]}
        ),
        changed(model__dropout=0.5),
        added("<t>", lstrip=True),
        added("<t>", rstrip=True),
        added("<t>", single_word=True),
        added("a b"),
        added(" a"),
        added("\n", normalized=False),
        BertTokenizer(vocab={"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "[MASK]": 4, "a": 5}),
    ):
        assert WordTokens.of(other) is None
    across = tokenizer("nothing").backend_tokenizer.to_str().replace('"model":{', '"model":{', 1)
    described = json.loads(across)
    described["model"]["vocab"] |= {"aĠ": 9999}
    described["model"]["merges"] += [["a", "Ġ"]]
    merging = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)))
    assert WordTokens.of(merging) is None
    [row] = Encoder(merging).encode_many([Text(1, "a b")])
    assert not isinstance(row, RowFault)
    assert row[0].tokens.tolist()[0] == 9999


def test_a_tokenizer_that_does_more_than_others_is_asked() -> None:
    class Own(PreTrainedTokenizerFast):
        def __call__(self, text: Any, *given: Any, **asked: Any) -> Any:
            return super().__call__([each.upper() for each in text], *given, **asked)

    own = Own(tokenizer_object=tokenizer("qwen2").backend_tokenizer)
    assert WordTokens.of(own) is None
    split = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer("qwen2").backend_tokenizer, split_special_tokens=True
    )
    assert WordTokens.of(split) is None


def test_what_others_ask_of_the_tokenizer_meanwhile_is_nothing_to_it() -> None:
    made = changed()
    made.pad_token = tiny.PAD
    encoder = Encoder(made)
    rows = [Text(1, "foo bar foo " * 3), Completion(2, "x y", "z foo")]
    before = [
        [one.tokens.tolist() for one in row] for row in encoder.encode_many(rows) if not isinstance(row, RowFault)
    ]
    made(["foo"], truncation=True, max_length=1, padding="max_length")
    rows = [Text(1, "new words, long" * 3)]
    [found] = encoder.encode_many(rows)
    [expected] = Encoder(changed()).encode_many(rows)
    assert not isinstance(found, RowFault)
    assert not isinstance(expected, RowFault)
    assert found[0].tokens.tolist() == expected[0].tokens.tolist()
    assert len(before) == 2


def test_more_words_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.training.texts.word_tokens._MOST", 5)
    made = tokenizer("qwen2")
    words = WordTokens.of(made)
    assert words is not None
    for text in ("a b c", "a b d e f", "g " + "x" * 99 + " a", "", "a " * 40):
        [found] = words.tokenise([text], [[(0, len(text))]])
        assert found is not None
        assert found[0].tolist() == made(text, add_special_tokens=False)["input_ids"]
        assert found[1].all()
        assert found[1].flags.writeable


def test_a_text_that_the_tokenizer_refuses_is_one_text_of_many() -> None:
    words = WordTokens.of(tokenizer("qwen2"))
    assert words is not None
    first, second, third = words.tokenise(["a b", "c \ud800 d", "c d"], [[], [], []])
    assert second is None
    assert first is not None
    assert third is not None


@pytest.mark.skipif(shipped.folder() is None, reason="TRL, which ships the templates, is not installed")
@pytest.mark.parametrize("kind", ["llama3", "deepseek", "gpt2"])
def test_rows_by_words_are_the_rows_by_whole_texts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all templates that are known, and all kinds of rows: tokens, and which of them are learned."""
    by_words = 0
    rows: list[Row] = [row_of(number, row) for number, row in enumerate(ROWS.values(), start=1)]
    said: Any = tiny.chat("Hi,\n\n  you ", " Ho.\n- one\n  - two\n", "\nfoo  bar", "it's 1234\n\n中文 é ")[
        "messages"
    ]
    rows += [Chat(90, tuple(said)), Text(91, "foo  bar\n"), Completion(92, "a: ", " b\n")]
    for number, name in enumerate(shipped.names()):
        made = tokenizer(kind, ("", "trimmed")[number % 2], shipped.text(name))
        found = Encoder(made).encode_many(rows)
        with monkeypatch.context() as patched:
            patched.setattr(masking.WordTokens, "of", lambda tokenizer: None)
            expected = Encoder(made).encode_many(rows)
        for one, other in zip(found, expected, strict=True):
            if isinstance(one, RowFault) or isinstance(other, RowFault):
                assert one == other
                continue
            for ours, theirs in zip(one, other, strict=True):
                assert np.array_equal(ours.tokens, theirs.tokens)
                assert np.array_equal(ours.supervised, theirs.supervised)
                by_words += 1
    assert by_words > 300
