"""Stops that are texts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.training.tiny import tokenizer as byte_level
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from shardwise.bank.sampling import SampledSequence, SampleOutput
from shardwise.serve.messages import cut_at_stops


def byte_fallback() -> Any:
    """One token for each byte. Where the bytes so far are incomplete, each of them is U+FFFD."""
    backend = Tokenizer(models.BPE(vocab={f"<0x{byte:02X}>": byte for byte in range(256)}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZERS = {"level": byte_level(), "fallback": byte_fallback()}
TEXTS = st.text("aé€😀", max_size=8)


def tokens_of(kind: str, text: str) -> list[int]:
    tokens: list[int] = TOKENIZERS["level"].encode(text, add_special_tokens=False)
    return list(text.encode()) if kind == "fallback" else tokens


def cut(kind: str, tokens: list[int], stops: list[str]) -> tuple[list[int], str]:
    sequence = SampledSequence(list(tokens), [0.0] * len(tokens))
    cut_at_stops(TOKENIZERS[kind], SampleOutput([sequence]), stops)
    assert len(sequence.logprobs) == len(sequence.tokens)
    return sequence.tokens, sequence.stop_reason


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=TEXTS, missing=st.integers(0, 3), stops=st.lists(st.text("aé€😀", min_size=1, max_size=3), max_size=3))
def test_a_sequence_ends_with_the_first_token_that_completes_a_stop(
    kind: str, text: str, missing: int, stops: list[str]
) -> None:
    tokens = tokens_of(kind, text)
    tokens = tokens[: max(len(tokens) - missing, 0)]  # the last character may be incomplete
    decode = TOKENIZERS[kind].decode
    expected = tokens, "length"
    if any(stop in decode(tokens) for stop in stops):
        ends = range(1, len(tokens) + 1)
        length = next(end for end in ends if any(stop in decode(tokens[:end]) for stop in stops))
        expected = tokens[:length], "stop"
    assert cut(kind, tokens, stops) == expected


def test_a_stop_in_a_long_sequence_takes_few_decodings(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, lengths = tokens_of("level", "a" * 3000 + "é" + "a" * 3000), []
    decode = TOKENIZERS["level"].decode

    def count(ids: list[int]) -> str:
        lengths.append(len(ids))
        return str(decode(ids))

    monkeypatch.setattr(TOKENIZERS["level"], "decode", count)
    assert cut("level", tokens, ["é"]) == (tokens[:3002], "stop")
    assert len(lengths) < 20
