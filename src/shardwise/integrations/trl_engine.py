"""vLLM in TRL's trainers (``use_vllm``), with the weights of a sharded model.

[Note: Weights for TRL's engine] TRL sends named parameters to the engine, one at a time, which it gathers in three
ways of its own. Of a model that shardwise has sharded none is right: transformers has other tensors than the
checkpoint where experts are fused, a 4-bit base has bytes, and a LoRA is not merged into shards. So the engine gets
the tensors of ``iter_hf_tensors``: whole, under the names of the checkpoint that it was started with, a LoRA merged
into dequantized weights. All else of the engine is TRL's: how it is started, asked, and told to drop its cache.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any, Self
from unittest import mock

import torch
from transformers import PreTrainedConfig

from shardwise.core.errors import ConfigError, find_private, private, require_private
from shardwise.files.open_checkpoint import find_quantization_config
from shardwise.models.selection import MergedAdapter, has_adapters
from shardwise.ranks.world import World
from shardwise.saving.stream import StreamOptions, describe_tensors, iter_hf_tensors


class _ServerRequest:
    """A request to the server, by a thread of its own, in the place of TRL's executor.

    The server answers it once it has received all tensors. If sending them fails, the executor would wait for the
    answer, and Python at its end for the executor's thread. This thread is left behind.

    Attributes:
        answer: of the server, or the error.
    """

    def __init__(self) -> None:
        self.answer: Future[Any] = Future()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin the request."""

        def run() -> None:
            try:
                self.answer.set_result(ask(*args, **kwargs))
            except Exception as error:
                self.answer.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return self.answer


@contextlib.contextmanager
def _server_request() -> Iterator[_ServerRequest]:
    """Have TRL's client make its request beside sending by the one that is returned, within the block."""
    request = _ServerRequest()
    with mock.patch.object(*find_private("trl.generation.vllm_client:ThreadPoolExecutor"), return_value=request):
        yield request


def engine_class() -> Any:
    """Return TRL's ``VLLMGeneration`` for models that shardwise has sharded. See [Note: Weights for TRL's engine].

    Raises:
        ConfigError: TRL lacks a name that is overridden.
    """
    path = "trl.generation.vllm_generation:VLLMGeneration"
    require_private(path, "_init_vllm _iter_named_params sync_weights")
    base: Any = private(path)

    class StreamingGeneration(base):  # type: ignore[misc]
        """Starts and asks vLLM as TRL does. A rank that fails ends all with one error."""

        def _init_vllm(self) -> None:
            """Start the engine, or connect to the server. Collective: yes.

            Raises:
                ConfigError: an engine in this process would quantize its layers, as those of the checkpoint are.
                CheckpointError: (or a subclass) a rank cannot. The same on every rank.
            """
            model: Any = self.model
            self._only = MergedAdapter(model.active_adapters[0]) if has_adapters(model) else None
            self._failure: Exception | None = None
            with World.current(call="use_vllm") as world, world.collective("start vLLM"):
                if self.mode == "colocate":
                    _require_plain_checkpoint(model.name_or_path)
                # First: an adapter that cannot be merged is an error before an engine takes memory. TRL would
                # gather all tensors once for these descriptions.
                tensors = describe_tensors(model, "hub", self._only, None)
                self._weight_metadata = [
                    (name, str(dtype).removeprefix("torch."), list(shape))
                    for name, (dtype, shape) in tensors.items()
                ]
                # The engine of a 4-bit base has dequantized weights. TRL would quantize it as bitsandbytes does.
                is_available = find_private("trl.generation.vllm_generation:is_bitsandbytes_available")
                # A rank that fails would leave the others in TRL's barrier. The end of this block is one.
                barrier = mock.patch.object(self.accelerator, "wait_for_everyone")
                with mock.patch.object(*is_available, return_value=False), barrier, _server_request():
                    super()._init_vllm()
                if self.mode == "server" and self.accelerator.is_main_process:
                    # Repeated, as TRL does with all that fail, it would wait for tensors that have been sent.
                    client, without_retries = self.vllm_client, private("trl.generation.vllm_client:HTTPAdapter")()
                    client.session.mount(f"{client.base_url}/update_weights", without_retries)

        def sync_weights(self) -> None:
            """Send the weights as TRL does. Collective: yes.

            Raises:
                CheckpointError: (or a subclass) a rank has failed. The same on every rank.
            """
            self._failure = None
            with World.current(call="sync_weights") as world, world.collective("send weights to vLLM"):
                # Called here, on the stream of the optimizer: the sender to a server goes through it on others.
                tensors = iter_hf_tensors(
                    self.model,
                    to="first_rank" if self.mode == "server" else "all_ranks",
                    only=self._only,
                    options=StreamOptions(device=self.accelerator.device),
                )
                # Closed at once if the engine takes no more: the other ranks wait for this one in the stream.
                with (
                    _server_request() as self._update,
                    contextlib.closing(self._complete(tensors)) as self._tensors,
                ):
                    try:
                        super().sync_weights()
                    except Exception:
                        # Before the first tensor: the others wait for this rank in the stream all the same.
                        if inspect.getgeneratorstate(self._tensors) == inspect.GEN_CREATED:
                            next(self._tensors)
                        raise
                if self._failure is not None:
                    raise self._failure

        def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
            return self._tensors

        def _complete(self, stream: Iterator[tuple[str, torch.Tensor]]) -> Generator[tuple[str, torch.Tensor]]:
            """Yield the tensors of a stream, and to a server those that a failed one lacks. Collective: yes."""
            # zip asks the stream first. If that fails, ``waiting`` still has the tensor that was to come.
            waiting = iter(self._weight_metadata)
            with contextlib.closing(stream):  # type: ignore[type-var]
                try:
                    for pair, _ in zip(stream, waiting, strict=True):
                        if self._update.answer.done():  # an error, before all has been sent
                            self._update.answer.result()
                        yield pair
                except Exception as error:
                    is_waiting = self.mode == "server" and not self._update.answer.done()
                    if not is_waiting or not self.accelerator.is_main_process:
                        raise
                    self._failure = error
            if self._failure is None:
                return
            # The server waits for all tensors that it was told of, and this rank for the server. So it gets the
            # rest, without values, before the error is raised.
            for name, dtype, shape in waiting:
                yield name, torch.zeros(shape, dtype=getattr(torch, dtype), device=self.accelerator.device)

    return StreamingGeneration


def _require_plain_checkpoint(name: str) -> None:
    """Raise ConfigError for a quantized checkpoint, of which vLLM makes layers that need codes and scales.

    It is that of the main branch, whatever the model's revision: TRL passes vLLM the name alone.
    """
    try:
        content, _ = PreTrainedConfig.get_config_dict(name)
    except OSError:
        return  # vLLM cannot open it either, and says so
    if stored := find_quantization_config(content):
        raise ConfigError(
            f"use_vllm: {name} is stored in the form {stored.get('quant_method')}, of which vLLM would make its "
            "layers, and the trained weights are dequantized. Load it, save it by shardwise.save, and train that"
        )
