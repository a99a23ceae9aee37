"""``shardwise train`` on rows with images: as TRL in one process, what is frozen, resuming, and bad rows."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.support.world import run_forked as run_world
from tests.training import images, on_ranks, tiny
from tests.training.images import MODELS
from transformers import AutoProcessor
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from shardwise.core.errors import ConfigError
from shardwise.training import trl_objects
from shardwise.training.adapter_rows import tokenize
from shardwise.training.arguments import ShardwiseArguments
from shardwise.training.image_rows import ImageCollator, ImageRowCheck, ImageRows

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("images")
    images.write_rows(made)
    for name in MODELS:
        images.write(made, name)
    return made


def keys(folder: Path, name: str, **values: Any) -> dict[str, Any]:
    given = {
        "model_name_or_path": str(folder / name),
        "dataset_name": str(folder / "chats.jsonl"),
        "max_length": None,
        **values,
    }
    return given


def arguments(
    model: Path, *, rows: str = "chats", streaming: bool = False, trl: dict[str, Any] | None = None, **own: Any
) -> Any:
    """A parsed configuration, without what TRL's parser warns of."""
    name = str(model.parent / f"{rows}.jsonl")
    script = SimpleNamespace(
        dataset_name=name,
        dataset_config=None,
        dataset_streaming=streaming,
        dataset_train_split="train",
        dataset_test_split="test",
    )
    training: dict[str, Any] = {"trust_remote_code": False, "eval_strategy": "no", "dataset_num_proc": None}
    training |= {"completion_only_loss": None, "pad_to_multiple_of": None, "assistant_only_loss": False}
    return SimpleNamespace(
        own=ShardwiseArguments(**own),
        script=script,
        model=SimpleNamespace(model_name_or_path=str(model), model_revision=None),
        mixture=SimpleNamespace(datasets=[], test_split_size=None),
        training=SimpleNamespace(**training | (trl or {}), dataset_text_field="text"),
    )


def losses(folder: Path, ranks: int, values: dict[str, Any], rows: int = 4) -> list[float]:
    """Of a training with so many rows a step on all ranks."""
    place = str(folder / f"out-{len(list(folder.glob('out-*')))}")
    found = run_world(
        ranks, images.train, {**values, "per_device_train_batch_size": rows // ranks, "output_dir": place}
    )
    assert len({tuple(told) for _, told in found}) == 1
    return list(found[0][1])


def losses_of_trl(folder: Path, values: dict[str, Any], *others: Any) -> list[float]:
    place = str(folder / f"trl-{len(list(folder.glob('trl-*')))}")
    given = {**values, "per_device_train_batch_size": 4, "output_dir": place}
    [alone] = run_world(1, images.by_trl, given, *others)
    assert len(set(alone)) == 3
    return list(alone)


def trained(name: str, part: str) -> list[str]:
    """Return the modules of a part of a model."""
    model = MODELS[name]
    return {"text": [*model.text], "projector": [model.projector], "both": [*model.text, model.projector]}[part]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_losses_of_text_and_projector_are_those_of_trl(folder: Path, name: str) -> None:
    """Of what the assistant says, and of preferences for two of them."""
    modules = trained(name, "both")
    values = keys(folder, name, assistant_only_loss=True)
    theirs = losses_of_trl(folder, values, None, modules)
    assert losses(folder, 2, {**values, "extra_modules": modules}) == pytest.approx(theirs, abs=1e-5)
    if name not in ("llava", "qwen3_vl"):
        return
    values = keys(folder, name, method="dpo", dataset_name=str(folder / "pairs.jsonl"), learning_rate=1e-3)
    theirs = losses_of_trl(folder, values, None, modules)
    assert losses(folder, 2, {**values, "extra_modules": modules}) == pytest.approx(theirs, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), [("llava", "text"), ("qwen3_vl", "projector")])
