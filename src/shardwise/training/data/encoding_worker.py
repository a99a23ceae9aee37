"""A process that makes tokens of blocks of rows for another; imports no torch."""

from __future__ import annotations

import contextlib
import pickle
import signal
from multiprocessing.connection import Connection
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.training.data.encoding import encode_block


def serve(descriptor: int) -> None:
    """Answer blocks until the pipe closes: the first message is how they are encoded, the others are blocks.

    An answer is a pair: "ready" (once), "made", "refused" with an error of ours, or "failed" with a text.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this one hears it, and closes the pipe
    with Connection(descriptor) as pipe, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            encoding = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        except Exception as error:  # a class that only the other process knows
            pipe.send(("failed", f"{type(error).__name__}: {error}"))
            return
        pipe.send(("ready", None))
        while True:
            pipe.send(_answer(pickle.loads(pipe.recv_bytes()), encoding))


def _answer(block: Any, encoding: Any) -> tuple[str, Any]:
    try:
        return "made", encode_block(block, encoding)
    except ShardwiseError as error:
        return "refused", error
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
