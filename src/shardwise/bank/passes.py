"""A pass of rows of many adapters through the base: forward, losses request by request, backward.

[Note: Logits in chunks] Logits of all positions of a pass would need 12 bytes for each position and token of the
vocabulary (float32 logits, log-softmax and gradient), which is more than all else. So the output layer computes a
chunk of positions at a time, only those with a target that counts, and again in the backward pass. A hook takes the
hidden states from the base's decoder. Within the forward function of the whole model (where FSDP2 has gathered the
output layer) the model is called again for each chunk, with a stand-in for its decoder that returns the chunk. So
scales and caps of logits, which are in the model's own code, and adapters on the output layer, tied or not, are
computed as they are without chunks. The log probabilities replace the logits in the output of the forward function,
by whose gradient FSDP2 gathers again in the backward pass. All ranks have equally many chunks, because FSDP2 may
gather the output layer for each.

(``torch.nn.functional.linear_cross_entropy`` of torch 2.13 has chunks too. But it takes a weight matrix: no
adapters on the output layer, no caps of logits, one target for each position, and the weight as a plain tensor.)
"""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from shardwise.bank.adapter import BankAdapter
from shardwise.bank.kernels import BackendChoice
from shardwise.bank.losses import LOSSES
from shardwise.bank.routes import ActiveRoute, Route, group_rows
from shardwise.bank.rows import IGNORED, Request, RowLoss, UnpaddedRow
from shardwise.core.errors import TrainingError
from shardwise.fsdp.gradients import reset_fsdp_state
from shardwise.fsdp.named_tensors import find_fsdp_root
from shardwise.fsdp.torch_private import gathered_sizes, to_device
from shardwise.ranks.world import World
from shardwise.transfer.memory import available_memory

_POLL_S = 0.0005

_CHUNK_MULTIPLE: Final = 16
"""Products of fewer rows than this are rounded differently."""


def chunk_logits(device: str) -> int:
    """Return the logits of a chunk on a kind of device, of 12 bytes each: 200 MB, on accelerators 400 MB.

    With 150,000 words these are 96 and 208 rows. An accelerator reads the weights of the output layer for each
    chunk, which takes longer than the product if these are few.
    """
    return 1 << 24 if device == "cpu" else 1 << 25


