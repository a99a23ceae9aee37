r"""Texts as tokens, word by word: where a text may be cut, and the tokens of words, which are kept.

[Note: Words] A tokenizer first finds its added tokens, then cuts what is between them by patterns, and makes
tokens of each piece alone. So a text may be cut wherever a piece ends anyway, and the pieces before and behind
would be the same if the text ended, or began, there. With the patterns that are known here that is so

- before a blank that follows something visible: none has a match that goes on with it, and all match it;
- before a blank with a letter behind it, also where more white space is before it, which is matched without its
  last;
- between a letter or digit and a line break; and behind the one line break between something visible and a
  letter, which at most belongs to the punctuation before it;
- where patterns take line breaks as such (``\s*[\r\n]+``), behind one or two line breaks with blanks, and
  then something visible, behind them. A slash is not meant, which one pattern takes to the line breaks before
  it.

A tokenizer without patterns puts together whatever its merges name. If no token of its vocabulary has a blank
behind anything but white space, none can come to be across such a place, and what happens on one side of it is
nothing to the other. The same goes for line breaks.

Whatever is not understood to the last word (another kind of model, a pattern that is not in the table, an added
token that takes white space to it) is not cut at all.

In a chat most words have been seen before. The tokenizer is asked for those that are new, of many texts at once,
and for no text as a whole; which characters a token has is asked only where an answer begins or ends within a word.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from shardwise.training.texts.token_spans import tokens_of

_MARKS: Final = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
_WORD: Final = r"[^\r\n\p{L}\p{N}]?"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ANY_CASE: Final = f"(?i:{'|'.join(_MARKS)})"
_KNOWN: Final = frozenset(
    {
        *_MARKS,
        _ANY_CASE,
        *(f"{_WORD}{letters}" for letters in (r"\p{L}+", r"[\p{L}\p{M}]+")),
        *(
            f"{_WORD}{words}{end}"
            for words in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
            for end in ("", f"{_ANY_CASE}?")
        ),
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?\p{L}+",
        r" ?\p{N}+",
        r"\p{N}",
        r"\p{N}{1,3}",
        *(
            rf" ?[^\s\p{{L}}{marks}\p{{N}}]+{end}"
            for marks in ("", r"\p{M}")
            for end in ("", r"[\r\n]*", r"[\r\n/]*")
        ),
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    }
)
"""Alternatives of patterns. In none has a match a blank behind anything but white space, or more than a slash
behind a line break."""
_BREAKS: Final = r"\s*[\r\n]+"
_ISOLATING: Final = frozenset({r"\p{N}", r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"})
"""Patterns without white space in their matches, which may come before others."""
_GPT2: Final = "|".join([*_MARKS, r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", r"\s+(?!\S)", r"\s+"])

_BLANK: Final = r"(?<=\S)(?= )"
_INDENTED: Final = r"(?<=\s)(?= [A-Za-z])"
_END: Final = r"(?<=[A-Za-z0-9])(?=\n)"
_LINE: Final = r"(?<=[!-~]\n)(?=[A-Za-z])"
_LINES: Final = (r"(?<=[!-~]\n)(?= *[!-.0-~])", r"(?<=[!-~]\n\n)(?= *[!-.0-~])")


@dataclass(frozen=True, slots=True)
class WordCuts:
    """Where texts may be cut.

    Attributes:
        word: finds the parts of a text, one after the other; together they are the text.
        trims: whether a token's characters are told without the white space it has.
    """

    word: re.Pattern[str]
    trims: bool


def cuts_of(described: str) -> WordCuts | None:
    """Where texts may be cut for a tokenizer, as it describes itself (JSON); None where that is not known."""
    tokenizer: dict[str, Any] = json.loads(described)
    model = tokenizer["model"]
    if model.get("type") != "BPE" or model.get("dropout") or not _keeps_blanks(tokenizer.get("normalizer")):
        return None
    processors = list(_each(tokenizer.get("post_processor"), "processors"))
    if any(one["type"] not in ("ByteLevel", "TemplateProcessing") for one in processors):
        return None
    added = _added(tokenizer["added_tokens"])
    places = _places(list(_each(tokenizer.get("pre_tokenizer"), "pretokenizers")), model)
    if added is None or places is None:
        return None
    if any(re.match("[A-Za-z]|\\s", str(token["content"])) for token in tokenizer["added_tokens"]):
        # Such a letter, or such white space, is none to a pattern.
        places = [_LINE if place in _LINES else place for place in places if place != _INDENTED]
    return WordCuts(_word(added, places), any(one.get("trim_offsets", False) for one in processors))


def _word(added: Sequence[str], places: Sequence[str]) -> re.Pattern[str]:
    """What finds a part of a text: an added token, or what is between two places, at least a character.

    The first alternative is the usual one, a word with its blank. Where white space behind a word is at no place,
    it, and the word behind it, belong to the part as well.
    """
    tokens = "|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)"
    first = "".join(sorted({re.escape(token[0]) for token in added})) or r"\x00"
    others, cut = rf"[^\s{first}]", "|".join(places)
    rest = rf"(?:(?!{tokens})[{first}]{others}*+)*+"
    visible = rf"(?:{others}++|(?!{tokens})[{first}]{others}*+){rest}"
    more = rf"(?:(?!{cut})\s(?:(?!{cut}){visible})?+)*+"
    return re.compile(
        rf" ?{others}++{rest}(?:(?! ){more})?+"
        rf"|{tokens}"
        rf"|(?: ?(?!{tokens})[{first}]{others}*+{rest}|\s(?:(?!{cut}){visible})?+){more}"
    )


def _each(stage: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    """The parts of a stage, in their order."""
    if stage is not None and stage["type"] == "Sequence":
        for part in stage[name]:
            yield from _each(part, name)
    elif stage is not None:
        yield stage


def _keeps_blanks(normalizer: Mapping[str, Any] | None) -> bool:
    """Whether it changes nothing across the places of cuts: NFC joins no blank and no letter to what is before."""
    return all(part["type"] == "NFC" for part in _each(normalizer, "normalizers"))


def _added(tokens: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """The added tokens that are found before all else; None where one of them reaches across a cut."""
    for token in tokens:
        content = str(token["content"])
        if token["lstrip"] or token["rstrip"] or token["single_word"] or not content:
            return None
        if len(content.split()) > 1 or (content.strip() and content != content.strip()):
            return None
        if not content.strip() and not token["normalized"]:
            return None
    return [str(token["content"]) for token in tokens if not token["normalized"]]


def _places(stages: Sequence[Mapping[str, Any]], model: Mapping[str, Any]) -> list[str] | None:
    """Where may be cut, as patterns without a width; None where nothing may be."""
    *before, last = stages or [{"type": "nothing"}]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    patterns = [_pattern_of(stage) for stage in before] + ([_GPT2] if last.get("use_regex", True) else [])
    if not patterns:
        return _places_by_vocabulary(model)
    *isolating, main = patterns
    if main is None or not all(pattern in _ISOLATING for pattern in isolating):
        return None
    parts = _alternatives(main)
    if parts[-2:] != [r"\s+(?!\S)", r"\s+"] or not _KNOWN.issuperset(parts):
        return None
    return [_BLANK, _INDENTED, _END, *(_LINES if _BREAKS in parts else [_LINE])]


def _pattern_of(stage: Mapping[str, Any]) -> str | None:
    """The pattern by which a stage cuts, as one that isolates its matches; None where it does otherwise."""
    if stage["type"] == "Digits" and stage["individual_digits"]:
        return r"\p{N}"
    if stage["type"] != "Split" or stage["behavior"] != "Isolated" or stage["invert"]:
        return None
    found = stage["pattern"].get("Regex")
    return None if found is None else str(found).replace("\r", r"\r").replace("\n", r"\n")


def _alternatives(pattern: str) -> list[str]:
    """The parts of a pattern between the bars that are in no brackets."""
    found, depth, is_class, skip = [""], 0, False, False
    for character in pattern:
        if not skip and not is_class and depth == 0 and character == "|":
            found.append("")
            continue
        found[-1] += character
        if skip:
            skip = False
        elif character == "\\":
            skip = True
        elif is_class:
            is_class = character != "]"
        elif character == "[":
            is_class = True
        else:
            depth += (character == "(") - (character == ")")
    return found


_ACROSS_BLANK = re.compile("[^ĠĊĉċČč]Ġ")  # the blank, and other white space, as byte-level tokens have them
_ACROSS_BREAK = re.compile("[A-Za-z0-9]Ċ|Ċ[A-Za-z]")


def _places_by_vocabulary(model: Mapping[str, Any]) -> list[str] | None:
    """The same of a tokenizer that puts together whatever its merges name."""
    others = ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk")
    if any(model.get(name) for name in others):
        return None
    vocabulary = model["vocab"]
    if any(map(_ACROSS_BLANK.search, vocabulary)):
        return None
    return [_BLANK] if any(map(_ACROSS_BREAK.search, vocabulary)) else [_BLANK, _END, _LINE]


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
