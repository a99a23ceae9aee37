"""Calls functions of ``in_blocks`` in a worker, which has the libraries that lie apart from then on."""

from __future__ import annotations

from typing import Any

from tests.peers import use_peers

DEALT_ANEW = {
    "AdamW8bit": 0.01,
    "Lion8bit": 0.01,
    "torchao.optim.AdamW8bit": 0.01,
    "AdamW4bit": 0.2,
    "AdamWFp8": 0.07,
}
"""By how much of the largest a number may differ after its blocks were made anew; others by nothing."""

TRAINED = ("AdamW8bit", "torchao.optim.AdamW8bit")


def call(what: str, *args: Any) -> Any:
    use_peers("bitsandbytes", "torchao")
    from tests.training import in_blocks

    return getattr(in_blocks, what)(*args)
