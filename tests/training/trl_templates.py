"""Chat templates of well-known models, as TRL ships them, and a tokenizer that knows their special tokens."""

import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = re.compile(
    r"<\|[a-zA-Z_0-9]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|<start_of_turn>|<end_of_turn>|<turn\|>|<\|turn>|<end_of_utterance>"
    r"|<\|channel>|<channel\|>|<\|tool_call>|<tool_call\|>|<\|tool_response>|\[gMASK\]|<sop>|</s>"
)


def folder() -> Path | None:
    """Where TRL has its templates; None where it is not installed. It is not imported, which takes seconds."""
    found = find_spec("trl")
    places = (
        [] if found is None else [Path(place, "chat_templates") for place in found.submodule_search_locations or ()]
    )
    return next((place for place in places if place.is_dir()), None)


def names() -> list[str]:
    """Templates that models come with."""
    place = folder()
    return (
        []
        if place is None
        else sorted(stem for stem in (p.stem for p in place.glob("*.jinja")) if "_training" not in stem)
    )


def text(name: str) -> str:
    place = folder()
    assert place is not None
    return (place / f"{name}.jinja").read_text("utf-8")


def has(name: str) -> bool:
    place = folder()
    return place is not None and (place / f"{name}.jinja").is_file()


def specials(template: str) -> list[str]:
    """The special tokens that a template names."""
    return sorted(set(_SPECIAL.findall(template)))


@lru_cache(maxsize=4)
def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token for each byte, and one for each special token that the template names."""
    special = ["<bos>", "<eos>", *specials(template)]
    vocabulary = {token: number for number, token in enumerate(special)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary.setdefault(character, len(vocabulary))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.add_special_tokens(special)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>", chat_template=template
    )
