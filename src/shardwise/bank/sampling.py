"""Sampling from adapters of a bank: left-padded batches with a key-value cache, many adapters at once.

Sequences are cut into batches by their full lengths, as rows are cut into passes (``bank/compose.py``). On a
sharded base all ranks take the same number of steps, each with its own sequences, because FSDP2 gathers in each.
There is no continuous batching: a batch ends with its longest sequence.

[Note: Padding that is read] Some models compute a prompt in another way with padding on its left: recurrent ones
without a mask, those that count positions from the padding, and sparse attention that may choose it. The first call
with prompts of unequal lengths finds out. On such a base the prompts of a batch on a rank have one length.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final, Literal, TypeAlias

import torch
import torch.nn.functional as F

from shardwise.bank.adapter import BankAdapter
from shardwise.bank.batch import collective_passes, describe_adapter, evaluating, get_usable_adapter, plan_call
from shardwise.bank.compose import Unit, compose_passes
from shardwise.bank.kernels import row_keys, stable_key
from shardwise.bank.passes import SharedBase
from shardwise.bank.routes import Route, group_rows
from shardwise.bank.rows import Request, RowTensors, make_scored_row, require_not_compiled
from shardwise.core.errors import ConfigError
from shardwise.fsdp.torch_private import to_device

_CHECKED_STEPS: Final = 16
"""After as many steps, ranks tell each other whether all sequences have ended."""

_DRAWN_AT_ONCE: Final = 16
"""Rows of a batch whose tokens are drawn at once: 200 MB with a vocabulary of 150,000."""

_LARGEST_ROUNDING: Final = 0.05
"""Of log probabilities, relative to their spread, in 16 bits too. Padding that is read is assumed to change them by
more."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt, and how to go on from it.

    Attributes:
        adapter: its name. None for the base.
        prompt: token ids.
        n: number of sequences.
        max_tokens: of each sequence, without the prompt. 0 for log probabilities of the prompt alone.
        temperature: logits are divided by it. 0 for the most probable token (greedy).
        top_k: sample from as many of the most probable tokens. 0 for all.
        top_p: sample from the most probable tokens whose probabilities, of those of top_k, add up to it.
        stop: token ids, or lists of them, that end a sequence and are its last. None for the end of text of the
            model's generation config.
        seed: equal seeds give equal sequences, whatever else is in the call, but for rounding that depends on the
            number of rows (in 16 bits on a GPU). None for any.
        prompt_logprobs: True for the log probability of each token of the prompt but the first.
        top_prompt_logprobs: number of the most probable tokens at each of them.
    """

    adapter: str | None
    prompt: Sequence[int]
    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: Sequence[int | Sequence[int]] | None = None
    seed: int | None = None
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = 0


@dataclass(slots=True)
class SampledSequence:
    """A sequence.

    Attributes:
        tokens: without the prompt, with the tokens that stopped it.
        logprobs: log probability of each, by the model: at temperature 1, before top_k and top_p.
        stop_reason: "stop" or "length".
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] = "length"


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """The outcome of a sample.

    Attributes:
        sequences: ``n`` of them.
        prompt_logprobs: (tokens - 1,), if asked for, on the CPU.
        top_prompt_logprobs: ids and log probabilities, (tokens - 1, k) each, if asked for, on the CPU.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: torch.Tensor | None = None
    top_prompt_logprobs: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(slots=True)
class _Row:
    """A sequence in a batch: its sample, its adapter, tokens that stop it, and a random number for each step."""

    sample: Sample
    adapter: BankAdapter | None
    stop: list[list[int]]
    numbers: torch.Tensor
    sequence: SampledSequence = field(default_factory=SampledSequence)
    is_done: bool = False

    def append(self, token: int, logprob: float) -> None:
        if self.is_done:
            return
        tokens = self.sequence.tokens
        tokens.append(token)
        self.sequence.logprobs.append(logprob)
        if any(tokens[-len(stop) :] == stop for stop in self.stop):
            self.sequence.stop_reason, self.is_done = "stop", True
        self.is_done |= len(tokens) == self.sample.max_tokens


def sample_tokens(
    base: SharedBase, samples: Sequence[Sample], adapters: Mapping[str, BankAdapter]
) -> list[SampleOutput]:
    """Sample from this rank's prompts. Collective: yes. Errors: see ``AdapterBank.generate``."""
    # All ranks need the lengths of all sequences, to compose the same batches.
    with base.world.all_gather("check the samples") as exchange:
        require_not_compiled(base.model)
        rows_by_sample = [_open_sample(base, sample, adapters) for sample in samples]
        rows = [row for of_sample in rows_by_sample for row in of_sample]
        scored = [each for each in samples if each.prompt_logprobs or each.top_prompt_logprobs]
        names = [each.adapter for each in scored]
        top = max((each.top_prompt_logprobs for each in scored), default=0)
        sampled = {row.sample.adapter for row in rows}
        exchange.local = [(len(row.sample.prompt), row.sample.max_tokens) for row in rows], sampled, names, top
    by_rank, all_sampled, all_names, all_top = zip(*exchange.result, strict=True)
    in_call = [adapters[name] for name in set().union(*all_sampled) if name is not None]
    # Before the sequences, so that scores that do not fit into memory are refused before anything is computed.
    scores = _score(base, samples, adapters, [name for names in all_names for name in names], max(all_top))
    # Rows are filled with tokens in place, batch by batch. Ranks have nothing to tell each other at the end.
    with (
        collective_passes(base, "sample", [row.sample.adapter for row in rows], list) as exchange,
        evaluating(base.model),
    ):
        units = [[Unit(prompt + length) for prompt, length in of_rank] for of_rank in by_rank]
        may_pad = _may_pad(base, by_rank)
        for plan in compose_passes(units, longest=base.max_length, max_tokens=base.max_tokens_per_pass):
            of_one_length = [plan.units] if may_pad else split_by_prompt(plan.units, by_rank)
            for part in of_one_length:
                for batch in cut_batch(part, by_rank, base.max_tokens_per_pass):
                    own_rows = [rows[unit] for unit in batch[base.world.rank]]
                    _run_batch(base, own_rows, in_call, _count_steps(batch, by_rank))
        exchange.local = None
    outputs = []
    for number, (sample, of_sample) in enumerate(zip(samples, rows_by_sample, strict=True)):
        sequences = [row.sequence for row in of_sample] or [SampledSequence() for _ in range(sample.n)]
        outputs.append(SampleOutput(sequences, *scores.get(number, ())))
    return outputs


