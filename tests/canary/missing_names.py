"""Hides each private name of a library from shardwise in turn, and uses every feature without it.

``python -m tests.canary.missing_names FOLDER`` prints a JSON object: by name, the error of each feature that fails.
"""

import ast
import contextlib
import functools
import importlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, patch_environment
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor.placement_types import _StridedShard

SOURCE = Path(__file__).parents[2] / "src"
NEEDS_A_NAME = "shardwise.models.activations"
"""The module that cannot be imported without a name."""
NAME = re.compile(r"(torch|transformers|accelerate|peft)[\w.]*:[\w.]+")


def sources() -> dict[str, ast.Module]:
    """The modules of the package, by name."""
    paths = {path.relative_to(SOURCE).with_suffix(""): path for path in SOURCE.rglob("*.py")}
    trees = {".".join(short.parts): ast.parse(path.read_text()) for short, path in sorted(paths.items())}
    return {name.removesuffix(".__init__"): tree for name, tree in trees.items() if "__main__" not in name}


def private_names(tree: ast.AST) -> Iterator[str]:
    """The names in a module, as in ``torch._C:_current_graph_task_id``."""
    owners: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "require_private":
            owner, names = map(ast.literal_eval, node.args[:2])
            owners.add(node.args[0])
            yield from (f"{owner}.{name}" for name in names.split())
        elif isinstance(node, ast.Constant) and node not in owners and NAME.fullmatch(str(node.value)):
            yield node.value


# Hiding


def is_asked_by_shardwise() -> bool:
    return sys._getframe(2).f_globals["__name__"].startswith("shardwise")


class Hidden:
    """An attribute that the library itself still sees."""

    def __init__(self, name: str, before: Any) -> None:
        self.name, self.before = name, before

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if is_asked_by_shardwise():
            raise AttributeError(f"no {self.name}")
        if self.name in getattr(instance, "__dict__", {}):
            return instance.__dict__[self.name]
        bind = getattr(type(self.before), "__get__", None)
        return bind(self.before, instance, owner) if bind else self.before

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self.name] = value


def hide(path: str) -> None:
    """Hide a name from shardwise, of a class also in its subclasses."""
    module, _, names = path.partition(":")
    *classes, name = names.split(".")
    owner = functools.reduce(getattr, classes, importlib.import_module(module))
    if isinstance(owner, ModuleType):
        kind: Any = type(owner)

        class Hiding(kind):
            def __getattribute__(self, attribute: str) -> Any:
                if attribute == name and is_asked_by_shardwise():
                    raise AttributeError(f"no {name}")
                return super().__getattribute__(attribute)

            def __getattr__(self, attribute: str) -> Any:  # of lazy modules
                if attribute == name and is_asked_by_shardwise():
                    raise AttributeError(f"no {name}")
                return super().__getattr__(attribute)

        owner.__class__ = Hiding
        return
    kinds = [owner]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for kind in kinds:
        if kind is owner or name in vars(kind):
            before = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
            setattr(kind, name, Hidden(name, before))


