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
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, patch_environment
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor.placement_types import _StridedShard

import shardwise
from shardwise import cli
from shardwise.core.errors import find_private
from shardwise.fsdp import gradients, torch_private
from shardwise.models.lora import peft_private
from shardwise.models.pretrained import get_unquantized_names

SOURCE = Path(__file__).parents[2] / "src"
NEEDS_A_NAME = "shardwise.models.activations"
"""The module that cannot be imported without a name."""
NAME = re.compile(r"(torch|transformers|accelerate|peft)[\w.]*:\w[\w.]*")


def sources() -> dict[str, str]:
    """The texts of the package's modules, by name."""
    paths = {path.relative_to(SOURCE).with_suffix(""): path for path in sorted(SOURCE.rglob("*.py"))}
    texts = {".".join(short.parts).removesuffix(".__init__"): path.read_text() for short, path in paths.items()}
    return {name: text for name, text in texts.items() if "__main__" not in name}


def private_names(text: str) -> Iterator[str]:
    """The names in a module, as in ``torch._C:_current_graph_task_id``."""
    owners: set[ast.AST] = set()
    for node in ast.walk(ast.parse(text)) if NAME.search(text) else ():
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
    """An attribute that the library itself still sees. With ``uses`` shardwise sees it, too, and is noted."""

    def __init__(self, name: str, before: Any, path: str, uses: set[str] | None) -> None:
        self.name, self.before, self.paths, self.uses = name, before, {path}, uses

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if is_asked_by_shardwise():
            if self.uses is None:
                raise AttributeError(f"no {self.name}")
            self.uses |= self.paths
        if self.name in getattr(instance, "__dict__", {}):
            return instance.__dict__[self.name]
        bind = getattr(type(self.before), "__get__", None)
        return bind(self.before, instance, owner) if bind else self.before

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self.name] = value


def hide_in_module(module: ModuleType, name: str, path: str, uses: set[str] | None) -> None:
    """Hide an attribute of a module.

    A module has one class that hides all its names: of two, the one below would be asked by the one above.
    """
    if "hidden" in vars(type(module)):
        type(module).hidden[name] = path
        return
    kind: Any = type(module)

    class Hiding(kind):
        hidden: ClassVar = {name: path}

        def __getattribute__(self, attribute: str) -> Any:
            if attribute in Hiding.hidden and is_asked_by_shardwise():
                if uses is None:
                    raise AttributeError(f"no {attribute}")
                uses.add(Hiding.hidden[attribute])
            return super().__getattribute__(attribute)

        def __getattr__(self, attribute: str) -> Any:  # of lazy modules
            if attribute in Hiding.hidden and uses is None and is_asked_by_shardwise():
                raise AttributeError(f"no {attribute}")
            return super().__getattr__(attribute)

    module.__class__ = Hiding


def hide(path: str, uses: set[str] | None = None) -> None:
    """Hide a name from shardwise, of a class also in its subclasses. With ``uses`` it is only noted there."""
    module, _, names = path.partition(":")
    *classes, name = names.split(".")
    owner = functools.reduce(getattr, classes, importlib.import_module(module))
    if isinstance(owner, ModuleType):
        hide_in_module(owner, name, path, uses)
        return
    kinds = [owner]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for kind in kinds:
        if isinstance(vars(kind).get(name), Hidden):  # as the attribute of another path
            vars(kind)[name].paths.add(path)
        elif kind is owner or name in vars(kind):
            before = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
            setattr(kind, name, Hidden(name, before, path, uses))


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
    return shardwise.from_pretrained(
        str(folder / name), options=shardwise.options.LoadOptions(progress=False), **keywords
    )


