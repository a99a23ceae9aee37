"""The meaning of torch's private names: a release that changes one fails here, by name."""

import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.fsdp.on_fake_ranks import fake_rank
from torch import nn
from torch.distributed._composable.replicate import replicate as old_replicate
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shardwise
from shardwise.fsdp import gradients
from shardwise.fsdp import torch_private as private


class Child(nn.Linear):
    """A class whose own parents are several."""


def test_the_class_before_sharding() -> None:
    with fake_rank(0, 2):
        for make in (lambda: nn.Linear(4, 4), lambda: Child(4, 4), lambda: nn.Sequential(nn.Linear(4, 4))):
            for wrap in (fully_shard, replicate):
                module = make()
                kind = type(module)
                wrap(module, mesh=init_device_mesh("cpu", (2,)))
                assert isinstance(module, FSDPModule)
                assert private.original_class(module) is kind
                with private.original_classes(module):
                    assert type(module) is kind
                assert isinstance(module, FSDPModule)


@pytest.mark.parametrize("wrap", [replicate, old_replicate])
def test_a_replicated_model_is_reported(wrap: Callable[..., object], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with fake_rank(0, 1):
        wrap(model[0], device_mesh=init_device_mesh("cpu", (1,))) if wrap is old_replicate else wrap(model[0])
        for verb in (
            lambda: shardwise.save(model, tmp_path / "out"),
            lambda: shardwise.get_model_state_dict(model),
            lambda: shardwise.shard(model),
        ):
            with pytest.raises(shardwise.ShardingError, match=r"0 is under torch's replicate\(\).*fully_shard"):
                verb()


@pytest.mark.parametrize(("rank", "held"), [(0, 2), (1, 2), (2, 1), (3, 0)])
def test_shards_are_padded_to_that_of_rank_0(rank: int, held: int) -> None:
    with fake_rank(rank, 4):
        module = nn.Linear(3, 5, device="meta")
        fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
        params = private.fsdp_params(module)
        assert set(params) == set(module.parameters())
        inner = params[module.weight]
        assert private.padded_size(inner) == (2, 3)
        assert private.padded_numel(inner) == 6
        assert not private.is_offloaded(inner)
        assert not private.pins_memory(inner)
        padded = torch.full((2, 3), 7.0)
        local = private.zero_padding(inner, padded)
        assert local.shape == (held, 3)
        assert padded.sum() == held * 3 * 7  # the padding is zero
        made = private.make_dtensor_like(module.weight, local)
        assert isinstance(made, nn.Parameter)
        assert made.requires_grad
        assert made.shape == (5, 3)
        assert made.placements == (Shard(0),)
        assert made.to_local().data_ptr() == local.data_ptr()
        module.weight = made
        private.adopt_sharded(inner, made)
        assert inner.sharded_param is made
        assert inner._sharded_param_data.untyped_storage().data_ptr() == padded.data_ptr()
        assert inner._sharded_param_data.numel() == 6
        assert module.weight.to_local().data_ptr() == local.data_ptr() or held == 0


def test_gradient_groups_and_offloaded_parameters() -> None:
    with fake_rank(0, 2):
        module = nn.Linear(4, 4)
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
        assert all(private.is_offloaded(inner) for inner in private.fsdp_params(module).values())
        [(mixed, offload)] = private.fsdp_policies(module)
        assert (mixed.param_dtype, type(offload)) == (None, CPUOffloadPolicy)
        averaging = gradients.Averaging(None, module)
        assert averaging.is_synchronizing()
        assert isinstance(module, FSDPModule)
        [group] = private.iter_fsdp_param_groups(module)
        assert group.modules == (module,)
        assert gradients.scale_by_divisor(group, torch.ones(1)) is None
        module.set_gradient_divide_factor(4.0)
        assert gradients.scale_by_divisor(group, torch.ones(1)) == 0.5
        module.set_requires_gradient_sync(False)
        assert not averaging.is_synchronizing()
        module.set_requires_gradient_sync(True)
        module.set_requires_all_reduce(False)
        assert not averaging.is_synchronizing()


def test_a_pass_that_was_broken_off_is_forgotten() -> None:
    """Wherever it was, nothing is left gathered, and the next pass gathers what a first one does."""

    def broken_off(*_: object) -> None:
        raise ValueError("no more")

    with fake_rank(1, 4):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).requires_grad_(requires_grad=False)
        for module in (model[0], model[1], model):
            fully_shard(module)

        def gathers(most: int | None = None) -> list[str]:
            seen: list[str] = []

            def gather(name: str, output_tensor: torch.Tensor, **_: object) -> None:
                if len(seen) == most:
                    broken_off()
                seen.append(name)
                output_tensor.zero_()

            for name, module in model.named_modules():
                if isinstance(module, FSDPModule):
                    comm = mock.Mock(
                        allocate=lambda size, **keywords: torch.empty(*size, **keywords),
                        side_effect=partial(gather, name),
                        return_value=None,
                    )
                    module.set_custom_all_gather(comm)
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
            return seen

        def fails_in(hook: Callable[..., None]) -> None:
            with model[1].register_forward_hook(hook):
                gathers()

        gradients.reset_fsdp_state(model)  # where there was none
        expected = gathers()
        assert len(expected) == 5
        for fail in (
            *(partial(gathers, number) for number in range(len(expected))),
            partial(fails_in, broken_off),
            partial(fails_in, lambda _module, _args, output: output.register_hook(broken_off) and None),
        ):
            with pytest.raises(ValueError, match="no more"):
                fail()
            gradients.reset_fsdp_state(model)
            assert {type(parameter) for parameter in model.parameters()} == {DTensor}
            assert gathers() == expected


