"""JSON objects written by strangers."""

from __future__ import annotations

import json
from typing import NoReturn

from shardwise.errors import FormatError
from shardwise.storage.names import shown


def parse_object(text: bytes, *, what: str) -> dict[str, object]:
    """The JSON object in ``text``; ``what`` names it in messages (file and part of it).

    Stricter than :func:`json.loads`: UTF-8 only, no key twice in one object, no NaN or Infinity, no lone
    surrogates in names. A :class:`FormatError` for all else, never another exception.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_object_of_distinct_keys, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # not UTF-8, too deep, our own refusals, integers of many digits
        raise _fault(what, f"it is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise _fault(what, f"it is a JSON {type(value).__name__}, not an object")
    return value


def _fault(what: str, cause: str) -> FormatError:
    return FormatError(f"{what}: {cause}; the file is damaged or of another format: download or write it again")


def _object_of_distinct_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {shown(key)} occurs twice")
        key.encode()  # lone surrogates raise
        result[key] = value
    return result


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
