"""A process that ranks of tests are forked from, so that torch and transformers are imported once."""

import gc
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from shardwise.core.errors import ConfigError

_ORPHANED_S = 60.0
"""Seconds that a rank may take to end after the process that started it is gone."""


_PRELOADED = (
    *("torch.distributed.checkpoint", "transformers.models.llama.modeling_llama"),
    *("transformers.models.qwen3.modeling_qwen3", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer"),
    *("shardwise.loading.from_pretrained", "shardwise.saving.save", "shardwise.integrations.trainer"),
    *(
        "shardwise.training.train_model",
        "shardwise.training.train_adapters",
        "tests.load_cases",
        "tests.state.stating",
    ),
    *("tests.checkpoints.on_ranks", "tests.faults.on_ranks", "tests.faults.saving"),
    *("tests.torture.verbs", "tests.training.on_ranks"),
    *("matplotlib.backends.backend_agg", "matplotlib.figure"),
)
"""Modules that ranks need, imported once by the process that they are forked from."""


def _keep_conversions() -> None:
    """Let transformers compile the thousand patterns of its weight conversions, which it keeps."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")


def start_server() -> multiprocessing.context.ForkServerContext:
    """Start the process that ranks are forked from, unless there is one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    multiprocessing.forkserver.ensure_running()
    return context


def live_as_rank() -> None:
    """Prepare a new process: it receives SIGTERM but not Ctrl-C, and ends with its parent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    gc.freeze()  # collections would write to all objects that were there before the fork
    gc.enable()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "ranks are started"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORPHANED_S)
    os.kill(os.getpid(), signal.SIGKILL)


if any("multiprocessing.forkserver" in word for word in sys.orig_argv):  # in that process only
    gc.disable()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = [*filter(None, sys.path), str(Path(__file__).parents[2])]
    for _name in _PRELOADED:
        with suppress(ConfigError, ImportError):  # transformers before 5.19, whose Trainer is not supported; no TRL
            import_module(_name)
    with suppress(ImportError):  # saves time, and decides nothing
        _keep_conversions()