def test_a_module_reshards_the_group_of_a_module_around_it() -> None:
    called: list[object] = []
    with fake_rank(0, 2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].register_state_dict_pre_hook(lambda *arguments: called.append(arguments))
        fully_shard(model)
        model.unshard()
        assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
        private.reshard_owners(model[1])
        assert {type(parameter) for parameter in model.parameters()} == {DTensor}
    assert not called


def test_which_indices_a_rank_holds() -> None:
    assert private.local_runs(5, ((Shard(0), 4, 1),)) == ((2, 2),)
    assert private.local_runs(5, ((Shard(0), 4, 3),)) == ()
    strided = _StridedShard(0, split_factor=2)
    assert private.local_runs(8, ((strided, 2, 0),)) == ((0, 2), (4, 2))
    assert private.local_runs(8, ((strided, 2, 1),)) == ((2, 2), (6, 2))
    assert private.local_runs(8, ((strided, 2, 1), (Shard(0), 2, 1))) == ((6, 2),)
    assert private.splitting_dim(_StridedShard(1, split_factor=2)) == 1


def test_groups_and_stores(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        store = private.default_store()
        store.set("a", "b")
        assert store.get("a") == b"b"
        assert private.object_device(None) == torch.device("cpu")
        before = sys.getrefcount(dist.group.WORLD)
        private.keep_forever(None)
        gc.collect()
        assert sys.getrefcount(dist.group.WORLD) > before
    finally:
        dist.destroy_process_group()


def test_registries_and_hooks() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("brief", torch.zeros(1), persistent=False)
    assert set(private.get_parameters(module)) == {"weight", "bias"}
    assert set(private.get_buffers(module)) == {"running_mean", "running_var", "num_batches_tracked", "brief"}
    assert private.get_temporary_names(module) == {"brief"}
    private.get_parameters(module)["weight"] = None  # past the checks, and seen by the module
    assert module.weight is None
    assert not gradients.is_averaged(module.bias)
    module.bias.register_post_accumulate_grad_hook(gradients.Averaging(None, module))
    assert gradients.is_averaged(module.bias)


def test_the_end_of_a_backward_pass() -> None:
    told: list[object] = []

    def hook(_: torch.Tensor) -> None:
        told.append(private.backward_pass_id())
        private.after_backward(partial(told.append, "end"))

    leaves = [torch.ones(2, requires_grad=True) for _ in range(2)]
    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        (leaves[0] * leaves[1]).sum().backward()
    assert told[2:4] == told[6:] == ["end", "end"]
    assert told[0] == told[1] != told[4] == told[5]


def test_kinds_of_modules() -> None:
    assert private.normalizes_over_rows(nn.BatchNorm2d(2))
    assert private.normalizes_over_rows(nn.SyncBatchNorm(2))
    assert not private.normalizes_over_rows(nn.LayerNorm(2))
    module = nn.Linear(2, 2)
    assert not private.is_compiled_in_place(module)
    module.compile(backend="eager")
    assert private.is_compiled_in_place(module)


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_the_dtype_of_gradients(dtype: torch.dtype | None) -> None:
    parameter, other, third = (nn.Parameter(torch.ones(1, dtype=torch.bfloat16)) for _ in range(3))
    private.copy_attributes(other, parameter)
    assert not private.sets_grad_dtype(parameter)
    assert not private.sets_grad_dtype(other)
    parameter.grad_dtype = dtype
    assert private.sets_grad_dtype(parameter)
    private.copy_attributes(other, parameter)
    assert other.grad_dtype == dtype
    third.grad_dtype = torch.bfloat16  # its own, which a wider copy of it is to keep
    assert private.sets_grad_dtype(third) == hasattr(torch.Tensor, "_has_grad_dtype_override")


def test_hooks_of_a_parameter() -> None:
    parameter, other = (nn.Parameter(torch.ones(1)) for _ in range(2))
    told: list[str] = []
    handles = [parameter.register_hook(lambda _: told.append("gradient"))]
    handles.append(parameter.register_post_accumulate_grad_hook(lambda _: told.append("accumulated")))
    private.share_hooks(other, parameter)
    (parameter + other).backward()
    assert told == ["gradient", "accumulated"] * 2
    for handle in handles:
        handle.remove()
    (parameter + other).backward()
    assert len(told) == 4


def test_tensors() -> None:
    tensor = torch.ones(3)
    version = private.get_version(tensor)
    tensor.add_(1)
    assert private.get_version(tensor) == version + 1
    private.copy_all([tensor], [torch.zeros(3)])
    assert tensor.tolist() == [0, 0, 0]

    class Bare(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *arguments: object) -> None: ...

    bare = private.make_without_memory(Bare, (1 << 40, 1 << 20), torch.float64)
    assert (type(bare), bare.shape, bare.dtype) == (Bare, (1 << 40, 1 << 20), torch.float64)


def test_files_with_padded_headers(tmp_path: Path) -> None:
    private.save_without_data(lambda: {"a": torch.empty(1000, dtype=torch.int32)}, tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert (found["a"].shape, found["a"].dtype) == ((1000,), torch.int32)
    where = private.make_storage_info("x", 3, 5)
    assert (where.relative_path, where.offset, where.length) == ("x", 3, 5)  # type: ignore[attr-defined]


def test_a_mode_sees_every_storage_as_long_as_it_lives() -> None:
    """Of tensors without data, too: by their storages' keys, and by what is told when these go."""
    seen: list[int] = []

    class Mode(private.dispatch_mode_class()):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                seen.append(private.storage_key(result.untyped_storage()))
            return result

    gone: list[object] = []
    with private.fake_mode(), Mode():
        made = torch.ones(3, 4)
        view = made.view(12)
        other = made + 1
    assert len(seen) == 3
    assert seen[0] == seen[1] != seen[2]
    assert other.untyped_storage().nbytes() == 48
    kept = weakref.ref(other.untyped_storage(), gone.append)
    del view, other
    gc.collect()
    assert gone == [kept]


def test_signals_that_torchrun_hands_on() -> None:
    """As docs/several_machines.md has it: not SIGUSR1, unless it is told to."""
    from torch.distributed.launcher.api import LaunchConfig

    (handed_on,) = (item.default for item in dataclasses.fields(LaunchConfig) if item.name == "signals_to_handle")
    assert handed_on == "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