Lengths: TypeAlias = Sequence[Sequence[tuple[int, int]]]
"""By rank, of each of its sequences the tokens of the prompt, and those to sample at most."""


def cut_batch(units: Sequence[Sequence[int]], lengths: Lengths, max_tokens: int) -> list[list[Sequence[int]]]:
    """Cut a batch into halves until its sequences fit, with the padding that the batch has. All ranks cut alike.

    A batch has the longest prompt, and goes on for the longest continuation. Sequences of 8,000 + 10 and 10 + 8,000
    tokens are 16,000 together, of which each has a half.

    Args:
        units: by rank, numbers of its sequences.
        lengths: of all sequences.
        max_tokens: of a batch on a rank. One sequence may exceed it, with continuations of other ranks.
    """
    num_steps, num_rows = _count_steps(units, lengths), max(map(len, units))
    prompts = [max((lengths[rank][unit][0] for unit in of_rank), default=0) for rank, of_rank in enumerate(units)]
    widest = max(len(of_rank) * (prompt + num_steps) for of_rank, prompt in zip(units, prompts, strict=True))
    if num_rows == 1 or widest <= max_tokens:
        return [list(units)]
    # By prompt, so that each half has less padding.
    ordered = [sorted(of_rank, key=lengths[rank].__getitem__) for rank, of_rank in enumerate(units)]
    middle = (num_rows + 1) // 2
    halves = [of_rank[:middle] for of_rank in ordered], [of_rank[middle:] for of_rank in ordered]
    return [batch for half in halves for batch in cut_batch(half, lengths, max_tokens)]


def split_by_prompt(units: Sequence[Sequence[int]], lengths: Lengths) -> list[list[list[int]]]:
    """Split a batch into batches in which the prompts of each rank have one length. All ranks split alike.

    Example: prompts of 3, 5 and 3 tokens on rank 0, and of 7 on rank 1, are two batches. The second has none of
    rank 1.
    """
    by_rank: list[list[list[int]]] = []
    for rank, of_rank in enumerate(units):
        by_prompt: dict[int, list[int]] = {}
        for unit in of_rank:
            by_prompt.setdefault(lengths[rank][unit][0], []).append(unit)
        by_rank.append([by_prompt[prompt] for prompt in sorted(by_prompt)])
    return [list(batch) for batch in zip_longest(*by_rank, fillvalue=[])]