@dataclass(slots=True)
class SharedBase:
    """The base of a bank, its ranks, and how adapters on it are computed.

    Attributes:
        max_tokens_per_pass: maximum number of padded tokens of a pass on a rank.
        gathered_bytes: the most that FSDP2 gathers beside activations: the root, and two blocks (one computes while
            the next one is gathered).
        activation_bytes: bytes of activations of a row, by config of its adapter and length.
        padding_ignored: whether it ignores padding on the left. None until a call has to know.
    """

    world: World
    model: PreTrainedModel
    device: torch.device
    active_route: ActiveRoute
    backend_choice: BackendChoice
    max_tokens_per_pass: int
    gathered_bytes: int = field(init=False)
    activation_bytes: dict[tuple[str, int], int] = field(default_factory=dict)
    padding_ignored: bool | None = None

    def __post_init__(self) -> None:
        root, *blocks = gathered_sizes(self.model) or [0]
        self.gathered_bytes = root + 2 * max(blocks, default=0)

    @property
    def vocab_size(self) -> int:
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a row."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else 1 << 30

    @property
    def chunk_positions(self) -> int:
        """Positions whose logits are computed at once."""
        return max(chunk_logits(self.device.type) // self.vocab_size // _CHUNK_MULTIPLE, 1) * _CHUNK_MULTIPLE

    def free_bytes(self) -> int | None:
        """Return free memory of the device, or of the host if that computes. None if unknown."""
        memory = available_memory(self.device)
        return memory.host_bytes if self.device.type == "cpu" else memory.device_bytes

    def wait_for_device(self) -> None:
        """Wait until the device has computed the pass.

        Raises:
            Stopped: another rank has failed, so that a gather on the device may never end.
        """
        if self.device.type == "cpu":
            return
        event = torch.get_device_module(self.device).Event()
        event.record()
        while not event.query():
            self.world.check()
            time.sleep(_POLL_S)

    def recover(self) -> None:
        """Reset FSDP2 after an interrupted pass. Collective: no."""
        root = find_fsdp_root(self.model)
        if root is not None:
            reset_fsdp_state(root)


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """A request of a call, checked.

    Attributes:
        request: as the caller passed it.
        adapter: None for the base.
        config: settings of the loss, with their defaults.
        rows: the rows of this rank.
        scale: factor of its loss before the backward pass.
    """

    request: Request
    adapter: BankAdapter | None
    config: Mapping[str, Any]
    rows: Sequence[UnpaddedRow]
    scale: float = 1.0


@dataclass(slots=True)
class PlacedRow:
    """A row of a call on this rank.

    Attributes:
        request_number: number of its request.
        row_number: its number in the request.
        row: its tokens and targets.
        key: for dropout. None without a backward pass.
    """

    request_number: int
    row_number: int
    row: UnpaddedRow
    key: int | None


@dataclass(frozen=True, slots=True)
class PlannedPass:
    """A pass: its padded length, chunks of logits on all ranks, and (request, row) of each row of this rank."""

    tokens: int
    num_chunks: int
    rows: tuple[tuple[int, int], ...]


class FusedPass:
    """A pass of rows of many adapters through the base.

    It owns its route ([Note: A route] in ``bank/routes.py``). A caller can expect:

    1. :meth:`forward`: log probabilities, with a graph if adapters are trained.
    2. :meth:`compute_losses`: gradients with respect to them, by request.
    3. :meth:`backward`, in training: gradients of the adapters.
    4. :meth:`sum_losses`, :meth:`collect_logprobs` and :meth:`collect_top`: results, for which the host waits.

    Args:
        base: the base.
        planned: its rows.
        requests: all requests of the call.
        keys: of all rows of this rank, by request, for dropout. None without a backward pass.
        is_training: False without a backward pass.
        num_top: number of the most probable tokens of each position to keep.
    """

    def __init__(
        self,
        base: SharedBase,
        planned: PlannedPass,
        requests: Sequence[PlacedRequest],
        keys: Sequence[Sequence[int | None]],
        *,
        is_training: bool,
        num_top: int = 0,
    ) -> None:
        self.rows = _sort_rows(planned, requests, keys)
        self._requests, self._num_chunks, self._num_top = requests, planned.num_chunks, num_top
        self._is_training = is_training
        self._top: list[tuple[torch.Tensor, torch.Tensor]] = []
        """By chunk, log probabilities and ids of the most probable tokens."""
        self.input_ids, self.attention_mask = _pad_inputs(self.rows, planned.tokens)  # (rows, tokens) each
        # On the host so far. Targets and keys go to the device here, in few transfers.
        self.device, self._chunk_positions = base.device, base.chunk_positions
        self._model, self._active_route = base.model, base.active_route
        self._place_targets(planned.tokens)
        adapters = [requests[placed_row.request_number].adapter for placed_row in self.rows]
        adapter_rows = group_rows(adapters, [placed_row.key for placed_row in self.rows], self.device)
        # A new one for each pass: see [Note: Straight into the buffer] in ``bank/kernels.py``.
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        in_call = [placed.adapter for placed in requests if placed.adapter is not None]
        self.route = Route(len(self.input_ids), planned.tokens, adapter_rows, in_call, base.backend_choice, anchor)
        self.logprobs: torch.Tensor | None = None
        """Log probabilities of the targets, float32 (positions, K), with a graph from forward to backward pass."""
        self.detached_logprobs = torch.empty(0)
        """``logprobs`` without their graph, from compute_losses() on."""
        self._gradient: torch.Tensor | None = None
        """Of the same shape, 0 for requests without a backward pass, and for those whose loss raised."""
        self._losses: dict[int, torch.Tensor] = {}
        """By request, its loss and whether its gradient is finite: (2,), float64, on the device."""

    def _place_targets(self, tokens: int) -> None:
        """Collect the positions with targets of all rows, one row after the other, and cut them into chunks."""
        counts = torch.tensor([len(placed_row.row.positions) for placed_row in self.rows], dtype=torch.int64)
        self._row_bounds = [0, *counts.cumsum(0).tolist()]
        """Where the positions of each row begin, and those of the last end."""
        num_positions = self._row_bounds[-1]
        # With 37 positions, and another rank with 70, in chunks of 64: 37 are padded to 48, and the second chunk of
        # this rank has 16 of padding, so the bounds are [0, 48, 64].
        # Chunks are padded at their ends by the first position of the first row, whose gradient is 0. A rank with
        # fewer positions than others has chunks of padding.
        self._chunk_bounds = [0]
        for _ in range(self._num_chunks):
            left = min(max(num_positions - self._chunk_bounds[-1], 1), self._chunk_positions)
            padded = -(-left // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE
            self._chunk_bounds.append(self._chunk_bounds[-1] + padded)
        total = self._chunk_bounds[-1]
        # K is the largest of all rows.
        width = max((placed_row.row.targets[0].numel() for placed_row in self.rows), default=1)
        positions = torch.zeros(total, dtype=torch.int64)  # in their rows
        targets = torch.full((total, width), IGNORED)
        for placed_row, start, stop in zip(self.rows, self._row_bounds, self._row_bounds[1:], strict=False):
            row = placed_row.row
            of_row = row.targets.view(len(row.targets), -1)[row.positions]  # (positions, K)
            positions[start:stop] = row.positions
            targets[start:stop, : of_row.shape[1]] = of_row
        # Row number of each position. Padding has len(self.rows), which is no row.
        self._row_numbers = torch.full((total,), len(self.rows), dtype=torch.int64)
        self._row_numbers[:num_positions] = torch.arange(len(self.rows)).repeat_interleave(counts)
        flat = positions.clone()  # places in (rows * tokens,)
        flat[:num_positions] += self._row_numbers[:num_positions] * tokens
        self._positions = to_device(positions, self.device)
        self._flat = to_device(flat, self.device)
        self._targets = to_device(targets, self.device)

    def forward(self) -> None:
        """Run the forward pass, and keep the log probabilities. Collective: if the model is sharded."""
        with self._active_route.on(self.route), self._hook_output():
            self._model(
                input_ids=to_device(self.input_ids, self.device),
                attention_mask=to_device(self.attention_mask, self.device),
                use_cache=False,
            )

    @contextmanager
    def _hook_output(self) -> Iterator[None]:
        """Have the model compute log probabilities in place of logits. See [Note: Logits in chunks]."""
        outputs: list[tuple[Any, torch.Tensor]] = []

        def take_hidden_states(_module: nn.Module, _args: Any, output: Any) -> Any:
            if getattr(output, "last_hidden_state", None) is not None:
                outputs.append((output, output.last_hidden_state))  # (rows, tokens, width)
                # The model goes on with one position, so that its own logits cost little. They are replaced.
                output["last_hidden_state"] = output.last_hidden_state[:1, :1]
                self.route.is_after_decoder = True
            return output

        def replace_logits(_module: nn.Module, _args: Any, output: Any) -> Any:
            if outputs and output.logits.shape[:2] == (1, 1):
                self.logprobs = self._compute_in_chunks(*outputs[0])
            else:  # a model whose logits are of something else than its decoder's last hidden states
                logits = output.logits.flatten(0, 1)[self._flat]
                self.logprobs, *top = _select_logprobs(logits, self._targets, self._num_top)
                self._top.append((top[0], top[1]))
            # Not read from the output after the forward pass: FSDP2 casts that to ``output_dtype``.
            output["logits"] = self.logprobs
            return output

        model = self._model
        # Before FSDP2's hook on the model, which looks for outputs with a gradient, and reshards the output layer.
        handles = [model.register_forward_hook(replace_logits, prepend=True)]
        if model.base_model_prefix in dict(model.named_children()):
            # After FSDP2's hook on the decoder, if that is a group.
            handles.append(model.base_model.register_forward_hook(take_hidden_states))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _compute_in_chunks(self, decoder_output: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the log probabilities of the targets, float32 (positions, K)."""
        # One copy and one split: the gradient of each of many would be as large as the hidden states.
        selected = hidden_states.flatten(0, 1).index_select(0, self._flat).unsqueeze(1)  # (positions, 1, width)
        bounds = list(pairwise(self._chunk_bounds))
        sizes = [stop - start for start, stop in bounds]
        logprobs = []
        for (start, stop), *inputs in zip(bounds, selected.split(sizes), self._targets.split(sizes), strict=True):
            # In a chunk, each position is a row of one token, for the model and for adapters on its output layer.
            route = self.route.of_positions(self._row_numbers[start:stop], self._positions[start:stop])
            arguments = self._model, decoder_output, *inputs, route, self._active_route, self._num_top
            # A single chunk is kept: recomputing it would repeat its product and save no memory.
            if self._num_chunks > 1 and self._is_training:
                # Recomputed to its end, since FSDP2 has to see the end of the output layer's forward pass.
                options: Any = {"use_reentrant": False, "preserve_rng_state": False, "early_stop": False}
                outputs = checkpoint(_compute_chunk, *arguments, **options)
            else:
                outputs = _compute_chunk(*arguments)
            logprobs.append(outputs[0])
            self._top.append(outputs[1:])
        return torch.cat(logprobs)

    def compute_losses(self) -> dict[int, str]:
        """Compute losses and their gradients with respect to the log probabilities, by request. Collective: no.

        They are not summed over requests, so one that raises or is not finite does not affect the others.

        Example: a pass of "ada" with 2 rows of 20 and 30 positions and "bob" with 1 row of 7 has log probabilities
        of shape (64, 1), of which ``[0:50]`` and ``[50:57]`` are theirs, and 7 are padding. With 50 labels of
        weight 1 on all ranks and a scale of 1 / 50, the gradient of "ada" is that of their mean.

        Returns:
            Errors of losses that raised, by request.
        """
        assert self.logprobs is not None
        self.detached_logprobs = self.logprobs.detach()
        self._gradient = torch.zeros_like(self.detached_logprobs)
        if not self._is_training:
            self.logprobs = None
        failures = {}
        for number, rows in self._request_rows().items():
            placed = self._requests[number]
            span = slice(self._row_bounds[rows.start], self._row_bounds[rows.stop])
            try:
                leaf = self.detached_logprobs[span].clone().requires_grad_()
                # A leaf, so this ends at the log probabilities. The pass of the base runs backward once, for all
                # requests.
                with torch.enable_grad():
                    losses = self._compute_loss(placed, rows, leaf)
                    [gradient] = torch.autograd.grad(losses, leaf, torch.full_like(losses, placed.scale))
            except Exception as error:
                failures[number] = f"{type(error).__name__}: {error}"
                continue
            # Scaled by ``scale``. Elsewhere it stays 0, and adds nothing.
            if placed.request.backward:
                self._gradient[span] = gradient
            self._losses[number] = torch.stack([losses.detach().double().sum(), gradient.isfinite().all().double()])
        return failures

    def _request_rows(self) -> dict[int, slice]:
        """Return the rows of each request that has any with targets."""
        spans: dict[int, slice] = {}
        for number, placed_row in enumerate(self.rows):
            # Rows of a request are adjacent, so its span grows by one row.
            start = spans[placed_row.request_number].start if placed_row.request_number in spans else number
            spans[placed_row.request_number] = slice(start, number + 1)
        for number, rows in list(spans.items()):
            if self._row_bounds[rows.start] == self._row_bounds[rows.stop]:
                del spans[number]
        return spans

    def _compute_loss(self, placed: PlacedRequest, rows: slice, leaf: torch.Tensor) -> torch.Tensor:
        """Return the losses of a request's rows: of each target, or of each group."""
        loss = placed.request.loss
        if not isinstance(loss, str):
            return self._compute_own_loss(placed, loss, rows, leaf)
        rows_of_request = [each.row for each in self.rows[rows]]
        is_flat = all(row.targets.ndim == 1 for row in rows_of_request)
        span = slice(self._row_bounds[rows.start], self._row_bounds[rows.stop])
        # The row of each position, as a number from 0 in this request. Rows without targets have none.
        values = {"rows": self._row_numbers[span].unique_consecutive(return_inverse=True)[1]}
        for key in ("weights", *LOSSES[loss].needs):
            padded = torch.zeros(leaf.shape, dtype=torch.float32, device="cpu")  # (positions, K)
            start = 0
            for row in rows_of_request:
                of_row = row.values[key].view(len(row.targets), -1)[row.positions]  # (positions of the row, K)
                if key == "weights":  # ignored targets of positions that have others
                    ignored = row.targets.view(len(row.targets), -1)[row.positions] == IGNORED
                    of_row = of_row.masked_fill(ignored, 0)
                padded[start : start + len(of_row), : of_row.shape[1]] = of_row
                start += len(of_row)
            values[key] = padded[:, 0] if is_flat else padded
        on_device = {key: to_device(each, self.device) for key, each in values.items()}
        return LOSSES[loss].function(leaf[:, 0] if is_flat else leaf, on_device, placed.config)

    def _compute_own_loss(
        self, placed: PlacedRequest, loss: RowLoss, rows: slice, leaf: torch.Tensor
    ) -> torch.Tensor:
        """Return the results of the caller's own loss for each group: (groups,)."""
        groups: dict[int, tuple[list[torch.Tensor], list[Mapping[str, torch.Tensor]]]] = {}
        first, size = self._row_bounds[rows.start], placed.request.group_size
        for number in range(rows.start, rows.stop):
            each = self.rows[number]
            start, stop = self._row_bounds[number], self._row_bounds[number + 1]
            # Back in the places of the tokens, with a graph to the leaf: (tokens, K).
            zeros = leaf.new_zeros((len(each.row.targets), leaf.shape[1]))
            logprobs = zeros.index_copy(0, self._positions[start:stop], leaf[start - first : stop - first])
            tensors = {"input_ids": each.row.input_ids, "targets": each.row.targets, **each.row.values}
            # All of the group are in this pass: it is one unit of the plan.
            group = 0 if size is None else each.row_number // size
            logprobs_of_group, rows_of_group = groups.setdefault(group, ([], []))
            logprobs_of_group.append(_unpad(logprobs, each.row))
            rows_of_group.append({key: to_device(values.clone(), self.device) for key, values in tensors.items()})
        results = []
        for logprobs_of_group, rows_of_group in groups.values():
            result: Any = loss(logprobs_of_group, rows_of_group, placed.config)
            if not isinstance(result, torch.Tensor) or result.numel() != 1 or not result.requires_grad:
                raise TypeError(f"{result!r} is not a tensor of one number that depends on the log probabilities")
            results.append(result.float().view(()))
        return torch.stack(results)

    def backward(self) -> None:
        """Accumulate the adapters' gradients. Collective: as the model is."""
        logprobs, self.logprobs = self.logprobs, None
        assert logprobs is not None
        # On all ranks or on none: the anchor is in the graph wherever an adapter could be, also without rows of it.
        if not logprobs.requires_grad:
            raise TrainingError("the loss depends on none of the adapters. Check their targets")
        # Even without any gradient: the others gather in this backward pass, so this rank must take part.
        with self._active_route.on(self.route):
            torch.autograd.backward(logprobs, self._gradient)
        self._gradient = None

    def sum_losses(self) -> tuple[dict[int, float], list[int]]:
        """Return the losses of this rank's rows by request, and the requests whose gradient is not finite."""
        if not self._losses:
            return {}, []
        rows = torch.stack(list(self._losses.values())).tolist()  # one transfer, for which the host waits
        losses = {number: loss for number, (loss, _) in zip(self._losses, rows, strict=True)}
        return losses, [number for number, (_, is_finite) in zip(self._losses, rows, strict=True) if not is_finite]

    def collect_logprobs(self) -> Iterator[tuple[PlacedRow, torch.Tensor]]:
        """Yield each row with its log probabilities, of the shape of its targets, 0 where they do not count."""
        shape = (*self.input_ids.shape, self.detached_logprobs.shape[1])  # (rows, tokens, K)
        padded = self.detached_logprobs.new_zeros((shape[0] * shape[1], shape[2]))
        num_positions = self._row_bounds[-1]
        padded[self._flat[:num_positions]] = self.detached_logprobs[:num_positions]
        # Not strict: without rows there is a dummy one.
        for placed_row, of_row in zip(self.rows, padded.view(shape), strict=False):
            yield placed_row, _unpad(of_row, placed_row.row)

    def collect_top(self) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
        """Return log probabilities and ids of the most probable tokens at the positions of each row."""
        logprobs, ids = (torch.cat(values) for values in zip(*self._top, strict=True))
        top: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for placed_row, start, stop in zip(self.rows, self._row_bounds, self._row_bounds[1:], strict=False):
            top[placed_row.request_number, placed_row.row_number] = logprobs[start:stop], ids[start:stop]
        return top


def _sort_rows(
    planned: PlannedPass, requests: Sequence[PlacedRequest], keys: Sequence[Sequence[int | None]]
) -> list[PlacedRow]:
    """Return the rows of a pass in the order in which they are computed.

    Rows of one adapter are adjacent, those with a backward pass first; adapters of one LoRA rank too, so that they
    can be computed by one product; and rows of one request are in order. Those of the base come last.
    """
    first_requests: dict[str, int] = {}
    for number, placed in enumerate(requests):
        if placed.adapter is not None:
            first_requests.setdefault(placed.adapter.name, number)

    def sort_key(row: PlacedRow) -> tuple[int, ...]:
        adapter = requests[row.request_number].adapter
        if adapter is None:
            return 1, 0, 0, 0, row.request_number, row.row_number
        return 0, adapter.rank, first_requests[adapter.name], row.key is None, row.request_number, row.row_number

    rows = []
    for request, row in planned.rows:
        rows.append(PlacedRow(request, row, requests[request].rows[row], keys[request][row]))
    return sorted(rows, key=sort_key)


def _pad_inputs(rows: Sequence[PlacedRow], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask (rows, tokens), padded on the right, on the host."""
    input_ids = torch.zeros((max(len(rows), 1), tokens), dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for number, placed_row in enumerate(rows):
        length = len(placed_row.row.input_ids)
        input_ids[number, :length] = placed_row.row.input_ids
        attention_mask[number, :length] = 1
    if not rows:  # one dummy row, so that this rank takes part in FSDP2's all-gathers
        attention_mask[:] = 1
    return input_ids, attention_mask


def _unpad(logprobs: torch.Tensor, row: UnpaddedRow) -> torch.Tensor:
    """Cut padded log probabilities (tokens, K) to those of a row."""
    cut = logprobs[: row.num_outputs]
    return cut[:, 0] if row.targets.ndim == 1 else cut[:, : row.targets.shape[1]]


def _compute_chunk(
    model: PreTrainedModel,
    decoder_output: Any,
    hidden_states: torch.Tensor,
    targets: torch.Tensor,
    route: Route,
    active_route: ActiveRoute,
    num_top: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute log probabilities for hidden states (positions, 1, width), as :func:`_select_logprobs`."""
    output = copy.copy(decoder_output)
    output["last_hidden_state"] = hidden_states
    prefix, decoder = model.base_model_prefix, model.base_model
    # In the backward pass too, where activations are computed again: the route is that of the chunk.
    with active_route.on(route):
        setattr(model, prefix, _DecoderOutput(decoder, output))
        try:
            # Not by a call of the module, which would run hooks of the whole model, those of FSDP2 among them.
            logits = model.forward(input_ids=torch.zeros_like(targets[:, :1]), use_cache=False).logits
        finally:
            setattr(model, prefix, decoder)
    return _select_logprobs(logits[:, 0], targets, num_top)


class _DecoderOutput(nn.Module):
    """Stands in for a decoder, with its attributes, and returns an output that has been computed."""

    def __init__(self, decoder: nn.Module, output: Any) -> None:
        super().__init__()
        self._decoder_and_output = decoder, output  # in a tuple, so that it is no submodule

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        return self._decoder_and_output[1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder_and_output[0], name)


def _select_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the log probabilities, float32 (positions, K), of targets by logits (positions, vocabulary).

    Those of ignored targets are 0, without a gradient. Further results are log probabilities and ids of the most
    probable tokens, (positions, num_top), without a graph.
    """
    logprobs = logits.float().log_softmax(1)
    # topk of 0 tokens would still read the whole vocabulary, and an empty view would keep it in memory.
    none = logprobs.detach().new_empty((len(logprobs), 0)), targets[:, :0]
    top, ids = logprobs.detach().topk(num_top, dim=1) if num_top else none
    return torch.where(targets == IGNORED, 0.0, logprobs.gather(1, targets.clamp(min=0))), top, ids
