"""GRPO and distillation with a stand-in for vLLM's engine: what it is sent, and the merged model of one process."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.saving.merged import merge_in_one_process
from tests.training import on_ranks, tiny
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl.generation import vllm_client, vllm_generation
from trl.trainer import distillation_trainer

from shardwise.core.errors import ShardwiseError
from shardwise.training import trl_objects
from shardwise.transfer.replicas import ShardSender

Weights = dict[str, torch.Tensor]

STEPS = 3

LORA: dict[str, Any] = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
EXPERTS = LORA | {
    "lora_target_modules": ["q_proj", "o_proj"],
    "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("model", {}),
    "lora": ("model", LORA),
    "qlora": ("wide", LORA | {"load_in_4bit": True}),
    "experts": ("mixture", {}),
    "lora of experts": ("mixture", EXPERTS),
    "qlora of experts": ("mixture", EXPERTS | {"load_in_4bit": True}),
    "distillation": ("model", LORA | {"method": "distillation", "teacher_model_name_or_path": "teacher"}),
}
"""Folders of models, and keys."""


def write_mixture(folder: Path) -> Path:
    """A model with fused experts, whose rows are whole blocks of 64."""
    config = tiny.model().config.to_dict() | {"hidden_size": 64, "tie_word_embeddings": False}
    config |= {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    for name in ("architectures", "model_type", "intermediate_size", "layer_types"):
        config.pop(name, None)
    torch.manual_seed(3)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).save_pretrained(folder / "mixture")
    tiny.tokenizer().save_pretrained(folder / "mixture")
    return folder / "mixture"


def answer(prompt: list[int], number: int) -> list[int]:
    """The tokens of the ``number``-th answer to a prompt."""
    return [(sum(prompt) + 7 * number + 3 * place) % 200 + 30 for place in range(4 + number)]


class WeightServer(ThreadingHTTPServer):
    """vLLM's server, as far as TRL's client asks it. Answers to an update of weights once it has received them all.

    Attributes:
        calls: paths of requests that change it, in order.
        announced: what each update says of its tensors: name, dtype, shape.
        refused: a path that is answered with an error in the second update, and after it.
    """

    refused = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.calls: list[str] = []
        self.announced: list[list[list[Any]]] = []
        self.received = threading.Semaphore(0)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "WeightServer":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: WeightServer

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        info = {"weight_transfer_config": {"backend": "nccl"}, "model_config": {}}
        info["model_config"]["logprobs_mode"] = "processed_logprobs"
        found: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"data": [{"id": "model"}]},
            "/server_info": {"vllm_config": info},
            "/get_world_size": {"world_size": 1},
        }
        self._reply(found[self.path.partition("?")[0]])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        name = self.path.rpartition("/")[2]
        if name == "received":  # by the stand-in for NCCL
            self.server.received.release()
            return self._reply({})
        if name == "completions":
            return self._reply({"choices": [_choice(ids, n) for ids in body["prompt"] for n in range(body["n"])]})
        self.server.calls.append(name)
        if name == self.server.refused and self.server.calls.count(name) > 1:
            # TRL repeats a request that is answered with 500.
            return self._reply({"error": "gone"}, status=500 if name == "update_weights" else 400)
        if name == "update_weights":
            info = body["update_info"]
            rows = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
            self.server.announced.append([list(row) for row in rows])
            assert self.server.received.acquire(timeout=600)
        return self._reply({"success": True})

    def _reply(self, found: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _choice(prompt: list[int], number: int) -> dict[str, Any]:
    tokens = answer(prompt, number)
    names = [f"token_id:{token}" for token in tokens]
    logprobs = {"tokens": names, "token_logprobs": [-5.5] * len(tokens)}
    logprobs["top_logprobs"] = [{name: -5.5} for name in names]  # type: ignore[misc]
    return {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": logprobs}


@dataclass
class Engine:
    """vLLM's ``LLM`` of this rank, and its side of the transfer from a trainer. Keeps what it is sent.

    Attributes:
        syncs: weights of each update.
        fails_in: the update in which this rank's engine refuses a tensor, beginning with 1.
    """

    syncs: list[Weights] = field(default_factory=list)
    fails_in: int = 0
    loading: Weights = field(default_factory=dict)

    def __call__(self, **settings: Any) -> "Engine":
        self.settings = settings
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=SimpleNamespace(model=self)))
        )
        return self

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            if len(self.syncs) + 1 == self.fails_in and len(self.loading) == 2:
                raise KeyError("no such parameter")
            assert name not in self.loading
            self.loading[name] = tensor.clone()

    def reset_prefix_cache(self) -> None:
        self.syncs.append(self.loading)
        self.loading = {}

    def generate(self, prompts: list[dict[str, Any]], **_: Any) -> list[Any]:
        """Answer each prompt once. The same answers on any number of ranks: a prompt comes twice in turn."""
        outputs = []
        for place, prompt in enumerate(prompts):
            tokens = answer(prompt["prompt_token_ids"], place % 2)
            logprobs = [{token: SimpleNamespace(rank=1, logprob=-5.5)} for token in tokens]
            output = SimpleNamespace(token_ids=tokens, logprobs=logprobs)
            outputs.append(SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[output]))
        return outputs

    # The first rank's side of NCCL

    def trainer_send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
        for pair in iterator:
            self.load_weights([pair])
        self.reset_prefix_cache()
        trainer_args.group._post(f"{trainer_args.group.base_url}/received", json={})

    def init_communicator(self, client: Any) -> None:
        client._post(f"{client.base_url}/init_weight_transfer_engine", json={"init_info": client.get_server_info()})
        client.communicator = client


@contextmanager
def vllm(engine: Engine) -> Iterator[None]:
    """An engine in the place of vLLM's, and of its NCCL transfer, in TRL's modules."""

    def init_communicator(client: Any, device: Any) -> None:  # TRL's own refuses a CPU
        engine.init_communicator(client)

    with ExitStack() as stack:
        for module in (vllm_generation, vllm_client, trl_objects, distillation_trainer):
            stack.enter_context(mock.patch.object(module, "is_vllm_available", return_value=True))
        for module, name, value in (
            (vllm_generation, "LLM", engine),
            (vllm_generation, "SamplingParams", SimpleNamespace),
            (vllm_client, "NCCLTrainerSendWeightsArgs", SimpleNamespace),
            (vllm_client, "NCCLWeightTransferEngine", engine),
        ):
            stack.enter_context(mock.patch.object(module, name, value, create=True))
        stack.enter_context(mock.patch.object(vllm_client.VLLMClient, "init_communicator", init_communicator))
        yield


def train(
    values: dict[str, Any], engine: Engine, before_sync: Callable[[Any], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Train on this rank with an engine; what was logged."""
    make = trl_objects.make_trainer

    def make_trainer(arguments: Any, model: Any, *others: Any) -> Any:
        trainer = make(arguments, model, *others)
        generation = trainer.vllm_generation
        sync = generation.sync_weights

        def sync_weights() -> None:
            before_sync(arguments)
            sync()

        generation.sync_weights = sync_weights
        return trainer

    with vllm(engine), mock.patch.object(trl_objects, "make_trainer", make_trainer):
        outcome, _ = on_ranks.train(values)
    return [dict(entry) for entry in outcome.history]


