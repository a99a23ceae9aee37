"""What ranks do in the tests of a step's work."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import ConfigError, TrainingError
from shardwise.execution.ranks.world import World
from shardwise.models.replicated import average_replicated_gradients
from shardwise.models.wrapping import wrap
from shardwise.models.wrapping.blocks import CompileBlocks, PerBlock
from shardwise.models.wrapping.policies import MinSize, ModelPlan
from shardwise.models.wrapping.wrap import Sharding
from shardwise.training.data.batches import Batch
from shardwise.training.generation import evaluating, generate
from shardwise.training.optimizing.gradients import GradientScaler, clip_gradients
from shardwise.training.optimizing.optimizer_trial import require_synchronised
from shardwise.training.options import TrainOptions
from shardwise.training.parts import parts_of
from shardwise.training.passes.forward import Forward, ShardedGradients, WholeGradients
from shardwise.training.passes.losses import ChunkedLogits, WholeLogits, prepare_loss
from shardwise.training.step import StepWork

WORDS = 96


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


class Scaled(nn.Module):
    """A stack of blocks with a parameter that has no dimensions and so stays whole on every rank."""

    def __init__(self, blocks: int = 2, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([ScaledBlock(width) for _ in range(blocks)])
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return SimpleNamespace(logits=self.head(hidden))


class ScaledBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.scale * torch.tanh(self.linear(hidden))


def qwen3(**changes: Any) -> nn.Module:
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.1}
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**sizes | heads | {"tie_word_embeddings": False} | changes)
    return transformers.Qwen3ForCausalLM(config)


def dropping() -> nn.Module:
    """With dropout in attention and in what follows it."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=WORDS, n_positions=32)
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.2
    config._attn_implementation = "eager"
    return transformers.GPT2LMHeadModel(config)


def batch(rows: int = 2, tokens: int = 12, seed: int = 0) -> Batch:
    """Every third token is not learned."""
    torch.manual_seed(seed)
    ids = torch.randint(0, WORDS, (rows, tokens))
    labels = ids.masked_fill(torch.arange(tokens) % 3 == 2, -100)
    return Batch(ids, torch.ones_like(ids), labels, ids.numel())