def _count_steps(units: Sequence[Sequence[int]], lengths: Lengths) -> int:
    """Return the most tokens to sample for any sequence on any rank: all ranks gather equally often."""
    return max(lengths[rank][unit][1] for rank, of_rank in enumerate(units) for unit in of_rank)


def require_sample(who: str, sample: Sample, *, vocab_size: int, longest: int) -> None:
    """Check a sample.

    Args:
        who: what is checked, for errors: the adapter, or the sample.
        sample: the sample.
        vocab_size: size of the vocabulary.
        longest: maximum number of tokens of a prompt and a sequence together.

    Raises:
        ConfigError: the sample is invalid. The message has the reason.
    """
    try:
        prompt = torch.as_tensor(sample.prompt, device="cpu")
    except (RuntimeError, TypeError, ValueError):  # not of numbers, or of numbers above 64 bits
        prompt = torch.empty(0, device="cpu")
    if prompt.ndim != 1 or not len(prompt) or prompt.is_floating_point():
        raise ConfigError(f"{who}: the prompt is not a list of token ids. Pass at least one")
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        raise ConfigError(f"{who}: the prompt has tokens outside of the model's {vocab_size}")
    length = len(prompt) + sample.max_tokens
    if sample.n < 1 or sample.max_tokens < 0 or length > longest:
        raise ConfigError(
            f"{who}: n={sample.n} sequences of {length} tokens with the prompt. They may have {longest}, by the "
            "length of the model or max_tokens_per_pass. Pass a smaller max_tokens"
        )
    if not (sample.temperature >= 0 and 0 < sample.top_p <= 1 and sample.top_k >= 0):
        raise ConfigError(f"{who}: temperature, top_k and top_p are at least 0, and 0 < top_p <= 1")
    if not 0 <= sample.top_prompt_logprobs <= vocab_size:
        raise ConfigError(f"{who}: top_prompt_logprobs={sample.top_prompt_logprobs}: is not 0 to {vocab_size}")


def _open_sample(base: SharedBase, sample: Sample, adapters: Mapping[str, BankAdapter]) -> list[_Row]:
    """Check a sample, and return its sequences. None without tokens to sample.

    Raises:
        ConfigError: the sample is invalid.
    """
    adapter = None if sample.adapter is None else get_usable_adapter(adapters, sample.adapter)
    # A sequence must fit into a batch alone, and have a position for each token.
    longest = min(base.max_length, base.max_tokens_per_pass)
    require_sample(describe_adapter(sample.adapter), sample, vocab_size=base.vocab_size, longest=longest)
    stop = sample.stop
    if stop is None:
        end: Any = getattr(base.model.generation_config, "eos_token_id", None)
        stop = [end] if isinstance(end, int) else end or []
    stops = [[each] if isinstance(each, int) else list(each) for each in stop]
    seed = secrets.randbits(62) if sample.seed is None else sample.seed
    # A row has all of its random numbers from the beginning, so it does not depend on the others of its batch.
    rows = []
    num_rows = sample.n if sample.max_tokens else 0
    for number in range(num_rows):
        # The upper 31 bits of a key are a uniform integer, as for dropout.
        keys = row_keys(stable_key(seed, number), 0, sample.max_tokens)
        rows.append(_Row(sample, adapter, stops, ((keys >> 33) & 0x7FFFFFFF).double() / (1 << 31)))
    return rows


