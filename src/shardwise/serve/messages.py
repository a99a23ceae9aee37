"""Messages of the protocol: protobuf of passes and samples, by the client package's own descriptor.

JSON bodies are checked by the client package's own classes (``tinker.types``).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

import torch
import zstandard
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from packaging.specifiers import SpecifierSet
from tinker.proto import tinker_public_pb2 as protobuf
from tinker.types.topk_logprobs import MASK_LOGPROB

from shardwise.bank.losses import LOSSES, complete_config
from shardwise.bank.rows import FLOAT_KEYS, IGNORED, RowTensors, parse_rows
from shardwise.bank.sampling import SampledSequence, SampleOutput
from shardwise.core.errors import ConfigError
from shardwise.serve.operations import Pass, PassOutcome, SampleAnswer

CLIENTS: Final = SpecifierSet(">=0.38,<0.40")
"""Versions of the ``tinker`` package that are served. The tests run the oldest of them."""

MAX_CHUNK_BYTES: Final = 5_000_000
"""Bytes of a request's rows, without compression, as clients count them."""

MAX_BODY_BYTES: Final = 2 * MAX_CHUNK_BYTES
"""Bytes of a body, after decompression."""

MAX_READ_BYTES: Final = 8 * MAX_BODY_BYTES
"""Bytes of a pass that are read. One above the limit is refused in its place in the order of a model."""

MAX_DENSE_BYTES: Final = 8 * MAX_BODY_BYTES
"""Bytes of all sparse tensors of a request, when they are dense. The empty parts of sparse ones are not sent."""

MAX_TARGETS: Final = 1024
"""Targets of a token. Those of a pass are padded to the row with the most, whosever the others are. It is ten times
as many as a sample returns (``topk_prompt_logprobs``), and all of a small vocabulary."""

PROTOBUF: Final = "application/x-protobuf"

_DTYPES: Final = {protobuf.DTYPE_FLOAT32: torch.float32, protobuf.DTYPE_INT64: torch.int64}


class StatusError(Exception):
    """An answer with an HTTP status other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return a body without its content encoding, of at most ``max_bytes``.

    Raises:
        StatusError: 400 or 413, the body cannot be used.
    """
    if encoding in ("", "identity"):
        data = body
    elif encoding == "zstd":
        try:
            with zstandard.ZstdDecompressor().stream_reader(body) as reader:
                data = reader.read(max_bytes + 1)  # no more, whatever the frame says
        except zstandard.ZstdError as error:
            raise StatusError(400, f"the body is not zstd: {error}") from error
    else:
        raise StatusError(400, f"the body has the encoding {encoding!r}. Use zstd, or none")
    if len(data) > max_bytes:
        raise StatusError(413, f"the body has more than {max_bytes} bytes. Send less at once")
    return data


def parse_pass(data: bytes) -> Any:
    """Return a ``ForwardBackwardRequest``. Raise StatusError if the data is none."""
    message = protobuf.ForwardBackwardRequest()
    try:
        message.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise StatusError(400, f"the body is no ForwardBackwardRequest: {error}") from error
    return message


def read_pass(request_id: str, message: Any, *, vocab_size: int, longest: int) -> Pass:
    """Return the operation of a ``ForwardBackwardRequest``, checked as the bank checks it.

    Raises:
        ConfigError: it cannot be carried out. The message has the reason.
    """
    if message.loss_fn not in LOSSES:
        raise ConfigError(f"loss_fn={message.loss_fn!r}: is not served. Use {', '.join(LOSSES)}")
    config: dict[str, object] = dict(message.loss_fn_config)
    if message.loss_fn_config_v2:
        config = {
            key: getattr(value, value.WhichOneof("value") or "text")
            for key, value in message.loss_fn_config_v2.items()
        }
    complete = complete_config("loss_fn_config", message.loss_fn, config)
    tensors = [tensor for datum in message.data for tensor in datum.loss_fn_inputs.values()]
    sparse = [
        abs(math.prod(tensor.shape)) * 8 for tensor in tensors if tensor.WhichOneof("encoding") == "sparse_csr"
    ]
    if sum(sparse) > MAX_DENSE_BYTES:
        raise ConfigError(f"data: sparse tensors have {sum(sparse)} bytes when dense, above {MAX_DENSE_BYTES}")
    rows = tuple(_read_datum(number, datum) for number, datum in enumerate(message.data))
    if not rows:
        raise ConfigError("data: has no rows. Send at least one")
    parse_rows("data", rows, vocab_size=vocab_size, longest=longest, loss=message.loss_fn)
    model, backward = message.model_id, not message.forward_only
    return Pass(request_id, model, rows, message.seq_id, message.loss_fn, complete, backward)


