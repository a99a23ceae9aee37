"""Texts as tokens, word by word: each word is tokenised once, and its tokens are kept.

What a word is, and why the tokens of words are those of the text, is said in ``word_cuts`` ([Note: Words]). In a
chat most words have been seen before. The tokenizer is asked for those that are new, of many texts at once, and for
no text as a whole; which characters a token has is asked only where an answer begins or ends within a word.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from shardwise.training.texts.token_spans import tokens_of
from shardwise.training.texts.word_cuts import WordCuts, cuts_of

Span: TypeAlias = tuple[int, int]

_MOST: Final = 1 << 17
"""So many words are kept, about 20 MB; then all are forgotten."""
_LONGEST: Final = 64
"""Characters of what is kept."""
_ID_BYTES: Final = 4


class WordTokens:
    """Tokens of texts by one tokenizer, as long as nobody changes that."""

    def __init__(self, tokenizer: Tokenizer, cuts: WordCuts) -> None:
        self._tokenizer = tokenizer
        self._cuts = cuts
        self._known: dict[str, bytes] = {}
        """The tokens of each word: int32, as bytes."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Self | None:
        """For a tokenizer whose texts can be cut; else None."""
        kind = type(tokenizer)
        if (
            not isinstance(tokenizer, PreTrainedTokenizerFast)
            or kind.__call__ is not PreTrainedTokenizerFast.__call__
            or kind._encode_plus is not PreTrainedTokenizerFast._encode_plus
            or tokenizer.split_special_tokens
        ):
            return None
        backend = tokenizer.backend_tokenizer
        cuts = cuts_of(backend.to_str())
        return None if cuts is None else cls(backend, cuts)

    def tokenise(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]]
    ) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]] | None]:
        """Of each text its tokens, and which of them have a character of one of its spans, each (tokens,).

        Without the special tokens that a tokenizer adds. The same as by
        :func:`~shardwise.training.texts.token_spans.tokens_within`, or None where that has to be asked: the
        tokenizer refuses the text, or where a span begins or ends is told otherwise of a word that stands alone.
        """
        words = [self._cuts.word.findall(text) for text in texts]
        passing = self._learn(words)
        try:
            return [self._tokenised(*each) for each in zip(texts, words, spans, strict=True)]
        finally:
            for word in passing:
                del self._known[word]

    def _learn(self, words: Sequence[Sequence[str]]) -> list[str]:
        """Have the tokens of all words, but for those that the tokenizer refuses; those that are not to be kept."""
        new = set(chain.from_iterable(words)).difference(self._known)
        if len(self._known) + len(new) > _MOST:
            self._known = {}
            new = set(chain.from_iterable(words))
        made = self._made(list(new))
        self._known.update(made)
        return [word for word in made if len(word) > _LONGEST]

    def _tokenised(
        self, text: str, words: Sequence[str], spans: Sequence[Span]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]] | None:
        ends = self._ends(text, words, [span for span in spans if span[0] < span[1]])
        if ends is None:
            return None
        # The tokens are put together between the words at which something begins or ends, whose numbers this tells.
        places = sorted({0, len(words), *(word for end in ends for word, _ in end)})
        try:
            parts = [
                b"".join(map(self._known.__getitem__, islice(words, *between))) for between in pairwise(places)
            ]
        except KeyError:  # refused
            return None
        before = dict(zip(places, accumulate((len(part) // _ID_BYTES for part in parts), initial=0), strict=True))
        ids = np.frombuffer(b"".join(parts), np.int32)
        within = np.zeros(len(ids), dtype=np.bool_)
        for (first, skipped), (last, taken) in ends:
            within[before[first] + skipped : before[last] + taken] = True
        return ids, within

    def _made(self, words: list[str]) -> dict[str, bytes]:
        """The tokens of words, but for those that the tokenizer refuses."""
        backend = self._tokenizer
        if backend.truncation is not None:  # others may have asked for that meanwhile
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if backend.encode_special_tokens:
            backend.encode_special_tokens = False
        try:
            encodings = backend.encode_batch_fast(words, add_special_tokens=False) if words else []
        except Exception:  # whatever a tokenizer raises: of which word is found out below
            if len(words) == 1:
                return {}
            return {word: tokens for word in words for tokens in self._made([word]).values()}
        return {word: array("i", one.ids).tobytes() for word, one in zip(words, encodings, strict=True)}

    # Spans

    def _ends(
        self, text: str, words: Sequence[str], spans: Sequence[Span]
    ) -> list[tuple[tuple[int, int], tuple[int, int]]] | None:
        """Where the tokens of each span begin and end: a word, and so many of its tokens, for each.

        None where that has to be asked of the whole text.
        """
        if not spans:
            return []
        characters = list(accumulate(map(len, words), initial=0))
        found = []
        for start, stop in spans:
            if self._cuts.trims and (text[start].isspace() or text[stop - 1].isspace()):
                return None
            first, last = bisect_right(characters, start) - 1, bisect_right(characters, stop) - 1
            skipped = taken = 0
            if start > characters[first]:
                within = self._tokens_in(words[first], start - characters[first], stop - characters[first])
                if within is None:
                    return None
                skipped = within[0]
            if stop > characters[last]:
                within = self._tokens_in(words[last], start - characters[last], stop - characters[last])
                if within is None:
                    return None
                taken = within[1]
            found.append(((first, skipped), (last, taken)))
        return found

    def _tokens_in(self, word: str, start: int, stop: int) -> Span | None:
        """The first token of a word with a character of a span, and one behind the last; None if not known."""
        if self._cuts.trims and word[0].isspace():
            return None
        encoding = self._tokenizer.encode(word, add_special_tokens=False)
        found = tokens_of(encoding, max(start, 0), min(stop, len(word)))
        return found if found[1] else None