def share_of(whole_batch: Batch) -> Batch:
    """This rank's rows; where there are none, one of which nothing is learned."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    rows = slice(rank, None, size)
    ids = whole_batch.input_ids[rows]
    if not len(ids):
        ids = torch.zeros((1, 2), dtype=torch.int64)
        return Batch(ids, torch.ones_like(ids), torch.full_like(ids, -100), 0)
    return Batch(ids, whole_batch.attention_mask[rows], whole_batch.labels[rows], ids.numel())


def hsdp() -> Any:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def sharded(model: nn.Module, **sharding: Any) -> nn.Module:
    """As ``from_pretrained`` and ``shard`` leave a model; itself where there are no ranks."""
    chosen = Sharding(**{"mesh": wrap.default_mesh()} | sharding)
    wrap.prepare_blocks(model, chosen)
    if chosen.mesh is not None:
        wrap.wrap(model, chosen)
        average_replicated_gradients(model, chosen.mesh)
    return model


def work_on(model: nn.Module, **more: Any) -> StepWork:
    options = TrainOptions(max_grad_norm=more.pop("max_grad_norm", math.inf), dtype=more.pop("dtype", "float32"))
    forward = Forward(model, more.pop("loss", WholeLogits()), options.dtype)
    return StepWork(world=World.current(), forward=forward, parts=parts_of(options, model, 1), **more)


@contextmanager
def counting(model: nn.Module) -> Iterator[dict[str, int]]:
    """How often each module whose name ends in "mlp" is run."""
    counts: dict[str, int] = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith("mlp"):

            def count(*_: Any, name: str = name) -> None:
                counts[name] = counts.get(name, 0) + 1

            handles.append(module.register_forward_pre_hook(count))
    yield counts
    for handle in handles:
        handle.remove()


# ── blocks ────────────────────────────────────────────────────────────────────────────────────────


def recomputed(build: Callable[[], nn.Module], sharding: dict[str, Any], every: int) -> dict[str, Any]:
    """A step with and without activation checkpointing, from the same random state."""
    found: dict[str, Any] = {}
    for name, changes in {"kept": {}, "recomputed": {"activation_checkpointing": PerBlock(every)}}.items():
        model = sharded(build(), **sharding, **changes).train()
        rank = dist.get_rank() if dist.is_initialized() else 0
        with counting(model) as counts:
            given = share_of(batch(4))
            torch.manual_seed(7 + rank)
            output = model(input_ids=given.input_ids, labels=given.input_ids)
            output.loss.backward()
        found[name] = {
            "loss": output.loss.item(),
            "random": float(torch.rand(())),
            "gradients": gradients(model),
            "names": [name for name, _ in model.named_parameters()],
            "runs": counts,
        }
    return found


def islands() -> nn.Module:
    """In bfloat16 but for its norms, which become groups inside of blocks."""
    model = qwen3(attention_dropout=0.2, attn_implementation="eager").to(torch.bfloat16)
    for module in model.modules():
        if type(module).__name__ == "Qwen3RMSNorm":
            module.float()
    return model


def islands_recomputed() -> dict[str, Any]:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    return recomputed(islands, {"mp_policy": policy}, 1)


def dropout_recomputed(every: int, offload: bool) -> dict[str, Any]:
    return recomputed(dropping, {"offload_policy": CPUOffloadPolicy()} if offload else {}, every)


def compiled() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, changes in {
        "eager": {},
        "compiled": {"compiling": CompileBlocks(backend="aot_eager")},
        "both": {"compiling": CompileBlocks(backend="eager"), "activation_checkpointing": PerBlock()},
    }.items():
        model = sharded(qwen3(), **changes)
        facts = [work_on(model, max_grad_norm=0.1).gradient([share_of(batch(4, seed=seed))]) for seed in range(2)]
        copied = copy.deepcopy(qwen3()) if dist.is_initialized() else copy.deepcopy(model)
        found[name] = {
            "facts": [(fact.loss, fact.grad_norm) for fact in facts],
            "gradients": gradients(model),
            "names": list(model.state_dict()),
            "copied": sum(1 for _ in copied.parameters()),
        }
    return found


# ── steps ─────────────────────────────────────────────────────────────────────────────────────────


def accumulated(kind: str, mesh: str) -> dict[str, Any]:
    """Three micro-batches of four rows: gradients, facts, and how often gradients are exchanged."""
    accumulation = {"whole": WholeGradients(), "sharded": ShardedGradients()}[kind]
    sharding = {"mesh": hsdp()} if mesh == "hsdp" else {}
    model = sharded(Scaled(), **sharding)
    work = work_on(model, accumulation=accumulation)
    with Collectives() as collectives:
        facts = work.gradient([share_of(batch(4, seed=seed)) for seed in range(3)])
    return {"gradients": gradients(model), "facts": (facts.loss, facts.grad_norm), "calls": collectives.counts}


class Collectives(TorchDispatchMode):
    """Counts collectives, by the first word of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d":
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **kwargs or {})


class Mixed(nn.Module):
    """Parameters of every placement: replicated, sharded, and both on several meshes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = {
            "plain": (5, 4),
            "scalar": (),
            "fsdp": (7, 4),
            "hybrid": (6, 4),
            "both": (8, 6),
            "experts": (4, 6, 4),
        }
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))


def norms(norm_type: float, max_norm: float) -> dict[str, Any]:
    """The norm of gradients that lie on one, two and other meshes, and the gradients after they are clipped."""
    model = Mixed()
    torch.manual_seed(1)
    values = {name: torch.randn(p.shape) * 3 for name, p in model.named_parameters()}
    if dist.is_initialized():
        size = dist.get_world_size()
        line = init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
        grid = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
        places = {
            "fsdp": (line, [Shard(0)]),
            "hybrid": (grid, [Replicate(), Shard(0)]),
            "both": (grid, [Shard(0), Shard(1)]),
            "experts": (grid["tensor"], [Shard(0)]),
        }
        for name, (mesh, placements) in places.items():
            value = distribute_tensor(getattr(model, name).data, mesh, placements)
            setattr(model, name, nn.Parameter(value))
            values[name] = distribute_tensor(values[name], mesh, placements)
    for name, parameter in model.named_parameters():
        parameter.grad = values[name]
    norm = clip_gradients(list(model.parameters()), max_norm, norm_type=norm_type, scale=2.0)
    return {"norm": norm, "gradients": gradients(model)}


def tensor_parallel() -> dict[str, Any]:
    """FSDP2 over one axis and tensor parallelism over the other, beside parameters that are replicated."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.LayerNorm(8))
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
    torch.manual_seed(1)
    model(torch.randn(4, 8)).square().sum().backward()
    norm = clip_gradients(list(model.parameters()), 0.5)
    return {"norm": norm, "gradients": gradients(model)}