def _read_datum(number: int, datum: Any) -> RowTensors:
    row = {"input_ids": read_chunks(number, datum.model_input)}
    for name, tensor in datum.loss_fn_inputs.items():
        values = _read_tensor(f"data: {name} of row {number}", tensor, IGNORED if name == "target_tokens" else 0)
        row["targets" if name == "target_tokens" else name] = values
    for name in FLOAT_KEYS:
        # The client flattens what is (tokens, 1), and leaves out the shape of what has one dimension.
        if name in row and "targets" in row and row[name].numel() == row["targets"].numel():
            row[name] = row[name].view(row["targets"].shape)
    return row


def read_chunks(number: int, chunks: Sequence[Any]) -> torch.Tensor:
    """Return the tokens of chunks of text, (tokens,). Raise ConfigError for other chunks."""
    parts = [torch.empty(0, dtype=torch.int64)]
    for chunk in chunks:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise ConfigError(f"data: row {number} has an image or sound. This server has models of text alone")
        data = chunk.encoded_text.tokens
        if len(data) % 4:
            raise ConfigError(f"data: the tokens of row {number} are {len(data)} bytes, and not int32")
        parts.append(_from_bytes(data, torch.int32).long())
    return torch.cat(parts)


def _read_tensor(what: str, tensor: Any, missing: int) -> torch.Tensor:
    """Return a tensor. What a sparse one leaves out is ``missing``."""
    dtype, shape = _DTYPES.get(tensor.dtype), list(tensor.shape)
    if dtype is None or len(shape) > 2 or any(size < 0 for size in shape) or math.prod(shape) > MAX_BODY_BYTES:
        raise ConfigError(f"{what}: is not a tensor of float32 or int64 with 1 or 2 dimensions")
    if len(shape) == 2 and shape[1] > MAX_TARGETS:
        raise ConfigError(f"{what}: has {shape[1]} values for each token. Send at most {MAX_TARGETS}")
    is_sparse = tensor.WhichOneof("encoding") == "sparse_csr"
    data = tensor.sparse_csr.values if is_sparse else tensor.dense
    if len(data) % dtype.itemsize:
        raise ConfigError(f"{what}: has {len(data)} bytes, which are no {dtype} values")
    values = _from_bytes(data, dtype)
    if not is_sparse:
        shape = shape or [len(values)]
        if math.prod(shape) != len(values):
            raise ConfigError(f"{what}: has {len(values)} values, and its shape is {shape}")
        return values.view(shape)
    indices = tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices
    if len(shape) != 2 or any(len(each) % 8 for each in indices):
        raise ConfigError(f"{what}: is sparse, and not (tokens, K) with int64 indices")
    begins, columns = (_from_bytes(each, torch.int64) for each in indices)
    counts = begins.diff()
    is_valid = (
        len(begins) == shape[0] + 1
        and len(columns) == len(values)
        and bool((counts >= 0).all())
        and int(begins[0]) == 0
        and int(begins[-1]) == len(values)
        and (not len(columns) or (int(columns.min()) >= 0 and int(columns.max()) < shape[1]))
    )
    if not is_valid:
        raise ConfigError(f"{what}: its sparse indices do not fit into {shape}")
    dense = torch.full(shape, missing, dtype=dtype)
    dense[torch.arange(shape[0]).repeat_interleave(counts), columns] = values
    return dense


