"""Texts as tokens, many at once, and which tokens are those of given characters.

[Note: Tokens of an answer] A token belongs to an answer if it has at least one character of it. Where an answer
begins or ends within a token, that token is therefore learned: without it the answer would lack what it begins or
ends with. Where a text is cut into the same tokens up to there and beyond, which is what special tokens see to,
this is exactly what is added to the tokens of the text before. The tokens of one character that takes several are
its own, all of them; white space that a tokenizer does not count to a token lies within what is around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as tokens, (tokens,), and what knows the characters of each; None where the tokenizer does not."""

    ids: NDArray[np.int32]
    encoding: Encoding | None


def tokenise(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool
) -> list[Tokens | ValueError]:
    """Each text as tokens, all in one call where the tokenizer takes all of them; else what is wrong with each."""
    if not texts:
        return []
    try:
        return list(_tokenise(tokenizer, texts, add_special_tokens=add_special_tokens))
    except Exception as error:  # whatever a tokenizer raises: of which text is found out below
        if len(texts) == 1:
            return [ValueError(f"the tokenizer refuses it ({error})")]
    return [tokenise(tokenizer, [text], add_special_tokens=add_special_tokens)[0] for text in texts]


def _tokenise(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool
) -> list[Tokens]:
    found = tokenizer(
        list(texts),
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    ids = [np.array(row, dtype=np.int32) for row in found["input_ids"]]
    encodings = found.encodings
    if encodings is None:
        return [Tokens(row, None) for row in ids]
    return [Tokens(row, encoding) for row, encoding in zip(ids, encodings, strict=True)]


def tokens_within(
    tokenizer: PreTrainedTokenizerBase, text: str, tokens: Tokens, spans: Sequence[tuple[int, int]]
) -> NDArray[np.bool_]:
    """Which tokens have a character of one of the spans, (tokens,); see [Note: Tokens of an answer]."""
    within = np.zeros(len(tokens.ids), dtype=np.bool_)
    for start, stop in spans:
        if tokens.encoding is None:
            first, last = _first_beyond(tokenizer, text, tokens, start), _last_before(tokenizer, text, tokens, stop)
        else:
            first, last = tokens_of(tokens.encoding, start, stop)
        within[first:last] = True
    return within


def tokens_of(encoding: Encoding, start: int, stop: int) -> tuple[int, int]:
    """The first token that ends behind ``start``, and one behind the last that begins before ``stop``."""
    found = (encoding.char_to_token(place) for place in range(start, stop))
    first = next((token for token in found if token is not None), None)
    backwards = (encoding.char_to_token(place) for place in range(stop - 1, start - 1, -1))
    last = next((token for token in backwards if token is not None), None)
    if first is None or last is None:
        return 0, 0
    # White space that is not counted to its token, and further tokens of one character.
    while first > 0 and (before := encoding.token_to_chars(first - 1)) is not None and before[1] > start:
        first -= 1
    while (
        last + 1 < len(encoding) and (behind := encoding.token_to_chars(last + 1)) is not None and behind[0] < stop
    ):
        last += 1
    return first, last + 1


def _first_beyond(tokenizer: PreTrainedTokenizerBase, text: str, tokens: Tokens, place: int) -> int:
    """The first token with a character at ``place`` or behind it, by the tokens of what is before."""
    return _shared(_beginning(tokenizer, text, place), tokens.ids)


def _last_before(tokenizer: PreTrainedTokenizerBase, text: str, tokens: Tokens, place: int) -> int:
    """One behind the last token with a character before ``place``."""
    before = _beginning(tokenizer, text, place)
    shared = _shared(before, tokens.ids)
    return shared + (shared < len(before))  # else the next one was cut


def _beginning(tokenizer: PreTrainedTokenizerBase, text: str, place: int) -> NDArray[np.int32]:
    if not place:
        return np.zeros(0, dtype=np.int32)
    return _tokenise(tokenizer, [text[:place]], add_special_tokens=False)[0].ids


def _shared(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many tokens two rows have in common at their beginning."""
    most = min(len(one), len(other))
    differing = np.flatnonzero(one[:most] != other[:most])
    return int(differing[0]) if len(differing) else most
