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
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_object_of_distinct_keys, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError as error:
        raise _fault(what, f"invalid UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise _fault(what, "its JSON is nested too deeply") from error
    except ValueError as error:
        # JSONDecodeError, our own refusals, and integers of thousands of digits.
        raise _fault(what, f"it is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise _fault(what, f"it is a JSON {type(value).__name__}, not an object")
    return value


def _fault(what: str, cause: str) -> FormatError:
    return FormatError(f"{what}: {cause}; the file is damaged or of another format: download or write it again")


def _object_of_distinct_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"the key {shown(_first_repeated([key for key, _ in pairs]))} occurs twice")
    for key in result:
        if not key.isascii():
            _refuse_lone_surrogates(key)
    return result


def _refuse_lone_surrogates(key: str) -> None:
    try:
        key.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"the key {shown(key)} holds half of a surrogate pair") from None


def _first_repeated(keys: list[str]) -> str:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("no key is repeated")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
