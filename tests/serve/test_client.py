"""The unmodified client against a server."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tinker
import torch
from peft import PeftModel
from tests.serve.conftest import VOCAB_SIZE, Served, make_base
from tests.support.local_ranks import LIMIT_S
from tinker import types

from shardwise import AdapterBank
from shardwise.bank.rows import Request
from shardwise.ranks.world import World
from shardwise.serve.checkpoints import CheckpointStore, parse_path
from shardwise.serve.engine import Engine
from shardwise.serve.keys import find_key
from shardwise.serve.operations import CreateModel, Turn

ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.01, grad_clip_norm=1.0)
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")


@pytest.fixture(scope="module")
def clients(served: Served) -> dict[str, Any]:
    return {name: tinker.ServiceClient(base_url=served.url, api_key=key) for name, key in served.keys.items()}


def make_rows(seed: int, lengths: Sequence[int], loss: str = "cross_entropy") -> list[dict[str, torch.Tensor]]:
    """Rows as the bank takes them."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(0, VOCAB_SIZE, (length + 1,), generator=generator)
        row = {"input_ids": ids[:-1], "targets": ids[1:], "weights": torch.rand(length, generator=generator)}
        if loss != "cross_entropy":
            row["logprobs"] = -4.5 + 0.1 * torch.randn(length, generator=generator)
            row["advantages"] = torch.randn(length, generator=generator)
        rows.append(row)
    return rows


def to_data(rows: Sequence[dict[str, torch.Tensor]]) -> list[types.Datum]:
    data = []
    for row in rows:
        inputs = {
            "target_tokens" if key == "targets" else key: value for key, value in row.items() if key != "input_ids"
        }
        tensors = {key: types.TensorData.from_torch(value) for key, value in inputs.items()}
        text = types.ModelInput.from_ints(row["input_ids"].tolist())
        data.append(types.Datum(model_input=text, loss_fn_inputs=tensors))
    return data


def make_bank(ranks: dict[str, int], parts: frozenset[str]) -> AdapterBank:
    """A bank with what the server makes of requests for models."""
    model = make_base()
    bank = AdapterBank(model)
    engine = Engine(World.current(call="test"), bank, model)
    engine.run(Turn(tuple(CreateModel(name, name, rank, 7, parts) for name, rank in ranks.items())))
    return bank


def step_bank(bank: AdapterBank, name: str) -> None:
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.01, "max_grad_norm": 1.0}
    bank.optim_step({name: settings})


ALL = frozenset(("attn", "mlp", "unembed"))