# Features


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore("store", 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.scale = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Parameter(torch.ones(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(rows)) * self.scale


class OwnConfig(transformers.LlamaConfig):
    model_type = "own"


class Own(transformers.LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.table = [torch.arange(4)]


LORA = {"r": 2, "target_modules": ["model.layers.0.self_attn.q_proj"]}


def opened(folder: Path, name: str = "llama", **keywords: Any) -> Any:
    import shardwise

    return shardwise.from_pretrained(
        str(folder / name), options=shardwise.options.LoadOptions(progress=False), **keywords
    )


def inspect(folder: Path) -> None:
    from shardwise.cli import main

    with contextlib.redirect_stdout(io.StringIO()):
        main(["inspect", str(folder / "llama")], standalone_mode=False)


def module(folder: Path) -> None:
    import shardwise

    shardwise.save(Net(), "net")
    with torch.device("meta"):
        model = Net()
    shardwise.load(model, "net")


def renamed(folder: Path) -> None:
    import shardwise

    shardwise.save(nn.Linear(4, 4), "linear")
    shardwise.load(nn.Sequential(nn.Linear(4, 4)), "linear", key_mapping={"^": "0."})


def sharded(folder: Path) -> None:
    import shardwise
    from shardwise.fsdp.gradients import clip_gradients

    model = Net()
    with one_rank():
        shardwise.shard(model, shardwise.Sharding(wrap="whole_model"))
        model(torch.randn(3, 4)).sum().backward()
        clip_gradients(list(model.parameters()), 1e-3)


def process_group(folder: Path) -> None:
    from shardwise.fsdp import torch_private

    with one_rank():
        torch_private.default_store()
        torch_private.set_timeout(60)
        torch_private.get_given_timeout(None)
        torch_private.object_device(None)


def strided(_: Path) -> None:
    from shardwise.fsdp import torch_private

    assert torch_private.local_runs(8, ((_StridedShard(0, split_factor=2), 2, 0),)) == ((0, 2), (4, 2))


def checkpoint(folder: Path) -> None:
    import shardwise

    model = Net()
    state = shardwise.TrainState(model, torch.optim.AdamW(model.parameters()))
    with shardwise.Checkpointer("checkpoints") as checkpointer:
        checkpointer.save(1, state)
        checkpointer.restore(state)


def pretrained(folder: Path) -> None:
    import shardwise

    shardwise.save(opened(folder), "saved")


def not_loaded(folder: Path) -> None:
    import shardwise

    config = transformers.AutoConfig.from_pretrained(folder / "mixtral")
    shardwise.save(transformers.MixtralForCausalLM(config), "not loaded")


def initialized(folder: Path) -> None:
    opened(folder, resize_vocab=9)


def auto_class(folder: Path) -> None:
    opened(folder, model_class=transformers.AutoModelForCausalLM)


def registered_class(folder: Path) -> None:
    opened(folder, "own")


def own_code(folder: Path) -> None:
    import shardwise

    Own.register_for_auto_class("AutoModelForCausalLM")
    shardwise.save(opened(folder, "own", model_class=Own), "own code")


def converted(folder: Path) -> None:
    import shardwise

    shardwise.save(opened(folder, "mixtral"), "saved mixtral")


def lora(folder: Path) -> None:
    import shardwise

    model = opened(folder, tuning=shardwise.Lora(LoraConfig(**LORA)))
    shardwise.save_adapter(model, "saved adapter")


def existing_lora(folder: Path) -> None:
    import shardwise

    opened(folder, tuning=shardwise.ExistingLora(folder / "adapter"))


def earlier_lora(_: Path) -> None:
    from shardwise.models.lora import peft_private

    assert peft_private.scaling(LoraConfig(**LORA), "q_proj", 2) == 4


def merged(folder: Path) -> None:
    import shardwise

    shardwise.merge_adapter(folder / "llama", folder / "adapter", "merged")


def plan(folder: Path) -> None:
    import shardwise

    shardwise.plan(str(folder / "llama"), ranks=2)


def plan_of_activations(folder: Path) -> None:
    import shardwise

    step = {"per_device_train_batch_size": 1, "max_length": 4, "tuning": shardwise.Full()}
    shardwise.plan(str(folder / "llama"), ranks=2, **step)


def bank(folder: Path) -> None:
    import shardwise

    own = shardwise.AdapterBank(opened(folder, dtype="float32"))
    ids = torch.ones(2, 4, dtype=torch.int64)
    for name in ("ada", "bob"):
        own.add_adapter(name, LoraConfig(**LORA), optimizer=torch.optim.AdamW)
    own.forward_backward([(name, {"input_ids": ids, "labels": ids}) for name in own.names])


def trainer(folder: Path) -> None:
    from shardwise.integrations import for_trainer

    for_trainer(opened(folder))


def accelerating(folder: Path) -> None:
    import shardwise
    from shardwise.integrations import accelerate, fsdp_ram_efficient_loading

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    environment = patch_environment(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    with environment, one_rank(), fsdp_ram_efficient_loading(), accelerate():
        transformers.LlamaForCausalLM.from_pretrained(folder / "llama")
        shardwise.shard(model, shardwise.Sharding(wrap="whole_model"), optimizers=[optimizer])
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        accelerator.prepare(model, optimizer)
        accelerator.save_state("accelerate")


FEATURES: tuple[Callable[[Path], None], ...] = (
    inspect,
    module,
    renamed,
    sharded,
    process_group,
    strided,
    checkpoint,
    pretrained,
    not_loaded,
    initialized,
    auto_class,
    registered_class,
    own_code,
    converted,
    lora,
    existing_lora,
    earlier_lora,
    merged,
    plan,
    plan_of_activations,
    bank,
    trainer,
    accelerating,
)


def failures(folder: Path) -> dict[str, str]:
    """The errors of features that fail, by feature."""
    os.chdir(tempfile.mkdtemp(dir=folder))
    found = {}
    for feature in FEATURES:
        try:
            feature(folder)
        except Exception as error:
            found[feature.__name__] = f"{type(error).__name__}: {error}"
    return found


def in_child(act: Callable[..., Any], *args: Any) -> Any:
    """The outcome of a function, of which this process keeps nothing."""
    reads, writes = os.pipe()
    if os.fork() == 0:
        with open(writes, "w") as file:
            try:
                json.dump(act(*args), file)
            except BaseException as error:
                json.dump(repr(error), file)
        os._exit(0)
    os.close(writes)
    with open(reads) as file:
        outcome = json.load(file)
    os.wait()
    return outcome


def import_all(modules: Iterable[str]) -> list[str]:
    """The modules that cannot be imported."""
    failed = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:
            failed.append(name)
    return failed


def import_without(paths: Iterable[str], modules: Iterable[str]) -> list[str]:
    for path in paths:
        hide(path)
    return import_all(modules)


def use_without(path: str, folder: Path) -> dict[str, str]:
    from shardwise.core.errors import find_private

    hide(path)
    find_private.cache_clear()
    return failures(folder)


def save_models(folder: Path) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 1, "head_dim": 8}
    small = {**sizes, "num_attention_heads": 1, "num_key_value_heads": 1}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, tie_word_embeddings=True))
    llama.save_pretrained(folder / "llama")
    Own(OwnConfig(**small)).save_pretrained(folder / "own")
    experts = transformers.MixtralConfig(**small, num_local_experts=2, num_experts_per_tok=1)
    transformers.MixtralForCausalLM(experts).save_pretrained(folder / "mixtral")
    get_peft_model(llama, LoraConfig(**LORA, init_lora_weights=False)).save_pretrained(folder / "adapter")


def main(folder: Path) -> dict[str, Any]:
    """What fails without which name: imports (without all of them), and features."""
    transformers.logging.disable_progress_bar()
    transformers.AutoConfig.register("own", OwnConfig)
    transformers.AutoModelForCausalLM.register(OwnConfig, Own)
    save_models(folder)
    trees = sources()
    names = sorted({name for tree in trees.values() for name in private_names(tree)})
    for name in names:
        importlib.import_module(name.partition(":")[0])
    imports = in_child(import_all, trees), in_child(import_without, names, trees)
    import_all(set(trees) - {NEEDS_A_NAME})
    features = {"": in_child(failures, folder)}
    return {
        "imports": imports,
        "features": features | {name: in_child(use_without, name, folder) for name in names},
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