def test_the_losses_of_a_part_are_those_of_trl(folder: Path, name: str, part: str) -> None:
    values, modules = keys(folder, name), trained(name, part)
    theirs = losses_of_trl(folder, values, None, modules)
    assert losses(folder, 2, {**values, "extra_modules": modules}) == pytest.approx(theirs, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_the_losses_of_a_full_model_are_those_of_trl(folder: Path, name: str) -> None:
    """On prompts and completions, each with the column ``image``."""
    values = keys(folder, name, dataset_name=str(folder / "answers.jsonl"))
    theirs = losses_of_trl(folder, values)
    assert losses(folder, 2, values) == pytest.approx(theirs, abs=1e-5)


@pytest.mark.slow
def test_the_losses_of_a_lora_beside_the_projector_are_those_of_trl(folder: Path) -> None:
    targets = {"lora_target_modules": r".*language_model.*\.(q_proj|v_proj)", "lora_dropout": 0.0}
    values = keys(folder, "llava", use_peft=True, lora_modules_to_save=["multi_modal_projector"], **targets)
    adapter = folder / "initial"
    run_world(1, on_ranks.initial_adapter, values, str(adapter))
    theirs = losses_of_trl(folder, values, adapter)
    assert losses(folder, 2, values) == pytest.approx(theirs, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tuning"), [("llava", "lora"), ("gemma3", "freeze")])
def test_a_frozen_tower_has_no_gradients_and_no_states(folder: Path, name: str, tuning: str) -> None:
    """What its blocks return requires none either, although activations are checkpointed, as is TRL's default."""
    model = MODELS[name]
    given: dict[str, Any] = {"extra_modules": trained(name, "both")}
    if tuning == "lora":
        given = {"use_peft": True, "lora_target_modules": r".*language_model.*\.(q_proj|v_proj)"}
    values = keys(folder, name, per_device_train_batch_size=2, **given)
    values["output_dir"] = str(folder / f"frozen-{name}-{tuning}")
    for gradients, states, outputs in run_world(2, images.watch, values, model.tower):
        assert gradients == states
        found = {one.removeprefix("base_model.model.") for one in gradients}
        assert any(one.startswith(model.text[0]) for one in found)
        assert any(one.startswith(model.projector) for one in found) == (tuning == "freeze")
        assert not [one for one in found if one.startswith(model.tower) and not one.startswith(model.projector)]
        assert outputs
        assert not any(outputs)


@pytest.mark.slow
def test_a_training_resumes_on_another_number_of_ranks(folder: Path) -> None:
    name = "qwen3_vl"
    values = keys(folder, name, extra_modules=trained(name, "both"), max_steps=5)
    values |= {"save_strategy": "steps", "save_steps": 50, "output_dir": str(folder / f"stopped-{name}")}
    stopped = run_world(2, images.train_until, {**values, "per_device_train_batch_size": 2}, 3)
    assert {(outcome.has_stopped, outcome.steps) for outcome in stopped} == {(True, 3)}
    [(resumed, told)] = run_world(1, images.train, {**values, "per_device_train_batch_size": 4})
    assert (resumed.has_stopped, resumed.steps) == (False, 5)
    whole = {**values, "output_dir": str(folder / f"whole-{name}"), "per_device_train_batch_size": 4}
    [(_, expected)] = run_world(1, images.train, whole)
    assert told == pytest.approx(expected, abs=1e-5)
    ours, theirs = (load_file(folder / f"{one}-{name}" / "model.safetensors") for one in ("stopped", "whole"))
    assert all(torch.allclose(ours[key], theirs[key], atol=1e-5) for key in theirs)
    before = load_file(folder / name / "model.safetensors")
    assert {key for key in before if not torch.equal(before[key], ours[key])}
    for place in (folder / f"stopped-{name}", folder / f"stopped-{name}" / "checkpoint-3"):
        saved, given = (AutoProcessor.from_pretrained(one) for one in (place, folder / name))
        assert saved.to_dict() == given.to_dict()
        assert saved.chat_template == given.chat_template


@pytest.mark.slow
def test_stored_images_train_as_their_files(folder: Path) -> None:
    """Also beside a system prompt, which makes rows anew, and in lossy files, which would change if they were."""
    rows = datasets.Dataset.from_json(str(folder / "chats.jsonl"), cache_dir=str(folder / "cache"))
    paths = [[store_jpeg(Path(one)) for one in row] for row in rows["images"]]
    rows = rows.remove_columns("images").add_column("images", paths)
    rows.to_json(folder / "lossy.jsonl")
    stored = rows.to_list()
    for row in stored:
        row["images"] = [{"path": None, "bytes": Path(one).read_bytes()} for one in row["images"]]
    features = datasets.Features({**rows.features, "images": datasets.List(datasets.Image())})
    datasets.Dataset.from_list(stored, features=features).to_parquet(folder / "stored.parquet")
    values = keys(folder, "llava", system_prompt="Be brief.")
    files = losses(folder, 1, {**values, "dataset_name": str(folder / "lossy.jsonl")})
    assert losses(folder, 2, {**values, "dataset_name": str(folder / "stored.parquet")}) == pytest.approx(files)
    streamed = {**values, "dataset_streaming": True, "dataset_name": str(folder / "stored.parquet")}
    assert losses(folder, 2, streamed) == pytest.approx(losses(folder, 1, streamed), abs=1e-5)


def store_jpeg(file: Path) -> str:
    target = file.with_suffix(".jpg")
    Image.open(file).save(target, quality=30)
    return str(target)


Change = Callable[[dict[str, Any], Path], None]


def _set(*path: Any) -> Change:
    """Set what is at a path in a row."""

    def change(row: dict[str, Any], folder: Path) -> None:
        *first, last, value = path
        for key in first:
            row = row[key]
        row[last] = str(folder / value) if isinstance(value, str) and "." in value else value

    return change


TEXT = {"type": "text", "text": "<image>"}
BAD: dict[str, tuple[str, Change, str]] = {
    "missing file": (
        "chats",
        _set("images", 0, "gone.png"),
        r"images\[0\]: .*gone.png is not a file. Check the path",
    ),
    "no image": (
        "chats",
        _set("images", 0, "chats.jsonl"),
        r"images\[0\]: .*chats.jsonl is not an image that can be read",
    ),
    "more images": (
        "chats",
        lambda row, _: row["images"].append(row["images"][0]),
        "messages: does not fit 2 images.*1",
    ),
    "fewer images": (
        "chats",
        _set("messages", 0, "content", 1, {"type": "image"}),
        "messages: does not fit 1 image.*2",
    ),
    "text row": ("chats", _set("images", []), "images: has no image"),
    "null": ("answers", _set("image", None), "image: has no image"),
    "a word": (
        "chats",
        _set("messages", 1, "content", 0, TEXT),
        "messages: does not fit 1 image.*Found total 2 <image>",
    ),
    "in an answer": ("pairs", _set("chosen", 0, "content", 0, TEXT), "prompt: does not fit 1 image"),
    "no completion": ("answers", _set("completion", None), "completion: is missing or empty"),
    "tools": ("chats", _set("tools", [{"name": "look"}]), "tools: TRL does not render it beside images"),
    "variables": ("chats", _set("chat_template_kwargs", {"a": 1}), "chat_template_kwargs: TRL does not render it"),
    "tools of pairs": ("pairs", _set("tools", [{"name": "look"}]), "tools: TRL does not render it beside images"),
    "text alone": ("chats", lambda row, _: row.update(text=row.pop("messages")), "prompt: is missing or empty"),
    "missing url": ("answers", _set("image", "https://user:secret@host/none"), None),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_named(folder: Path, kind: str) -> None:
    name, change, message = BAD[kind]
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    change(rows[2], folder)
    given = arguments(folder / "llava", method="dpo" if name == "pairs" else "sft")
    check = ImageRowCheck(given, trl_objects.load_processor(given), "image" if name == "answers" else "images")
    for index, row in enumerate(rows):
        if index != 2 or message is None:
            assert check(row, index) is row
            continue
        with pytest.raises(ConfigError, match=f"row 3 of the dataset: {message}"):
            check(row, index)


@pytest.mark.parametrize("kind", ["missing file", "text row"])
def test_a_bad_row_is_one_error_on_all_ranks_before_the_model_is_loaded(folder: Path, kind: str) -> None:
    """Of the two bad rows, each of which another rank reads, the first one is named."""
    rows = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    _, change, message = BAD[kind]
    for number in (5, 8):
        change(rows[number], folder)
    tiny.write_rows(folder / "bad.jsonl", *rows)
    values = keys(folder, "llava", dataset_name=str(folder / "bad.jsonl"), output_dir=str(folder / "none"))
    told = run_world(2, images.error, values)
    assert told[0] == told[1]
    assert re.match(f"row 6 of the dataset: {message}", told[0])


def cut(file: Path) -> Path:
    """An image whose header is whole, and whose pixels are not."""
    target = file.with_stem("cut")
    target.write_bytes(file.read_bytes()[:-40])
    return target


def test_an_image_that_cannot_be_read_names_its_row(folder: Path) -> None:
    """It is found when the row is read: all of these pass the check of the headers."""
    given = arguments(folder / "llava")
    processor = trl_objects.load_processor(given)
    row = json.loads((folder / "chats.jsonl").read_text().splitlines()[0])
    whole = row["images"][0]
    with Image.open(whole) as opened:
        size = opened.size
    stored = datasets.Features({"images": datasets.List(datasets.Image())})
    truncated = {"path": None, "bytes": cut(Path(whole)).read_bytes()}
    url = "http://user:hunter2secret@127.0.0.1:9/none.png?key=hunter3secret"
    cases: list[tuple[Any, datasets.Features | None, str]] = [
        (url, None, "images: cannot be read, ConnectError: "),
        (truncated, stored, "images: cannot be read, OSError: image file is truncated"),
    ]
    for image, features, message in cases:
        ImageRowCheck(given, processor, "images")({**row, "images": [image]}, 1)
        good = whole if features is None else {"path": whole, "bytes": None}
        rows = ImageRows(datasets.Dataset.from_dict({"images": [[good], [image]]}, features), "images", processor)
        assert rows[0]["images"][0].size == size
        with pytest.raises(ConfigError, match=f"row 2 of the dataset: {message}.*Replace it") as raised:
            rows[1]
        assert "hunter" not in str(raised.value)


@pytest.mark.slow
def test_an_image_that_cannot_be_read_is_one_error_on_all_ranks(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    rows[5]["images"] = [str(cut(Path(rows[5]["images"][0])))] * len(rows[5]["images"])
    tiny.write_rows(folder / "cut.jsonl", *rows)
    values = keys(folder, "llava", dataset_name=str(folder / "cut.jsonl"), output_dir=str(folder / "cut"))
    told = run_world(2, partial(images.error, before_the_model=False), {**values, "max_steps": len(rows)})
    assert told[0] == told[1]
    assert "row 6 of the dataset: images: cannot be read, OSError: image file is truncated" in told[0]


CUT = "row 2 of the dataset: max_length: 96 may be less than its images and text need, Mismatch in `image` token"


def test_a_row_whose_images_are_cut_is_named(folder: Path) -> None:
    processor = trl_objects.load_processor(arguments(folder / "llava"))
    [short, long] = write_cut_rows(folder)
    dataset = datasets.Dataset.from_list([short, long, short])
    rows = ImageRows(dataset, "images", processor)
    collator = ImageCollator(DataCollatorForVisionLanguageModeling(processor, max_length=96), 96)
    assert set(collator([rows[0], rows[2]])["input_ids"].shape) <= {*range(97)}
    with pytest.raises(ConfigError, match=CUT):
        collator([rows[2], rows[1]])


@pytest.mark.slow
def test_a_row_whose_images_are_cut_is_one_error_on_all_ranks(folder: Path) -> None:
    write_cut_rows(folder)
    values = keys(folder, "llava", dataset_name=str(folder / "long.jsonl"), output_dir=str(folder / "long"))
    told = run_world(2, partial(images.error, before_the_model=False), {**values, "max_length": 96})
    assert told[0] == told[1]
    assert CUT in told[0]


def write_cut_rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of which the second has more images than 96 tokens."""
    row = json.loads((folder / "chats.jsonl").read_text().splitlines()[0])
    texts = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    made = [{"images": row["images"][:1] * count, "messages": texts} for count in (1, 6)]
    tiny.write_rows(folder / "long.jsonl", *made)
    return made


INLINE = r"row 2 of the dataset: {}\[0\].content\[1\]: has image inside of a message. Put images into a column"
UNMARKED = images.template("<image>").replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        ("llava", {"method": "kto"}, "images: images are trained on by sft and dpo, not by kto"),
        ("model", {}, "images: the model has no processor for images"),
        ("llava", {"processor_kwargs": {"max_pixel": 8}}, "processor_kwargs: max_pixel is no setting"),
        (
            "llava",
            {"trl": {"assistant_only_loss": True}, "chat_template": UNMARKED},
            "assistant_only_loss: needs, for images, messages",
        ),
        (
            "llava",
            {"trl": {"completion_only_loss": True}},
            "completion_only_loss: needs, for images, rows of prompt",
        ),
        ("llava", {"trl": {"pad_to_multiple_of": 8}, "rows": "answers"}, "pad_to_multiple_of: beside images, TRL"),
        (
            "llava",
            {"trl": {"pad_to_multiple_of": 8}, "rows": "pairs", "method": "dpo"},
            "pad_to_multiple_of: beside images, TRL",
        ),
        ("llava", {"rows": "inline"}, INLINE.format("messages")),
        ("llava", {"rows": "inline", "trl": {"assistant_only_loss": True}}, INLINE.format("messages")),
        ("llava", {"rows": "inline", "streaming": True}, INLINE.format("messages")),
        ("llava", {"rows": "prompts", "method": "grpo"}, INLINE.format("prompt")),
    ],
)
def test_what_cannot_be_trained_on_images(folder: Path, model: str, values: dict[str, Any], message: str) -> None:
    tiny.write_model(folder / "model")
    text, image = tiny.chat("Hi", "Ho")["messages"], {"type": "image", "image": "cat.png"}
    asked = [{"role": "user", "content": [{"type": "text", "text": "What?"}, image]}]
    tiny.write_rows(folder / "inline.jsonl", {"messages": text}, {"messages": asked + text[1:]})
    tiny.write_rows(folder / "prompts.jsonl", {"prompt": text[:1]}, {"prompt": asked})
    given = arguments(folder / model, **values)
    with pytest.raises(ConfigError, match=message):
        list(trl_objects.load_data(given, trl_objects.load_processor(given), 0)[0])


def test_many_loras_are_trained_on_text(folder: Path) -> None:
    rows = datasets.Dataset.from_list([{"text": "Hi", "image": "a.png"}])
    with pytest.raises(ConfigError, match="image: many LoRAs train on rows of text"):
        tokenize((rows, None), arguments(folder / "llava"), None, 0)


def test_settings_of_the_processor(folder: Path) -> None:
    given = arguments(folder / "qwen2_5_vl", processor_kwargs={"max_pixels": 256})
    assert trl_objects.load_processor(given).image_processor.size["longest_edge"] == 256


def test_a_processor_that_needs_torchvision_says_so(folder: Path) -> None:
    missing = ImportError("\nAutoVideoProcessor requires the Torchvision library but it was not found here. Check")
    with (
        mock.patch.object(AutoProcessor, "from_pretrained", side_effect=missing),
        pytest.raises(ConfigError, match="the Torchvision library but it was not found here. Install"),
    ):
        trl_objects.load_processor(arguments(folder / "qwen2_5_vl"))