def keys(folder: str, kind: str, url: str | None, output: str) -> dict[str, Any]:
    """Of a training with the engine in a server, or in this process."""
    model, further = KINDS[kind]
    size = dist.get_world_size()
    values = {
        "method": "grpo",
        "model_name_or_path": f"{folder}/{model}",
        "dataset_name": f"{folder}/prompts.jsonl",
        "output_dir": f"{output}/{kind}-{url is None}-{size}".replace(" ", "-"),
        "reward_funcs": ["tests.training.on_ranks.letters"],
        "num_generations": 2,
        "max_completion_length": 8,
        "max_length": None,
        "max_steps": STEPS,
        "optim": "sgd",  # which does not scale up the rounding of gradients that are nearly zero
        "learning_rate": 0.1,
        "per_device_train_batch_size": 4 // size,
        "use_vllm": True,
        "vllm_mode": "colocate",
        **further,
    }
    if values["method"] == "distillation":
        values["teacher_model_name_or_path"] = f"{folder}/teacher"
        for key in ("reward_funcs", "num_generations"):
            del values[key]
    return values | ({"vllm_mode": "server", "vllm_server_base_url": url} if url else {})


def compare(folder: str, kind: str, url: str | None, output: str) -> tuple[list[str], list[list[Any]], list[Any]]:
    """Train on this rank. What the engine was sent that the merged model of one process does not have.

    Also the description of the first update (name, dtype, shape), and what was logged of each step.
    """
    rank = dist.get_rank()  # the process group ends with the training
    engine, wanted = Engine(), list[Weights]()
    models: list[Any] = []
    load = trl_objects.load_model

    def load_model(arguments: Any) -> Any:
        models.append(load(arguments))
        return models[-1]

    with mock.patch.object(trl_objects, "load_model", load_model):
        history = train(
            keys(folder, kind, url, output),
            engine,
            lambda arguments: wanted.append(
                merge_in_one_process(
                    models[-1], arguments.model.model_name_or_path, trl_objects.lora_config(arguments)
                )
            ),
        )
    faults = [] if len(wanted) == STEPS else [f"{len(wanted)} updates"]
    if url is None or rank == 0:
        for number, (found, expected) in enumerate(zip(engine.syncs, wanted, strict=True)):
            faults += [f"{number}: {name} is in one only" for name in found.keys() ^ expected.keys()]
            for name in found.keys() & expected.keys():
                one, other = found[name], expected[name]
                is_like = one.dtype == other.dtype and one.shape == other.shape
                if not is_like or not torch.allclose(one, other, rtol=1e-5, atol=1e-6):
                    faults.append(f"{number}: {name}")
            before = engine.syncs[number - 1]
            if number and all(torch.equal(before[name], found[name]) for name in found):
                faults.append(f"{number}: nothing has changed")
    described = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in (engine.syncs[0] if engine.syncs else {}).items()
    ]
    last = "entropy" if kind == "distillation" else "reward"
    steps = [(entry["loss"], entry["grad_norm"], entry[last]) for entry in history if "loss" in entry]
    return faults, described, steps


def fail(folder: str, where: str, url: str | None, output: str) -> str:
    """The error of a training on this rank in which something fails on one, or of a quantized model."""
    rank = dist.get_rank()
    failing_rank = {"engine": 1, "sender": 0}.get(where)
    engine = Engine(fails_in=2 if rank == failing_rank else 0)
    values = keys(folder, "lora", url, output) | {"vllm_server_timeout": 0.0}
    if where == "quantized":
        values["model_name_or_path"] = f"{folder}/quantized"
    share, count = ShardSender.values, itertools.count()

    def values_of(sender: ShardSender, name: str, box: Any) -> torch.Tensor:
        if where == "stream" and rank == 1 and len(engine.loading) + next(count) > 40:
            raise OSError("the memory is gone")
        return share(sender, name, box)

    try:
        with mock.patch.object(ShardSender, "values", values_of):
            train(values, engine)
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""