def scaled_in_float16(poisoned_rank: int, poisoned: str) -> dict[str, Any]:
    """Three steps by a scaler; in the second, one rank's gradient of one parameter is not finite."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = sharded(Scaled(), mp_policy=policy)
    scaler = GradientScaler(1024.0, patience=2)
    work = work_on(model, scaling=scaler, max_grad_norm=0.05)
    verdicts, scales, facts = [], [], []
    for step in range(3):
        handles: list[Any] = []
        if step == 1 and dist.get_rank() == poisoned_rank:
            module = model.blocks[0].linear if poisoned == "sharded" else model.blocks[0]
            name = "weight" if poisoned == "sharded" else "scale"

            def poison(module: nn.Module, _: Any, name: str = name, handles: list[Any] = handles) -> None:
                handles.append(getattr(module, name).register_hook(lambda gradient: gradient * math.inf))

            handles.append(module.register_forward_pre_hook(poison))
        facts.append(work.gradient([share_of(batch(4, seed=step))]))
        for handle in handles:
            handle.remove()
        verdicts.append(scaler.judge(facts[-1].grad_norm))
        scales.append(scaler.scale)
        clipped = clip_gradients(list(model.parameters()), math.inf) if verdicts[-1] else math.nan
        model.zero_grad()
    return {
        "verdicts": verdicts,
        "scales": scales,
        "norms": [fact.grad_norm for fact in facts],
        "clipped": clipped,
        "loss": facts[0].loss,
        "state": scaler.state_dict(),
    }


def in_precision(dtype: str, offload: bool) -> dict[str, Any]:
    kind = getattr(torch, dtype)
    policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32)
    changes = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    model = sharded(qwen3(), mp_policy=policy, **changes)
    fact = work_on(model, dtype="float32").gradient([share_of(batch(4))])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    return {
        "loss": fact.loss,
        "norm": fact.grad_norm,
        "dtypes": {str(parameter.dtype) for parameter in model.parameters()},
        "grads": {str(parameter.grad.dtype) for parameter in model.parameters()},
    }


def frozen() -> dict[str, Any]:
    """Which parameters have a gradient or optimizer state, when one block is trained."""
    model = qwen3()
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    sharded(model)
    work = work_on(model, accumulation=WholeGradients())
    optimizer = torch.optim.AdamW(work.parts[0].parameters)
    work.gradient([share_of(batch(4, seed=seed)) for seed in range(2)])
    optimizer.step()
    states = {id(parameter) for parameter in optimizer.state}
    return {
        "gradients": sorted(name for name, p in model.named_parameters() if p.grad is not None),
        "states": sorted(name for name, p in model.named_parameters() if id(p) in states),
        "wanted": sorted(name for name, p in model.named_parameters() if name.startswith("model.layers.1.")),
    }


def unsynchronised() -> list[str]:
    """What is said of models whose ranks would drift apart."""
    world = World.current()
    said = []

    def added() -> nn.Module:
        model = sharded(qwen3())
        for layer in model.model.layers:
            layer.mlp.register_parameter("adapter", nn.Parameter(torch.ones(3)))
        return model

    def on_a_part() -> nn.Module:
        model = qwen3()
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("rows", "columns"))
        fully_shard(model, mesh=mesh["rows"])
        return model

    for build in (added, qwen3, on_a_part):
        try:
            require_synchronised(build(), world)
        except ConfigError as error:
            said.append(str(error))
    model = sharded(Scaled())
    require_synchronised(model, world)
    require_synchronised(nn.parallel.DistributedDataParallel(qwen3()), world)
    require_synchronised(qwen3().requires_grad_(False), world)
    return said


# ── losses and answers ────────────────────────────────────────────────────────────────────────────


def capped() -> nn.Module:
    """Softcapped logits, and tied."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=0.3,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    return transformers.Gemma2ForCausalLM(config)


def cohere() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.CohereConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        logit_scale=0.25,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.CohereForCausalLM(config)


def granite() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GraniteConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        logits_scaling=4.0,
        initializer_range=0.2,
    )
    return transformers.GraniteForCausalLM(config)


def tied() -> nn.Module:
    return qwen3(tie_word_embeddings=True)


def adapted() -> nn.Module:
    """With a LoRA in its blocks and on its head, and the base frozen."""
    import peft

    base = qwen3()
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2, init_lora_weights=False)
    return peft.get_peft_model(base, config)