def inspect(folder: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        cli.main(["inspect", str(folder / "llama")], standalone_mode=False)


def module(folder: Path) -> None:
    shardwise.save(Net(), "net")
    with torch.device("meta"):
        model = Net()
    shardwise.load(model, "net")


def renamed(folder: Path) -> None:
    shardwise.save(nn.Linear(4, 4), "linear")
    shardwise.load(nn.Sequential(nn.Linear(4, 4)), "linear", key_mapping={"^": "0."})


def sharded(folder: Path) -> None:
    model = Net()
    with one_rank():
        shardwise.shard(model, shardwise.Sharding(wrap="whole_model"))
        model(torch.randn(3, 4)).sum().backward()
        gradients.clip_gradients(list(model.parameters()), 1e-3)
        shardwise.save(model, "sharded")


def process_group(folder: Path) -> None:
    with one_rank():
        torch_private.default_store()
        torch_private.set_timeout(60)
        torch_private.get_given_timeout(None)
        torch_private.object_device(None)


def strided(_: Path) -> None:
    assert torch_private.local_runs(8, ((_StridedShard(0, split_factor=2), 2, 0),)) == ((0, 2), (4, 2))


def checkpoint(folder: Path) -> None:
    model = Net()
    state = shardwise.TrainState(model, torch.optim.AdamW(model.parameters()))
    with shardwise.Checkpointer("checkpoints") as checkpointer:
        checkpointer.save(1, state)
        checkpointer.restore(state)


def pretrained(folder: Path) -> None:
    shardwise.save(opened(folder), "saved")


def not_loaded(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder / "mixtral")
    shardwise.save(transformers.MixtralForCausalLM(config), "not loaded")


def initialized(folder: Path) -> None:
    opened(folder, resize_vocab=9)


def auto_class(folder: Path) -> None:
    opened(folder, model_class=transformers.AutoModelForCausalLM)


def registered_class(folder: Path) -> None:
    opened(folder, "own")


def own_code(folder: Path) -> None:
    Own.register_for_auto_class("AutoModelForCausalLM")
    shardwise.save(opened(folder, "own", model_class=Own), "own code")


def converted(folder: Path) -> None:
    shardwise.save(opened(folder, "mixtral"), "saved mixtral")


def quantized(folder: Path) -> None:
    assert get_unquantized_names(opened(folder)) == []


def lora(folder: Path) -> None:
    model = opened(folder, tuning=shardwise.Lora(LoraConfig(**LORA)))
    shardwise.save_adapter(model, "saved adapter")


def existing_lora(folder: Path) -> None:
    opened(folder, tuning=shardwise.ExistingLora(folder / "adapter"))


def earlier_lora(_: Path) -> None:
    assert peft_private.scaling(LoraConfig(**LORA), "q_proj", 2) == 4


def merged(folder: Path) -> None:
    shardwise.merge_adapter(folder / "llama", folder / "adapter", "merged")


def plan(folder: Path) -> None:
    shardwise.plan(str(folder / "llama"), ranks=2)


def plan_of_activations(folder: Path) -> None:
    step = {"per_device_train_batch_size": 1, "max_length": 4, "tuning": shardwise.Full()}
    shardwise.plan(str(folder / "llama"), ranks=2, **step)


def bank(folder: Path) -> None:
    own = shardwise.AdapterBank(opened(folder, dtype="float32"))
    ids = torch.ones(2, 4, dtype=torch.int64)
    for name in ("ada", "bob"):
        own.add_adapter(name, LoraConfig(**LORA), optimizer=torch.optim.AdamW)
    own.forward_backward([(name, {"input_ids": ids, "labels": ids}) for name in own.names])


def trainer(folder: Path) -> None:
    with one_rank():
        shardwise.integrations.for_trainer(opened(folder))


def accelerating(folder: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    ranks = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    environment = patch_environment(**ranks, ACCELERATE_USE_FSDP="True", FSDP_CPU_RAM_EFFICIENT_LOADING="True")
    with environment, one_rank(), shardwise.integrations.accelerate():
        transformers.LlamaForCausalLM.from_pretrained(folder / "llama")
        shardwise.shard(model, shardwise.Sharding(wrap="whole_model"), optimizers=[optimizer])
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        accelerator.prepare(model, optimizer)
        accelerator.save_state("accelerate")


OF_TORCH = (inspect, module, sharded, process_group, strided, checkpoint)
OF_MODELS = (
    pretrained,
    not_loaded,
    initialized,
    auto_class,
    registered_class,
    own_code,
    converted,
    renamed,
    quantized,
)
OF_LORAS = (lora, existing_lora, earlier_lora, bank)
FEATURES = (*OF_TORCH, *OF_MODELS, *OF_LORAS, merged, plan, plan_of_activations, trainer, accelerating)


def find_failures(folder: Path, features: Iterable[Callable[[Path], None]] = FEATURES) -> dict[str, str]:
    """The errors of features that fail, by feature."""
    os.chdir(tempfile.mkdtemp(dir=folder))
    errors = {}
    for feature in features:
        try:
            feature(folder)
        except Exception as error:
            errors[feature.__name__] = f"{type(error).__name__}: {error}"
    return errors


def find_uses(feature: Callable[[Path], None], names: Iterable[str], folder: Path) -> list[str]:
    """The names that a feature asks for. Without another one it does what it does with it."""
    uses: set[str] = set()
    for name in names:
        hide(name, uses)
    find_private.cache_clear()
    find_failures(folder, [feature])
    return sorted(uses)


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


def import_without(paths: Iterable[str], modules: Iterable[str]) -> list[str]:
    """The modules of the package that cannot be imported anew."""
    for path in paths:
        hide(path)
    for name in [name for name in sys.modules if name.startswith("shardwise")]:
        del sys.modules[name]
    failed = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:
            failed.append(name)
    return failed


def use_without(path: str, folder: Path, uses: dict[str, list[str]]) -> dict[str, str]:
    hide(path)
    find_private.cache_clear()
    return find_failures(folder, [feature for feature in FEATURES if path in uses[feature.__name__]])


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
    texts = sources()
    names = sorted({name for text in texts.values() for name in private_names(text)})
    for name in names:
        importlib.import_module(name.partition(":")[0])
    imports = in_child(import_without, [], [*texts]), in_child(import_without, names, [*texts])
    for name in texts.keys() - {NEEDS_A_NAME, *imports[0]}:
        importlib.import_module(name)
    uses = {feature.__name__: in_child(find_uses, feature, names, folder) for feature in FEATURES}
    features = {name: in_child(use_without, name, folder, uses) for name in names}
    return {"imports": imports, "features": {"": in_child(find_failures, folder), **features}}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
