"""Checks what an HTTP server answers against what was asked, and against what is known of the file."""

from __future__ import annotations

import email.utils
import http.client
import re
from datetime import UTC, datetime

from shardwise.storage.reading.transport import (
    PASSING_STATUSES,
    FileState,
    PermanentFault,
    TransientFault,
    changed,
)

_CONTENT_RANGE = re.compile(r"bytes\s+(?:(?P<first>\d+)-(?P<last>\d+)|\*)/(?P<total>\d+|\*)")


def check_status(response: http.client.HTTPResponse) -> None:
    status = response.status
    if status in (200, 206, 412, 416):
        return
    if status in (404, 410):
        raise FileNotFoundError(f"no such file (status {status})")
    if status in (401, 403):
        raise PermissionError(f"access is refused (status {status} {response.reason})")
    if status in PASSING_STATUSES:
        raise TransientFault(
            f"the server answered {status} {response.reason}",
            retry_after_s=retry_after_s(response.getheader("Retry-After")),
        )
    raise unexpected_answer(response)


def unexpected_answer(response: http.client.HTTPResponse) -> PermanentFault:
    return PermanentFault(
        f"the server answered {response.status} {response.reason}", "check the URL and the server"
    )


def check_answer(response: http.client.HTTPResponse, start: int, nbytes: int, expected: FileState) -> None:
    """The answer holds the range that was asked for, of the file in the state that is expected."""
    if response.status in (412, 416):
        raise changed(f"the server answered {response.status} {response.reason}")
    encoding = response.getheader("Content-Encoding", "identity")
    if encoding != "identity":
        raise PermanentFault(f"the server compresses the file ({encoding})", "turn that off for this folder")
    expected.require_version(version_in(response))
    if response.status == 200:
        check_whole(response, start, nbytes, expected)
        return
    first, last, total = content_range(response)
    if total is not None and total != expected.nbytes:
        raise changed(f"{expected.nbytes} bytes before, {total} now")
    if (first, last) != (start, start + nbytes - 1):
        raise PermanentFault(
            f"asked for bytes {start}-{start + nbytes - 1}, the server sends {response.getheader('Content-Range')}",
            "check the server, and what is between it and here",
        )
    if response.length is not None and response.length != nbytes:
        raise TransientFault(f"the server announces {response.length} bytes instead of {nbytes}")


def check_whole(response: http.client.HTTPResponse, start: int, nbytes: int, expected: FileState) -> None:
    """A server that does not know ranges sends whole files, which is right where the whole was asked for."""
    if response.length is not None and response.length != expected.nbytes:
        raise changed(f"{expected.nbytes} bytes before, {response.length} now")
    if (start, nbytes) != (0, expected.nbytes):
        raise PermanentFault(
            "the server ignores Range: it sends the whole file where a part was asked for",
            "use a server that serves byte ranges, or download the checkpoint",
        )


def content_range(response: http.client.HTTPResponse) -> tuple[int | None, int | None, int | None]:
    match = _CONTENT_RANGE.fullmatch(response.getheader("Content-Range", "").strip())
    if match is None:
        return None, None, None
    first, last, total = (
        int(text) if text is not None and text != "*" else None for text in match.group("first", "last", "total")
    )
    return first, last, total


def version_in(response: http.client.HTTPResponse) -> str | None:
    etag = response.getheader("ETag")
    if etag is not None:
        return f"ETag {etag}"
    modified = response.getheader("Last-Modified")
    return None if modified is None else f"Last-Modified {modified}"


def retry_after_s(value: str | None) -> float | None:
    """Seconds from a ``Retry-After`` header, which holds a number of them or a date (RFC 9110, 10.2.3)."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())