def experts(**changes: Any) -> nn.Module:
    """A mixture of experts whose config asks for the router's loss."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.1}
    router = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes | heads | router | changes))


MODELS = {
    "adapted": adapted,
    "qwen3": qwen3,
    "tied": tied,
    "capped": capped,
    "cohere": cohere,
    "granite": granite,
    "experts": experts,
}


def routed() -> list[Any]:
    """A step of a mixture of experts, a batch for each of two ranks, or both for one."""
    both = [batch(2), batch(2, seed=1)]
    own = both[dist.get_rank() :: 2] if dist.is_initialized() else both
    found = []
    for choice in (WholeLogits(), ChunkedLogits(5)):
        model = sharded(experts())
        loss = prepare_loss(World.current(), model, choice).loss
        facts = work_on(model, loss=loss).gradient(own)
        found.append((facts.loss, facts.grad_norm, gradients(model)))
    return found


def in_chunks(kind: str, plan: str, rows: int = 4) -> dict[str, Any]:
    """A step with whole logits and one in chunks of five tokens; ranks beyond the rows have none."""
    found: dict[str, Any] = {}
    for name, choice in {"whole": WholeLogits(), "chunks": ChunkedLogits(5)}.items():
        model = sharded(MODELS[kind](), **({"wrap": ModelPlan()} if plan == "plan" else {}))
        prepared = prepare_loss(World.current(), model, choice)
        assert not prepared.note, prepared.note
        work = work_on(model, loss=prepared.loss, max_grad_norm=0.1)
        facts = work.gradient([share_of(batch(rows)), share_of(batch(rows, seed=1))])
        with evaluating(model):
            answer = float(prepared.loss.summed(model, batch(2)))
        found[name] = {"facts": (facts.loss, facts.grad_norm), "gradients": gradients(model), "answer": answer}
        found[name]["training"] = model.training
    return found


class Picky(nn.Linear):
    """A head that takes (rows, tokens, width) only."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.ndim != 3:
            raise ValueError("rows of tokens, please")
        return super().forward(hidden)


def failing_head() -> list[Any]:
    torch.manual_seed(0)
    model = qwen3()
    model.lm_head = Picky(16, WORDS, bias=False)
    model = sharded(model, wrap=ModelPlan())
    prepared = prepare_loss(World.current(), model, ChunkedLogits(5))
    facts = work_on(model, loss=prepared.loss).gradient([share_of(batch(4))])
    return [prepared.note, facts.loss, facts.grad_norm, gradients(model)]


def answers() -> dict[str, Any]:
    """Each rank's own prompt, of its own length, continued; what is gathered afterwards; the same alone."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    prompts = [torch.randint(3, WORDS, (rows, 4 + rows)) for rows in (1, 2, 0)]
    alone = qwen3(eos_token_id=2, pad_token_id=0).eval()
    own = prompts[rank]
    keywords = {"do_sample": False, "max_new_tokens": 2 + 3 * rank, "attention_mask": torch.ones_like(own)}
    expected = alone.generate(input_ids=own, **keywords) if len(own) else own
    model = sharded(qwen3(eos_token_id=2, pad_token_id=0))
    model.train()
    found = generate(model, own, **keywords)
    return {
        "found": found.tolist(),
        "expected": expected.tolist(),
        "rows": len(own),
        "gathered": [name for name, p in model.named_parameters() if not isinstance(p, DTensor)],
        "training": model.training,
    }


def adapted_answers() -> list[Any]:
    """A model of PEFT's, whose ``generate`` goes around the forward pass of the root group."""
    import peft

    def build() -> nn.Module:
        model = peft.get_peft_model(
            qwen3(eos_token_id=2, pad_token_id=0), peft.LoraConfig(target_modules=["q_proj"])
        )
        return model.eval()

    prompt = torch.arange(3, 9).unsqueeze(0)
    keywords = {"do_sample": False, "max_new_tokens": 3, "attention_mask": torch.ones_like(prompt)}
    expected = build().generate(input_ids=prompt, **keywords)
    model = build()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    generate(model, prompt, **keywords)
    found = generate(model, prompt, **keywords)
    gathered = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    return [found.tolist() == expected.tolist(), gathered]


def groups(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def resharded(after: Any) -> dict[str, Any]:
    """What is whole between the forward and the backward pass, and the gradients."""
    model = sharded(qwen3(), reshard_after_forward=after, wrap=MinSize(1500))
    given = share_of(batch(4))
    loss = WholeLogits().summed(model, given)
    layer = model.model.layers[0].mlp.gate_proj.weight
    kept = "whole" if not isinstance(layer, DTensor) else str(tuple(layer.device_mesh.shape))
    loss.backward()
    return {"kept": kept, "gradients": gradients(model), "groups": groups(model)}


def refused_reshard(after: int) -> str:
    try:
        sharded(qwen3(), reshard_after_forward=after)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def scaler_gives_up() -> str:
    scaler = GradientScaler(2.0**-14)
    scaler.judge(math.inf)
    try:
        scaler.judge(math.nan)
    except TrainingError as error:
        return str(error)
    return ""