class _Sequences:
    """Sequences that a base goes on with: first whole prompts, then one token of each, the rest being in the cache.

    Args:
        base: the base.
        ids: (rows, tokens), padded on the left.
        mask: of the same shape, 0 for padding.
    """

    def __init__(self, base: SharedBase, ids: torch.Tensor, mask: torch.Tensor) -> None:
        self._base = base
        self._cache: Any = None
        self.ids, self._mask = to_device(ids, base.device), to_device(mask, base.device)
        # Positions count from the first token of the prompt: of [pad, pad, a, b] they are [0, 0, 0, 1].
        self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        self._accepted = inspect.signature(base.model.forward).parameters
        # transformers 5.24 renames it, and warns of the former name.
        self._cache_name = "cache" if "cache" in self._accepted else "past_key_values"

    def compute_logits(self) -> torch.Tensor:
        """Return the logits after the last token of each row, float32 (rows, vocabulary).

        Collective: as the base is.
        """
        optional: dict[str, Any] = {"position_ids": self._positions, "logits_to_keep": 1}
        kwargs = {key: value for key, value in optional.items() if key in self._accepted}
        kwargs[self._cache_name] = self._cache
        output: Any = self._base.model(input_ids=self.ids, attention_mask=self._mask, use_cache=True, **kwargs)
        self._cache = getattr(output, self._cache_name, None)
        # The last position of each row: padding is on the left, so this is its last token.
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def append(self, tokens: torch.Tensor) -> None:
        """Append a token (rows,) to each row."""
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], 1)
        # A sequence that has ended goes on with the others, but no further than the model has positions.
        chosen, following = tokens.unsqueeze(1), (self._positions[:, -1:] + 1).clamp(max=self._base.max_length - 1)
        if self._cache is None:  # a model without a cache computes all tokens again
            self.ids, self._positions = torch.cat([self.ids, chosen], 1), torch.cat([self._positions, following], 1)
        else:
            self.ids, self._positions = chosen, following


def _may_pad(base: SharedBase, lengths: Lengths) -> bool:
    """Return whether prompts of unequal lengths may share a batch, equal on all ranks. Collective: yes.

    See [Note: Padding that is read]. The first call that has to know runs the base four times.
    """
    if all(len({prompt for prompt, _ in of_rank}) < 2 for of_rank in lengths):
        return True
    # A batch is no wider than this. Sparse attention takes as many tokens as index_topk, or all if there are fewer.
    pairs = [pair for of_rank in lengths for pair in of_rank]
    widest = max(prompt for prompt, _ in pairs) + max(length for _, length in pairs)
    if widest > getattr(base.model.config.get_text_config(), "index_topk", widest):
        return False
    if base.padding_ignored is None:
        prompts = torch.arange(40, device="cpu").view(8, 5) % base.vocab_size
        results = []
        for padding in (0, 7):
            ids, mask = F.pad(prompts, (padding, 0)), F.pad(torch.ones_like(prompts), (padding, 0))
            sequences = _Sequences(base, ids, mask)
            logits = [sequences.compute_logits()]
            sequences.append(sequences.ids[:, -1])
            logits.append(sequences.compute_logits())
            results.append(torch.cat(logits).log_softmax(1))  # (16, vocabulary)
        base.wait_for_device()
        is_possible = results[0] > -1e3  # tokens that the model does not rule out
        alone, padded = (each[is_possible] for each in results)
        distance = (padded - alone).norm() / (alone - alone.mean()).norm()
        base.padding_ignored = base.world.all_reduce_object(float(distance) <= _LARGEST_ROUNDING, all)
    return base.padding_ignored


def _run_batch(base: SharedBase, rows: list[_Row], in_call: Sequence[BankAdapter], num_steps: int) -> None:
    """Sample this rank's sequences of a batch, token by token. Collective: as the base is."""
    # Adapters of one rank side by side, so that one product computes them. The base comes last.
    rows.sort(key=lambda row: (1, 0, "") if row.adapter is None else (0, row.adapter.rank, row.adapter.name))
    adapter_rows = group_rows([row.adapter for row in rows], [None] * len(rows), base.device)
    num_rows, width = max(len(rows), 1), max((len(row.sample.prompt) for row in rows), default=1)
    # (rows, tokens), padded on the left. A rank without sequences has a dummy row.
    ids = torch.zeros((num_rows, width), dtype=torch.int64, device="cpu")
    mask = torch.zeros_like(ids)
    numbers = torch.zeros((num_rows, num_steps), dtype=torch.float64, device="cpu")
    if not rows:
        mask += 1
    for number, row in enumerate(rows):
        prompt = torch.as_tensor(row.sample.prompt, device="cpu")
        ids[number, width - len(prompt) :] = prompt
        mask[number, width - len(prompt) :] = 1
        numbers[number, : row.sample.max_tokens] = row.numbers
    numbers, most = to_device(numbers, base.device), base.vocab_size
    # Parts of the rows that are not greedy, each with temperature, top_k and top_p, as (3, rows, 1).
    drawn = [number for number, row in enumerate(rows) if row.sample.temperature > 0]
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start in range(0, len(drawn), _DRAWN_AT_ONCE):
        part = drawn[start : start + _DRAWN_AT_ONCE]
        of_part = [rows[number].sample for number in part]
        choices = [(each.temperature, min(each.top_k or most, most), each.top_p) for each in of_part]
        settings = torch.tensor(choices, dtype=torch.float64, device="cpu").T.unsqueeze(2).contiguous()
        indices = torch.tensor(part, device="cpu")
        parts.append((to_device(indices, base.device), to_device(settings, base.device)))
    anchor, sequences = torch.zeros((), device=base.device), _Sequences(base, ids, mask)
    for step in range(num_steps):
        width = sequences.ids.shape[1]
        route = Route(num_rows, width, adapter_rows, in_call, base.backend_choice, anchor)
        with base.active_route.on(route):
            logits = sequences.compute_logits()
        tokens = logits.argmax(1)
        for indices, settings in parts:
            tokens[indices] = _draw_tokens(logits[indices], settings, numbers[indices, step : step + 1])
        logprobs = logits.log_softmax(1).gather(1, tokens.unsqueeze(1))[:, 0]
        base.wait_for_device()  # polls, where tolist() would block though another rank has failed
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=False):
            row.append(token, logprob)
        sequences.append(tokens)
        # Ranks stop together, since each step gathers. Alone, a process looks after every step.
        if (step + 1) % _CHECKED_STEPS == 0 or base.world.size == 1:
            is_done = all(row.is_done for row in rows)
            if base.world.all_reduce_object(is_done, all):
                break


