"""A directory that is no sound adapter is refused in one line, without much memory and without waiting."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tests import bad_directories
from tests.bad_directories import (
    BadDirectory,
    Damage,
    all_of,
    edited,
    fifo,
    instead,
    link,
    raw_header,
    remove,
    sparse,
    write,
)
from tests.model_factory import TinyModel, make_adapter, make_model
from tests.workers.test_bad_directories import bounded
from workers.adapters import config
from workers.adapters.adapter import Adapter, read_adapter
from workers.adapters.errors import AdapterError
from workers.models.lora import Adaptable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Of `TinyModel`.
MODULES = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(2)
    for name, shape in {
        "self_attn.q_proj": (128, 64),
        "self_attn.k_proj": (64, 64),
        "self_attn.v_proj": (64, 64),
        "self_attn.o_proj": (64, 128),
        "mlp.gate_proj": (96, 64),
        "mlp.up_proj": (96, 64),
        "mlp.down_proj": (64, 96),
    }.items()
}
A, B = (f"base_model.model.model.layers.1.self_attn.q_proj.lora_{part}.weight" for part in "AB")
MODULE = r"model\.layers\.1\.self_attn\.q_proj"


def make_good(directory: Path) -> Path:
    """An adapter of rank 4 for the queries and for down_proj."""
    make_model(directory / "model", TinyModel())
    targets = ["q_proj", "down_proj"]
    return make_adapter(directory / "adapter", directory / "model", r=4, target_modules=targets)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_good(tmp_path_factory.mktemp("good"))


def read(directory: Path, max_bytes: int = 1 << 20) -> Adapter:
    with bounded():
        return read_adapter(directory, Adaptable(MODULES), max_rank=16, max_bytes=max_bytes)


def refusal(directory: Path) -> str:
    """What is said of a directory."""
    with pytest.raises(AdapterError) as refused:
        read(directory)
    check_shown(str(refused.value), directory)
    return str(refused.value)


def check_shown(message: str, directory: Path) -> None:
    """It may be shown to clients."""
    assert message.isprintable() and len(message) <= 300
    assert str(directory) not in message and directory.name not in message


# What damages. How files and headers can be bad at all: `test_bad_directories`, with the same reader.


def setting(**changes: Any) -> Damage:
    """Changes settings of the config."""
    return edited(CONFIG, lambda settings: settings.update(changes))


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    return bad_directories.tensors(change, WEIGHTS)


def added(name: str, *shape: int) -> Damage:
    return tensors(lambda found: found.update({f"base_model.model.{name}": torch.ones(shape)}))


def one_value(name: str, value: float) -> Damage:
    return tensors(lambda found: found[name].view(-1)[7:8].fill_(value))


def without_prefix(found: dict[str, torch.Tensor]) -> None:
    for name in list(found):
        found[name.removeprefix("base_model.model.")] = found.pop(name)


def many_tensors(count: int) -> Damage:
    """A header of empty tensors, made when it is asked for."""

    def damage(directory: Path) -> None:
        names = (f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(count))
        raw_header(b"{" + ",".join(names).encode() + b"}", WEIGHTS)(directory)

    return damage


def as_large_as_it_says(directory: Path) -> None:
    """A terabyte for one module: config, header and file agree, and the file is a hole."""
    rank = 1 << 31
    setting(r=rank, target_modules=["layers.1.self_attn.q_proj"])(directory)
    sizes = 4 * 64 * rank, 4 * 128 * rank
    entries = {
        A: {"dtype": "F32", "shape": [rank, 64], "data_offsets": [0, sizes[0]]},
        B: {"dtype": "F32", "shape": [128, rank], "data_offsets": [sizes[0], sum(sizes)]},
    }
    raw_header(json.dumps(entries).encode(), WEIGHTS)(directory)
    sparse(WEIGHTS, (directory / WEIGHTS).stat().st_size + sum(sizes))(directory)


def link_to_a_fifo(directory: Path) -> None:
    fifo("blob")(directory)
    link(WEIGHTS, "blob")(directory)


_LAYER = "model.layers.0."
_NOT_RANKS: list[object] = [None, 0, -1, 1.5, "4", True, 1 << 60, []]
_NOT_ALPHAS: list[object] = [None, "4", True, 1e13, -1e13, 10**400, []]
_MERGE = "merge the adapter into the model"
# The settings of PEFT that would change what is computed.
REFUSED: dict[str, object] = {
    "lora_bias": True,
    "trainable_token_indices": [3],
    "fan_in_fan_out": True,
    "layer_replication": [[0, 2], [1, 2]],
    "alora_invocation_tokens": [1, 2],
    "megatron_config": {"a": 1},
    "use_qalora": True,
    "arrow_config": {"top_k": 3},
    "use_bdlora": {"nblocks": 2},
    "kasa_config": {"beta": 1},
    "monteclora_config": {"num_samples": 8},
    "velora_config": {"num_groups": 8},
}

SETTINGS = [
    BadDirectory("no config", remove(CONFIG), "^adapter_config.json: cannot be read: No such file"),
    BadDirectory("a huge config", sparse(CONFIG, 1 << 40), "^adapter_config.json: is larger than 1024 KiB"),
    BadDirectory("IA3", setting(peft_type="IA3"), "peft_type: only LORA is supported, got IA3"),
    BadDirectory("no type", setting(peft_type=None), "peft_type: only LORA is supported, got None"),
    BadDirectory("a classifier", setting(task_type="SEQ_CLS"), "task_type: only CAUSAL_LM .* got SEQ_CLS"),
    BadDirectory("biases", setting(bias="lora_only"), "bias: only none is supported, got lora_only"),
    BadDirectory("DoRA", setting(use_dora=True), f"use_dora: DoRA needs --device cpu .*, or {_MERGE}"),
    BadDirectory(
        "a whole norm", added("model.layers.0.input_layernorm.weight", 64), f"of a whole module, .*{_MERGE}"
    ),
    BadDirectory(
        "a whole projection",
        added("model.layers.0.mlp.up_proj.weight", 96, 64),
        f"of a whole module, .*{_MERGE}",
    ),
    BadDirectory(
        "a text of parameters", setting(target_parameters="experts.down_proj"), "target_parameters: "
    ),
    *(
        BadDirectory(name, setting(**{name: value}), f"{name}: only plain LoRA is supported, .*{_MERGE}")
        for name, value in REFUSED.items()
    ),
    BadDirectory("an unknown setting", setting(use_mora=1), "use_mora: only plain LoRA is supported, got 1"),
    BadDirectory(
        "an unknown setting of controls", setting(**{"\x1b[2J\n" * 99: "\u202e"}), r"json: \\x1b\[2J\\n"
    ),
    *(
        BadDirectory(
            f"init {init}", setting(init_lora_weights=init), rf"init_lora_weights: {init} changes the"
        )
        for init in ("pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga")
    ),
    BadDirectory("an unknown init", setting(init_lora_weights="new"), "init_lora_weights: is not supp.* new"),
    *(BadDirectory(f"rank {rank}", setting(r=rank), "json: r: must be") for rank in _NOT_RANKS),
    *(
        BadDirectory(f"alpha {alpha}", setting(lora_alpha=alpha), "json: lora_alpha: must be a number")
        for alpha in _NOT_ALPHAS
    ),
    BadDirectory("an infinite alpha", setting(lora_alpha=float("inf")), "Infinity is not a number"),
    BadDirectory("another rank", setting(r=5), rf"r, rank_pattern: .* {_LAYER}.* is 5, but .* tensors is 4"),
    BadDirectory("a pattern of another rank", setting(rank_pattern={"q_proj": 3}), "is 3, but that of its"),
    BadDirectory("patterns of ranks in a list", setting(rank_pattern=["q"]), "rank_pattern: must be an obj"),
    BadDirectory("rank 0 by a pattern", setting(rank_pattern={"x": 0}), "rank_pattern: must be a positive"),
    BadDirectory("text by a pattern", setting(alpha_pattern={"x": "1"}), "alpha_pattern: must be a number"),
    BadDirectory(
        "a pattern that is none",
        setting(alpha_pattern={"(": 1}),
        r"alpha_pattern: the pattern \( is not valid",
    ),
    BadDirectory("no targets", setting(target_modules=None), "target_modules: must name the modules"),
    BadDirectory("a nested target", setting(target_modules=[[[]]]), "target_modules: must be a pattern or"),
    BadDirectory(
        "tensors of other modules", setting(target_modules=["q_proj"]), "module .*down_proj has tensors, but"
    ),
    BadDirectory(
        "tensors of other layers", setting(layers_to_transform=[1]), rf"module {_LAYER}.* has tensors, but"
    ),
    BadDirectory(
        "tensors of excluded modules", setting(exclude_modules="model.*q_proj"), "q_proj has tensors, but is"
    ),
    BadDirectory(
        "modules without tensors",
        setting(target_modules="all-linear"),
        rf"target_modules: names module {_LAYER}self_attn.k_proj, which has no tensors: check that",
    ),
    BadDirectory("a layer as text", setting(layers_to_transform="1"), "layers_to_transform: must be a list"),
    BadDirectory(
        "layers of another list",
        setting(layers_to_transform=[0, 1], layers_pattern="h"),
        rf"module {_LAYER}.* has tensors, but is not named",
    ),
    BadDirectory("a list by a pattern", setting(layers_pattern="l.*"), "layers_pattern: must be a name"),
    BadDirectory(
        "patterns that take for ever",
        setting(rank_pattern={"(.|..)+$b": 1}),
        "json: the patterns take too long to match: name the modules instead",
    ),
]
TENSORS = [
    BadDirectory("no pair", tensors(dict.clear), "^adapter_model.safetensors: has no tensor of a LoRA"),
    BadDirectory("no A", tensors(lambda t: t.pop(A)), rf"module {MODULE}: lora_A.weight is missing"),
    BadDirectory("no B", tensors(lambda t: t.pop(B)), rf"module {MODULE}: lora_B.weight is missing"),
    BadDirectory(
        "DoRA",
        added(f"{_LAYER}self_attn.q_proj.lora_magnitude_vector", 128),
        "use_dora: module .*q_proj has a",
    ),
    BadDirectory("a bias", added(f"{_LAYER}self_attn.q_proj.lora_B.bias", 128), "is a bias"),
    BadDirectory("a base bias", added(f"{_LAYER}self_attn.q_proj.base_layer.bias", 128), "is a bias"),
    BadDirectory("an embedding", added("model.embed_tokens.weight", 97, 64), "is a whole embedding"),
    BadDirectory("a head", added("lm_head.weight", 97, 64), "is a whole output layer"),
    BadDirectory(
        "an adapter of the embedding", added("model.embed_tokens.lora_embedding_A", 4, 97), "of an embedding"
    ),
    BadDirectory(
        "tokens", added("model.embed_tokens.token_adapter.trainable_tokens_delta", 1, 64), "of an embedding"
    ),
    BadDirectory("an adapter of the head", added("lm_head.lora_A.weight", 4, 64), "of the output layer are"),
    BadDirectory(
        "an adapter of experts",
        added(f"{_LAYER}mlp.experts.3.up_proj.lora_A.weight", 4, 64),
        "of experts .* are not supported",
    ),
    BadDirectory(
        "an adapter of fused experts",
        added(f"{_LAYER}mlp.experts.base_layer.lora_A.weight", 4, 64),
        "experts",
    ),
    BadDirectory(
        "an adapter of a router", added(f"{_LAYER}mlp.gate.lora_A.weight", 4, 64), "of routers .* are not"
    ),
    BadDirectory(
        "a layer too many",
        added("model.layers.2.self_attn.q_proj.lora_A.weight", 4, 64),
        r"module model.layers.2.self_attn.q_proj: the model has no such projection.* for this model",
    ),
    BadDirectory("no prefix", tensors(without_prefix), "is no tensor of LoRA in PEFT's layout"),
    BadDirectory("an unknown tensor", added(f"{_LAYER}q_proj.lora_C.weight", 4), "is no tensor of LoRA"),
    BadDirectory(
        "a name of controls", added("\x1b[2J\x07\n" * 30 + "\u202e", 4), r"tensor base_model.model.\\x1b\[2J"
    ),
    BadDirectory("a name without end", added("x" * 10_000, 4), "tensor base_model.model.x+...: is no"),
    BadDirectory(
        "another model's inputs",
        tensors(lambda t: t.update({A: torch.ones(4, 32)})),
        r"q_proj.lora_A.weight: has shape \[4, 32\], but the model asks for \[rank, 64\]: check",
    ),
    BadDirectory("two ranks", tensors(lambda t: t.update({B: torch.ones(128, 5)})), r"asks for \[128, 4\]"),
    BadDirectory("rank 0", tensors(lambda t: t.update({A: t[A][:0], B: t[B][:, :0]})), r"shape \[0, 64\]"),
    BadDirectory(
        "convolutions",
        tensors(lambda t: t.update({A: t[A][..., None, None]})),
        r"has shape \[4, 64, 1, 1\], but",
    ),
    *(
        BadDirectory(
            f"values of {dtype}",
            tensors(lambda t, dtype=dtype: t.update({A: t[A].to(dtype)})),  # type: ignore[misc]
            "lora_A.weight: must be one of float32, bfloat16, float16, got",
        )
        for dtype in (torch.int8, torch.float64, torch.float8_e4m3fn, torch.bool)
    ),
    *(
        BadDirectory(f"{value} in {name[-8]}", one_value(name, value), rf"{MODULE}.lora_{name[-8]}.* finite")
        for name in (A, B)
        for value in (float("nan"), float("inf"), float("-inf"))
    ),
    BadDirectory(
        "values that overflow when they are scaled",
        all_of(one_value(B, 3e38), setting(lora_alpha=8)),
        "lora_B.weight, times its scale of 2, is not finite",
    ),
    BadDirectory("too large a rank", lambda d: grown(d, 17), "the rank of .* is 17, and 16 is allowed"),
    BadDirectory("too large a file", lambda d: grown(d, 16), "needs 0 MiB as float32|needs 1 MiB"),
]
FILES = [
    BadDirectory("no tensors", remove(WEIGHTS), "^adapter_model.safetensors: cannot be read: No such file"),
    BadDirectory(
        "a pickle",
        lambda directory: (directory / WEIGHTS).rename(directory / "adapter_model.bin"),
        "^adapter_model.bin: is a pickle, which runs code .* safe_serialization=True",
    ),
    *(
        BadDirectory(f"{kind} as {name}", damage(name), f"^{name}: .*not a regular file")
        for name in (CONFIG, WEIGHTS)
        for kind, damage in (("a FIFO", fifo), ("a folder", lambda name: instead(name, Path.mkdir)))
    ),
    BadDirectory("a link to a FIFO", link_to_a_fifo, "^adapter_model.safetensors: .*not a regular file"),
    BadDirectory("a link to nothing", link(CONFIG, "gone"), "^adapter_config.json: cannot be read: No such"),
    BadDirectory(
        "a large header",
        all_of(write(WEIGHTS, (1 << 30).to_bytes(8, "little")), sparse(WEIGHTS, 1 << 31)),
        "the header is larger than 4096 KiB",
    ),
    BadDirectory("70,000 tensors", many_tensors(70_000), "is no tensor of LoRA"),
    BadDirectory("a terabyte", as_large_as_it_says, "json: r: must be from 1 to|is allowed"),
]


def grown(directory: Path, rank: int) -> None:
    """Another rank, as config and tensors say."""
    setting(r=rank)(directory)

    def grow(found: dict[str, torch.Tensor]) -> None:
        for name, tensor in found.items():
            is_a = ".lora_A." in name
            found[name] = torch.ones((rank, tensor.shape[1]) if is_a else (tensor.shape[0], rank))

    tensors(grow)(directory)


ALL = [*SETTINGS, *TENSORS, *FILES]


# Seconds each; the first as in test_patterns.py.
SLOW = ("patterns that take for ever", "70,000 tensors")


@pytest.mark.parametrize(
    "bad",
    [pytest.param(bad, id=bad.name, marks=pytest.mark.thorough if bad.name in SLOW else ()) for bad in ALL],
)
def test_a_bad_directory_is_refused_by_name(tmp_path: Path, good: Path, bad: BadDirectory) -> None:
    directory = shutil.copytree(good, tmp_path / "an-adapter-of-somebody")
    bad.damage(directory)
    if bad.name == "too large a file":
        with pytest.raises(AdapterError, match=bad.says):
            read(directory, max_bytes=40_000)
        return
    with pytest.raises(AdapterError, match=bad.says):
        read(directory)
    refusal(directory)


def test_the_good_directory_is_read(good: Path) -> None:
    assert len(read(good).weights) == 4


def test_every_setting_of_peft_is_known() -> None:
    """A new one is refused at run time; whether it has an effect is to be found out."""
    known = config._READ | config._WITHOUT_EFFECT | REFUSED.keys()
    assert {field.name for field in dataclasses.fields(LoraConfig)} <= known


def test_a_long_path_is_not_shown(good: Path, tmp_path: Path) -> None:
    parent = tmp_path / ("a" * 250) / ("b" * 250) / ("c\n" * 100)
    directory = shutil.copytree(good, parent / "an-adapter-of-somebody")
    (directory / CONFIG).write_text("{")
    assert refusal(directory) == "adapter_config.json: cannot be read"