def test_users_at_once_get_the_losses_of_a_bank(clients: dict[str, Any]) -> None:
    """Ranks 4 and 16 of two users, each loss for two steps, chunks of 3 rows, steps sent before passes are done."""
    ranks = {"ada": 4, "bo": 16}

    def train(name: str) -> list[float]:
        model = clients[name].create_lora_training_client("base", rank=ranks[name], seed=7).result()
        losses = []
        for number, loss in enumerate(LOSSES):
            data = to_data(make_rows(number, [5, 9, 30, 17], loss))
            for _ in range(2):
                passed, stepped = model.forward_backward(data, loss), model.optim_step(ADAM)
                losses.append(passed.result().metrics["loss:sum"])
                assert stepped.result().metrics["skipped:max"] == 0.0
        return losses

    with ThreadPoolExecutor() as pool:
        found = dict(zip(ranks, pool.map(train, ranks), strict=True))
    bank = make_bank(ranks, ALL)
    for name in ranks:
        expected = []
        for number, loss in enumerate(LOSSES):
            rows = make_rows(number, [5, 9, 30, 17], loss)
            for _ in range(2):
                expected.append(bank.forward_backward([Request(name, rows, loss)]).requests[0].loss)
                step_bank(bank, name)
        assert found[name] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_loss_of_the_clients_own(clients: dict[str, Any]) -> None:
    model = clients["ada"].create_lora_training_client("base", rank=4).result()
    data = to_data(make_rows(3, [6, 8]))

    def loss(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = sum((row.exp().sum() for row in logprobs), torch.zeros(()))
        return -total, {"mine": float(total.detach())}

    first = model.forward_backward_custom(data, loss)
    model.optim_step(ADAM).result()
    before = first.result().metrics["mine"]
    assert model.forward_backward_custom(data, loss).result().metrics["mine"] > before


def test_targets_of_distillation_and_sparse_ones(clients: dict[str, Any]) -> None:
    model = clients["ada"].create_lora_training_client("base", rank=4).result()
    generator = torch.Generator().manual_seed(0)
    ids, targets = (
        torch.randint(0, VOCAB_SIZE, (7,), generator=generator),
        torch.randint(1, VOCAB_SIZE, (7, 8), generator=generator),
    )
    weights = torch.rand(7, 8, generator=generator)
    targets[2:, 1:], weights[2:, 1:] = 0, 0.0
    text = types.ModelInput.from_ints(ids.tolist())
    dense = {"target_tokens": types.TensorData.from_torch(targets), "weights": types.TensorData.from_torch(weights)}
    sparse = {
        "target_tokens": types.TensorData.from_torch_sparse(targets),
        "weights": types.TensorData.from_torch_sparse(weights),
    }
    assert sparse["weights"].sparse_col_indices is not None
    results = [
        model.forward([types.Datum(model_input=text, loss_fn_inputs=inputs)], "cross_entropy").result()
        for inputs in (dense, sparse)
    ]
    first, second = (result.loss_fn_outputs[0]["logprobs"].to_torch() for result in results)
    assert first.shape == (7, 8)
    assert torch.equal(first[weights > 0], second[weights > 0])
    assert results[0].metrics["loss:sum"] == pytest.approx(results[1].metrics["loss:sum"])


def test_a_batch_of_which_a_part_failed_is_not_stepped(clients: dict[str, Any]) -> None:
    model = clients["ada"].create_lora_training_client("base", rank=4).result()
    rows = make_rows(1, [5, 6, 7, 8])
    before = model.forward(to_data(rows), "cross_entropy").result().metrics["loss:sum"]
    rows[3]["targets"] = rows[3]["targets"].clone()
    rows[3]["targets"][0] = VOCAB_SIZE  # in the second chunk
    passed, stepped = model.forward_backward(to_data(rows), "cross_entropy"), model.optim_step(ADAM)
    with pytest.raises(tinker.RequestFailedError, match=r"targets are from .* The model has 96 tokens"):
        passed.result()
    with pytest.raises(tinker.RequestFailedError, match="failed since the last step. No step was taken"):
        stepped.result()
    after = model.forward(to_data(make_rows(1, [5, 6, 7, 8])), "cross_entropy").result()
    assert after.metrics["loss:sum"] == before
    model.forward_backward(to_data(make_rows(1, [5, 6, 7, 8])), "cross_entropy").result()
    assert model.optim_step(ADAM).result().metrics["skipped:max"] == 0.0


@pytest.mark.parametrize(
    ("loss", "config", "words"),
    [
        ("stable_reinforce", None, "is not served. Use cross_entropy"),
        ("ppo", {"clip": 0.2}, "ppo has no setting 'clip'"),
        ("ppo", {"clip_high_threshold": 0.28}, "clip_high_threshold=0.28 of ppo: are no bounds of a ratio"),
        ("importance_sampling", None, "has no logprobs, advantages, which importance_sampling needs"),
    ],
)
def test_what_is_not_served_is_said(clients: dict[str, Any], loss: str, config: Any, words: str) -> None:
    model = clients["bo"].create_lora_training_client("base", rank=2).result()
    with pytest.raises(tinker.RequestFailedError, match=words):
        model.forward_backward(to_data(make_rows(1, [5])), loss, config).result()


@pytest.mark.filterwarnings("ignore:DEPRECATED")
def test_saved_models_resume_and_open_in_peft(served: Served, clients: dict[str, Any]) -> None:
    model = clients["ada"].create_lora_training_client("base", rank=4, train_unembed=False).result()
    data = to_data(make_rows(5, [9, 12]))

    def step(each: Any) -> float:
        passed = each.forward_backward(data, "cross_entropy")
        each.optim_step(ADAM).result()
        return float(passed.result().metrics["loss:sum"])

    step(model)
    path = model.save_state("first/of all %").result().path
    resumed = clients["ada"].create_training_client_from_state_with_optimizer(path).result()
    weights_alone = clients["ada"].create_training_client_from_state(path).result()
    losses = [[step(each) for _ in range(3)] for each in (model, resumed, weights_alone)]
    assert losses[0] == losses[1]
    assert losses[0][0] == losses[2][0]
    assert losses[0][2] != losses[2][2]
    model.load_state_with_optimizer(path).result()
    assert step(model) == losses[1][0]
    rest = clients["ada"].create_rest_client()
    listed = rest.list_user_checkpoints().result().checkpoints
    assert path in [each.tinker_path for each in listed]
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    key = find_key(served.server._keys, served.keys["ada"])
    assert key is not None
    folder = CheckpointStore(served.state).folder(key.folder, parse_path(path))
    assert folder.is_relative_to(served.state)
    peft_model = PeftModel.from_pretrained(make_base(), folder)
    row = make_rows(5, [9])[0]
    with torch.no_grad():
        logits = peft_model(input_ids=row["input_ids"].unsqueeze(0)).logits[0]
    expected = logits.log_softmax(1).gather(1, row["targets"].unsqueeze(1))[:, 0]
    loaded = clients["ada"].create_training_client_from_state(path).result()
    output = loaded.forward(to_data([row]), "cross_entropy").result().loss_fn_outputs[0]
    torch.testing.assert_close(output["logprobs"].to_torch(), expected, atol=1e-5, rtol=1e-5)


def test_samples_and_scores(clients: dict[str, Any]) -> None:
    model = clients["ada"].create_lora_training_client("base", rank=4).result()
    data = to_data(make_rows(5, [9]))
    for _ in range(3):
        model.forward_backward(data, "cross_entropy")
        model.optim_step(ADAM).result()
    prompt = data[0].model_input
    sampler = model.save_weights_and_get_sampling_client().result()
    scores = sampler.compute_logprobs(prompt).result()
    targets = model.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert scores[0] is None
    assert scores[1:] == pytest.approx(targets[:-1], abs=1e-5)
    greedy = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
    output = sampler.sample(prompt, 2, greedy).result()
    assert [len(each.tokens) for each in output.sequences] == [6, 6]
    assert list(output.sequences[0].tokens) == list(output.sequences[1].tokens)
    tokens = list(output.sequences[0].tokens)
    stopped = sampler.sample(
        prompt, 1, types.SamplingParams(max_tokens=6, temperature=0.0, stop=[tokens[2]])
    ).result()
    assert stopped.sequences[0].stop_reason == "stop"
    assert list(stopped.sequences[0].tokens) == tokens[: tokens.index(tokens[2]) + 1]
    top = sampler.sample(prompt, 1, greedy, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    assert top.topk_prompt_logprobs_np.logprobs.shape == (9, 2)
    assert top.topk_prompt_logprobs[0] is None
    options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_logprobs_last_n": 3}
    last = sampler.sample(prompt, 1, greedy, **options).result()
    assert last.topk_prompt_logprobs == [None] * 6 + top.topk_prompt_logprobs[6:]
    named = model.save_weights_for_sampler("for sampling").result().path
    again = clients["ada"].create_sampling_client(model_path=named).result().sample(prompt, 1, greedy).result()
    assert list(again.sequences[0].tokens) == list(output.sequences[0].tokens)
    # Saved again under the same name, it is another checkpoint, though the first one is still loaded.
    model.forward_backward(data, "cross_entropy")
    model.optim_step(ADAM).result()
    assert model.save_weights_for_sampler("for sampling").result().path == named
    latest = clients["ada"].create_sampling_client(model_path=named).result().compute_logprobs(prompt).result()
    snapshot = model.save_weights_and_get_sampling_client().result().compute_logprobs(prompt).result()
    assert latest[1:] == pytest.approx(snapshot[1:], abs=1e-5)
    assert latest[1:] != pytest.approx(scores[1:], abs=1e-3)
    base = clients["ada"].create_sampling_client(base_model="base").result()
    assert base.compute_logprobs(prompt).result()[1:] != pytest.approx(scores[1:], abs=1e-3)


def test_refused_requests_have_their_places(clients: dict[str, Any]) -> None:
    model = clients["ada"].create_lora_training_client("base", rank=2).result()
    with pytest.raises(tinker.RequestFailedError, match="save_weights_external: is not served"):
        model.save_weights_external("x").result()
    with pytest.raises(tinker.RequestFailedError, match="Send at most 65536"):
        model.save_state("x", user_metadata={"note": "x" * (1 << 16)}).result()
    model.optim_step(ADAM).result(timeout=30)
    rows = make_rows(0, [100])
    rows[0] |= {"targets": torch.ones((100, 9000), dtype=torch.int64), "weights": torch.ones((100, 9000))}
    with pytest.raises(tinker.RequestFailedError, match="Send at most 10000000"):
        model.forward_backward(to_data(rows), "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="failed since the last step"):
        model.optim_step(ADAM).result(timeout=30)
    model.optim_step(ADAM).result(timeout=30)


@pytest.mark.filterwarnings("ignore:DEPRECATED")
def test_calls_that_are_not_served_are_named(clients: dict[str, Any]) -> None:
    rest = clients["bo"].create_rest_client()
    words = "this server does not serve it. See 'What is served' in docs/serve.md"
    with pytest.raises(tinker.NotFoundError, match=f"GET /api/v1/training_runs: {words}"):
        rest.list_training_runs().result()
    path = "/api/v1/training_runs/a/checkpoints/weights/b/ttl"
    with pytest.raises(tinker.APIStatusError, match=f"PUT {path}: {words}"):
        rest.set_checkpoint_ttl_from_tinker_path("tinker://a/weights/b", 7200).result()


def test_limits_of_a_key(clients: dict[str, Any]) -> None:
    with pytest.raises(tinker.RequestFailedError, match="your key allows 1 to 8"):
        clients["cy"].create_lora_training_client("base", rank=16).result()
    with pytest.raises(tinker.RequestFailedError, match="this server has 'base'"):
        clients["cy"].create_lora_training_client("other", rank=4).result()


def test_a_batch_above_the_tokens_of_a_key_is_answered(clients: dict[str, Any]) -> None:
    """Chunks have 60 tokens. The client sends the first one last, and the key may have 100 tokens that wait."""
    model, other = (clients["gus"].create_lora_training_client("base", rank=2).result() for _ in range(2))
    passed = model.forward_backward(to_data(make_rows(0, [20] * 6)), "cross_entropy")
    assert len(passed.result(LIMIT_S).loss_fn_outputs) == 6
    with pytest.raises(tinker.RequestFailedError, match="max_tokens: the batch has more than 100 tokens"):
        model.forward_backward(to_data(make_rows(0, [20] * 9)), "cross_entropy").result(LIMIT_S)
    assert other.forward_backward(to_data(make_rows(0, [50])), "cross_entropy").result(LIMIT_S).metrics
    with pytest.raises(tinker.RequestFailedError, match="failed since the last step"):
        model.optim_step(ADAM).result(LIMIT_S)


def test_info_names_no_path_of_the_server(clients: dict[str, Any]) -> None:
    model = clients["bo"].create_lora_training_client("base", rank=2).result()
    info = model.get_info()
    assert (info.model_data.model_name, info.model_data.tokenizer_id) == ("base", "base-tokenizer")