def _from_bytes(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def write_pass(outcome: PassOutcome) -> bytes:
    """Return a ``ForwardBackwardOutput``. Rows of one trailing shape, one after the other, are one record."""
    message = protobuf.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics["loss:sum"] = outcome.loss
    for trailing, group in groupby(outcome.logprobs, key=lambda row: tuple(row.shape[1:])):
        rows = list(group)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(rows))
        tensor = record.fields["logprobs"]
        tensor.dtype = protobuf.DTYPE_FLOAT32
        tensor.data = _to_bytes(torch.cat([row.flatten() for row in rows]).float())
        ends = torch.tensor([0, *(row.numel() * 4 for row in rows)], dtype=torch.int64).cumsum(0)
        tensor.offsets = _to_bytes(ends)  # in bytes
        tensor.trailing_shape.extend(trailing)
    data: bytes = message.SerializeToString()
    return data


def write_score(outcome: PassOutcome, answer: SampleAnswer) -> bytes:
    """Return the ``SampleResponse`` of a prompt that was scored, with no tokens."""
    sequences = [SampledSequence() for _ in range(answer.num_samples)]
    return write_sample(SampleOutput(sequences, outcome.logprobs[0][:-1]), answer)


def write_sample(output: SampleOutput, answer: SampleAnswer) -> bytes:
    """Return a ``SampleResponse``. The first token of a prompt has no log probability."""
    message = protobuf.SampleResponse()
    for sequence in output.sequences:
        message.sequences.add(
            stop_reason=protobuf.STOP_REASON_STOP
            if sequence.stop_reason == "stop"
            else protobuf.STOP_REASON_LENGTH,
            tokens=_to_bytes(torch.tensor(sequence.tokens, dtype=torch.int32)),
            logprobs=_to_bytes(torch.tensor(sequence.logprobs, dtype=torch.float32)),
        )
    if output.prompt_logprobs is not None and answer.prompt_logprobs:
        undefined = torch.full((1,), math.nan)
        values = torch.cat([undefined, output.prompt_logprobs.float().cpu()])
        if answer.last_n is not None:
            values[: len(values) - answer.last_n] = math.nan
        message.prompt_logprobs = _to_bytes(values)
    if output.top_prompt_logprobs is not None:
        ids, logprobs = (each.cpu() for each in output.top_prompt_logprobs)  # (tokens - 1, k)
        top, k = message.topk_prompt_logprobs, ids.shape[1]
        top.k, top.length = k, len(ids) + 1
        num_unscored = 1 if answer.last_n is None else top.length - answer.last_n
        ids, logprobs = (each[num_unscored - 1 :] for each in (ids.int(), logprobs.float()))
        unscored = torch.zeros((num_unscored, k), dtype=torch.int32)
        top.token_ids = _to_bytes(torch.cat([unscored, ids]))
        top.logprobs = _to_bytes(torch.cat([unscored + MASK_LOGPROB, logprobs]))
    data: bytes = message.SerializeToString()
    return data


def cut_at_stops(tokenizer: Any, output: SampleOutput, stops: Sequence[str]) -> SampleOutput:
    """End each sequence with the first token that completes one of the texts ``stops``."""
    for sequence in output.sequences if stops else ():
        tokens = sequence.tokens
        if not _has_any(tokenizer.decode(tokens), stops):
            continue
        # A text that is there stays there, so that the first length with it is searched for by halves.
        shorter = range(1, len(tokens))
        length = 1 + bisect_left(
            shorter, True, key=lambda length: _has_any(tokenizer.decode(tokens[:length]), stops)
        )
        # Only before an incomplete character, decoders of single bytes replace whole characters by U+FFFD, too.
        for earlier in range(length - 1, 0, -1):
            text = tokenizer.decode(tokens[:earlier])
            if _has_any(text, stops):
                length = earlier
            elif not text.endswith("\ufffd"):
                break
        del tokens[length:], sequence.logprobs[length:]
        sequence.stop_reason = "stop"
    return output


def _has_any(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)