def _draw_tokens(logits: torch.Tensor, settings: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Draw a token for each row of logits (rows, vocabulary). Memory: some 80 bytes for each logit.

    Args:
        logits: float32.
        settings: temperature, top_k and top_p of each row, (3, rows, 1).
        numbers: uniform in [0, 1), (rows, 1). The first token is chosen at which the sum of probabilities, of the
            more probable ones too, is above the number.
    """
    temperature, top_k, top_p = settings
    probabilities, ids = (logits.double() / temperature).softmax(1).sort(dim=1, descending=True, stable=True)
    # (rows, vocabulary), the most probable first. ``before`` is the sum of the more probable ones.
    sums = probabilities.cumsum(1)
    before = sums - probabilities
    places = torch.arange(logits.shape[1], device=logits.device)
    # top_p is of the sum of the top_k, as in transformers and vLLM. The first token is always allowed.
    is_allowed = (places < top_k) & (before < top_p * sums.gather(1, top_k.long() - 1))
    sums = torch.where(is_allowed, probabilities, 0.0).cumsum(1)
    # right=True: a number equal to a sum belongs to the next token, so none of probability 0 is chosen.
    place = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)
    # Rounding may put the number at the sum of all, beyond the last allowed token.
    place = torch.minimum(place, is_allowed.sum(1, keepdim=True) - 1).clamp(min=0)
    tokens: torch.Tensor = ids.gather(1, place)[:, 0]
    return tokens


def _score(
    base: SharedBase,
    samples: Sequence[Sample],
    adapters: Mapping[str, BankAdapter],
    names: Sequence[str | None],
    num_top: int,
) -> dict[int, tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]]:
    """Compute log probabilities of prompts that ask for them, by number of sample. Collective: yes.

    ``names`` are the adapters of such samples on all ranks: each is a request on every rank.
    """
    requests: list[Request] = []
    places: list[tuple[int, int, int]] = []
    for name in dict.fromkeys(names):
        # On ranks without such samples of this adapter, a request without rows.
        rows: list[RowTensors] = []
        for number, sample in enumerate(samples):
            if sample.adapter == name and (sample.prompt_logprobs or sample.top_prompt_logprobs):
                places.append((number, len(requests), len(rows)))
                rows.append(make_scored_row(sample.prompt))
        requests.append(Request(name, rows))
    if not requests:
        return {}
    call = plan_call(base, requests, adapters, is_training=False, num_top=num_top)
    sums = call.run()
    scores = {}
    for number, request, row in places:
        most = samples[number].top_prompt_logprobs
        top = None
        if most:
            logprobs, ids = call.top[request, row]
            top = ids[:, :most].to("cpu", copy=True), logprobs[:, :most].to("cpu", copy=True)
        # Copies, on the host: servers send them to other ranks. Views would take their whole storage with them, and
        # tensors of a device would be restored on that of the sender.
        scores[number] = sums.logprobs[request][row][:-1].to("cpu", copy=True), top
    return scores
