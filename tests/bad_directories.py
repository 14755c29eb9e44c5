"""Model directories that must be refused: each makes a good tiny one bad in one way, and says what names it.

A good directory has config.json, generation_config.json, tokenizer.json, and its weights in one file or, for
those about shards, in several with an index.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.model_factory import TinyModel, hf_config, make_model

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
NAMED_TEMPLATES, SPECIAL_TOKENS = "additional_chat_templates", "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
VOCAB = TinyModel().vocab_size

Damage = Callable[[Path], object]


@dataclass(frozen=True)
class BadDirectory:
    """One way to be bad.

    Attributes:
        name: Of the way.
        damage: Does it to a good directory.
        says: A regular expression for what the refusal says: the file, and the setting or tensor.
        sharded: The weights are in shards.
    """

    name: str
    damage: Damage
    says: str
    sharded: bool = False


def make_good(directory: Path, *, sharded: bool = False) -> Path:
    """A model that can be served."""
    make_model(directory, TinyModel(max_shard_bytes=60_000 if sharded else None))
    vocab = {f"token {index}": index for index in range(VOCAB)}
    (directory / TOKENIZER).write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocab}}))
    return directory


# What damages.


def write(name: str, content: bytes | str) -> Damage:
    """Puts something else in the place of a file."""
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(data)


def remove(name: str) -> Damage:
    return lambda directory: (directory / name).unlink()


def all_of(*damages: Damage) -> Damage:
    """One after the other."""

    def damage(directory: Path) -> None:
        for one in damages:
            one(directory)

    return damage


def instead(name: str, make: Callable[[Path], object]) -> Damage:
    """Puts what is not a file in the place of one, or a link."""

    def replace(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return replace


def fifo(name: str) -> Damage:
    return instead(name, os.mkfifo)


def link(name: str, target: str) -> Damage:
    return instead(name, lambda path: path.symlink_to(target))


def a_socket(name: str) -> Damage:
    def bind(path: Path) -> None:
        # Relative, since the path of a socket may have 107 bytes.
        here = Path.cwd()
        os.chdir(path.parent)
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
        finally:
            os.chdir(here)

    return instead(name, bind)


def sparse(name: str, size: int) -> Damage:
    """Lengthens a file by a hole, which takes no room on the disk."""
    return lambda directory: os.truncate(directory / name, size)


def edited(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    """Changes the object that a file of JSON has."""

    def edit(directory: Path) -> None:
        content = json.loads((directory / name).read_text())
        change(content)
        (directory / name).write_text(json.dumps(content))

    return edit


def setting(**changes: Any) -> Damage:
    """Changes settings of config.json."""
    return edited(CONFIG, lambda settings: settings.update(changes))


def raw_setting(name: str, value: str) -> Damage:
    """Adds a setting to config.json, spelled as given."""

    def change(directory: Path) -> None:
        text = (directory / CONFIG).read_text()
        (directory / CONFIG).write_text(f'{{"{name}": {value},' + text.lstrip().removeprefix("{"))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object], name: str = WEIGHTS) -> Damage:
    """Rewrites a file of weights with changed tensors."""

    def rewrite(directory: Path) -> None:
        found = load_file(directory / name)
        change(found)
        save_file(found, directory / name)

    return rewrite


def one_value(value: float) -> Damage:
    """Sets one number of a weight."""

    def change(found: dict[str, torch.Tensor]) -> None:
        found[Q_PROJ][70, 5] = value

    return tensors(change)


def header(change: Callable[[dict[str, Any]], object], name: str = WEIGHTS) -> Damage:
    """Rewrites the header of a file of weights, and leaves its data."""

    def rewrite(directory: Path) -> None:
        content = (directory / name).read_bytes()
        size = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + size])
        change(entries)
        new = json.dumps(entries).encode()
        (directory / name).write_bytes(len(new).to_bytes(8, "little") + new + content[8 + size :])

    return rewrite


def entry(**changes: Any) -> Damage:
    """Changes what the header says of one tensor."""
    return header(lambda entries: entries[Q_PROJ].update(changes))


def raw_header(content: bytes, name: str = WEIGHTS) -> Damage:
    return write(name, len(content).to_bytes(8, "little") + content)


def weight_map(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Changes where the index says that tensors are."""
    return edited(INDEX, lambda content: change(content["weight_map"]))


def move_first_to(shard: str) -> Damage:
    return weight_map(lambda names: names.update({next(iter(names)): shard}))


def _repeat_in_another_shard(directory: Path) -> None:
    first, second = sorted(directory.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second)


def _as_large_as_it_says(directory: Path) -> None:
    """A terabyte of weights: config, header and file agree, and the file is a hole."""
    sizes: dict[str, Any] = {"vocab_size": 1 << 24, "hidden_size": 1 << 14}
    setting(**sizes, num_hidden_layers=1, layer_types=None)(directory)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(hf_config(TinyModel(**sizes, num_layers=1)))  # type: ignore[no-untyped-call]
    entries, end = {}, 0
    for name, tensor in made.state_dict().items():
        entries[name] = {
            "dtype": "F32",
            "shape": [*tensor.shape],
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    raw_header(json.dumps(entries).encode())(directory)
    os.truncate(directory / WEIGHTS, (directory / WEIGHTS).stat().st_size + end)


def _shards_in_other_order(directory: Path) -> None:
    first, second = sorted(directory.glob("*.safetensors"))[:2]
    spare = directory / "spare"
    first.rename(spare)
    second.rename(first)
    spare.rename(second)


def _link_to_a_fifo(directory: Path) -> None:
    os.mkfifo(directory / "blob")
    link(WEIGHTS, "blob")(directory)


def _pickled(name: str) -> Damage:
    return lambda directory: (directory / WEIGHTS).rename(directory / name)


_DEEP = 100_000
_NOT_IDS: list[object] = [-1, 1.0, True, None]
_NESTED = "[" * _DEEP + "]" * _DEEP
_CONFIG = r"/config\.json: "
_FILE = r"/model\.safetensors: "
_INDEX = r"/model\.safetensors\.index\.json: "
_TOKENIZER = r"/tokenizer\.json: "
_TOKENIZER_CONFIG = r"/tokenizer_config\.json: "
_CORRUPT = f"{_FILE}tensor {Q_PROJ} has a corrupt header entry"


def _large(name: str, value: object, bound: int) -> BadDirectory:
    says = rf"{_CONFIG}{name}: must be from \d+ to {bound}, got "
    return BadDirectory(f"{name} of {value:.0e}", setting(**{"layer_types": None, name: value}), says)


SIZES = [
    _large("num_hidden_layers", 10**18, 4096),
    _large("hidden_size", 2**40, 1 << 18),
    _large("vocab_size", 2**32, 1 << 24),
    _large("vocab_size", 1, 1 << 24),
    _large("num_attention_heads", 10**9, 4096),
    _large("head_dim", 2**31, 4096),
    _large("max_position_embeddings", 1, 1 << 24),
    BadDirectory(
        "more layers than the files have",
        setting(num_hidden_layers=400, layer_types=None),
        r": tensor model\.layers\.2\..* is missing",
    ),
    BadDirectory(
        "wider than the files",
        setting(hidden_size=1 << 17),
        rf"{_FILE}tensor .* has shape \[97, 64\], but the config asks for \[97, 131072\]",
    ),
    BadDirectory("a terabyte of weights", _as_large_as_it_says, r"the weights of .* need \d+ MiB, \d+ MiB"),
]

SETTINGS = [
    BadDirectory("no config", remove(CONFIG), f"{_CONFIG}cannot be read: No such file"),
    BadDirectory("half a config", sparse(CONFIG, 100), f"{_CONFIG}is not valid JSON"),
    BadDirectory("a config of a list", write(CONFIG, b"[]"), f"{_CONFIG}must be a JSON object"),
    BadDirectory("a config in another encoding", write(CONFIG, b'{"\xff": 1}'), f"{_CONFIG}.*'utf-8' codec"),
    BadDirectory("a nested config", write(CONFIG, _NESTED), f"{_CONFIG}is nested too deeply"),
    BadDirectory(
        "a nested setting", raw_setting("mlp_bias", "[" * 900 + "]" * 900), rf"{_CONFIG}(mlp_bias|is nested)"
    ),
    BadDirectory("a huge config", sparse(CONFIG, 1 << 40), f"{_CONFIG}is larger than 1024 KiB"),
    BadDirectory("a setting twice", raw_setting("vocab_size", "97"), f"{_CONFIG}.*vocab_size occurs twice"),
    BadDirectory("NaN in the config", setting(rms_norm_eps=float("nan")), f"{_CONFIG}.*NaN is not a number"),
    BadDirectory(
        "an endless integer",
        raw_setting("x", "9" * 5000),
        f"{_CONFIG}is not valid JSON: a number has too many digits$",
    ),
    BadDirectory("a huge integer", raw_setting("partial", "9" * 4000), f"{_CONFIG}partial: must be at most"),
    BadDirectory(
        "no rotation to stretch",
        setting(rope_parameters={"rope_type": "yarn", "rope_theta": 1, "factor": 2.0}),
        f"{_CONFIG}rope_parameters: ",
    ),
    BadDirectory(
        "an end token that is text",
        write(GENERATION, json.dumps({"eos_token_id": [3, "4"]})),
        r"/generation_config\.json: eos_token_id: must be a token id or a list",
    ),
    BadDirectory(
        "a dtype that is a list", setting(dtype=[]), rf"{_CONFIG}dtype: must be one of .*, got \[\]"
    ),
    *(
        BadDirectory(
            f"a rotation of type {kind!r}",
            setting(rope_parameters={"rope_type": kind, "factor": 2.0}),
            rf"config\.json: rope_parameters: rope_type: must be one of .*{re.escape(repr(kind))}",
        )
        for kind in ("bogus", ["yarn"])
    ),
    BadDirectory("an escape for the terminal", setting(model_type="\x1b[2J"), r"model_type: .*x1b"),
    BadDirectory(
        "other bytes in generation_config", write(GENERATION, b"\0"), r"/generation_config\.json: is"
    ),
]

KINDS_OF_FILES = [
    BadDirectory("a directory as the config", instead(CONFIG, Path.mkdir), f"{_CONFIG}.*not a regular file"),
    BadDirectory("a FIFO as generation_config", fifo(GENERATION), r"/generation_config\.json: .*not a reg"),
    BadDirectory("a link to a FIFO as the weights", _link_to_a_fifo, f"{_FILE}.*not a regular file"),
    BadDirectory("a FIFO as the tokenizer", fifo(TOKENIZER), f"{_TOKENIZER}.*not a regular file"),
    BadDirectory("a FIFO as the weights", fifo(WEIGHTS), f"{_FILE}.*not a regular file"),
    BadDirectory("a FIFO as the index", fifo(INDEX), f"{_INDEX}.*not a regular file", sharded=True),
    BadDirectory("a socket as the weights", a_socket(WEIGHTS), f"{_FILE}cannot be read"),
    BadDirectory("a device as the weights", link(WEIGHTS, "/dev/zero"), f"{_FILE}.*not a regular file"),
    BadDirectory("a link to nothing", link(WEIGHTS, "nowhere"), f"{_FILE}cannot be read: No such file"),
]

HEADERS = [
    BadDirectory("no weights", remove(WEIGHTS), r"has neither model\.safetensors nor"),
    BadDirectory("empty weights", write(WEIGHTS, b""), f"{_FILE}is truncated or not a safetensors file"),
    BadDirectory("a header of 2^64 bytes", write(WEIGHTS, b"\xff" * 99), f"{_FILE}is truncated"),
    BadDirectory(
        "a header of a gigabyte",
        lambda directory: [
            write(WEIGHTS, (1 << 30).to_bytes(8, "little"))(directory),
            sparse(WEIGHTS, 2 << 30)(directory),
        ],
        f"{_FILE}the header is larger than 32768 KiB",
    ),
    BadDirectory("a nested header", raw_header(_NESTED.encode()), f"{_FILE}the header is nested too deeply"),
    BadDirectory(
        "a header of lists", raw_header(b"[" + b"[]," * 10_000_000), f"{_FILE}the header holds more"
    ),
    BadDirectory("truncated weights", lambda d: os.truncate(d / WEIGHTS, 90_000), "the file is .* too short"),
    BadDirectory(
        "bytes of no tensor", sparse(WEIGHTS, 1 << 40), f"{_FILE}is .* bytes longer than its tensors"
    ),
    BadDirectory("overlapping tensors", entry(data_offsets=[0, 32768]), f"{_FILE}tensor .* overlaps tensor"),
    BadDirectory("a tensor beyond the end", entry(data_offsets=[2**50, 2**50 + 32768]), "bytes too short"),
    BadDirectory("an end before its begin", entry(data_offsets=[32768, 0]), _CORRUPT),
    BadDirectory("a shape of 2^70", entry(shape=[2**70, 64]), _CORRUPT),
    BadDirectory("a shape of a million dimensions", entry(shape=[1] * 10**5), _CORRUPT),
    BadDirectory(
        "bytes that are not the shape's", entry(shape=[128, 65]), r"is F32 \[128, 65\] but has 32768"
    ),
    BadDirectory("an unknown dtype", entry(dtype="F99"), f"tensor {Q_PROJ} must be one of F32, BF16, F16"),
    BadDirectory(
        "another dtype",
        tensors(lambda found: found.update({Q_PROJ: torch.zeros(128, 64, dtype=torch.int32)})),
        f"tensor {Q_PROJ} must be one of F32, BF16, F16, got I32",
    ),
    BadDirectory("a missing tensor", tensors(lambda found: found.pop(Q_PROJ)), f"tensor {Q_PROJ} is missing"),
    BadDirectory("an unknown tensor", tensors(lambda d: d.update(ghost=torch.zeros(1))), "ghost is not part"),
]

SHARDS = [
    BadDirectory(
        "a shard outside", move_first_to("../x.safetensors"), f"{_INDEX}.* same directory", sharded=True
    ),
    BadDirectory("the folder above as a shard", move_first_to(".."), "is not a regular file", sharded=True),
    BadDirectory("a shard of no possible name", move_first_to("a\0"), "cannot be read: .*null", sharded=True),
    BadDirectory(
        "a shard that is not there", move_first_to("x.safetensors"), "x.* cannot be read", sharded=True
    ),
    BadDirectory(
        "an index of a list", write(INDEX, '{"weight_map": []}'), f"{_INDEX}must have", sharded=True
    ),
    BadDirectory("a nested index", write(INDEX, _NESTED), f"{_INDEX}is nested too deeply", sharded=True),
    BadDirectory("a huge index", sparse(INDEX, 1 << 40), f"{_INDEX}is larger than", sharded=True),
    BadDirectory("a tensor in two shards", _repeat_in_another_shard, "tensor .* is also in", sharded=True),
    BadDirectory("shards in another order", _shards_in_other_order, "tensor .* is missing", sharded=True),
]

NUMBERS = [
    BadDirectory(
        "NaN in a weight", one_value(float("nan")), f"{_FILE}tensor {Q_PROJ} is not finite as float32"
    ),
    BadDirectory(
        "a weight too large for the asked dtype",
        lambda directory: [one_value(3.4e38)(directory), setting(dtype="bfloat16")(directory)],
        f"{_FILE}tensor {Q_PROJ} is not finite as bfloat16",
    ),
]

TOKENIZERS = [
    BadDirectory("half a tokenizer", sparse(TOKENIZER, 100), f"{_TOKENIZER}is not valid JSON"),
    BadDirectory("a nested tokenizer", write(TOKENIZER, _NESTED), f"{_TOKENIZER}is nested too deeply"),
    BadDirectory(
        "a tokenizer of lists", write(TOKENIZER, b"[" + b"[]," * 20_000_000), f"{_TOKENIZER}holds more than"
    ),
    BadDirectory(
        "a token added with an id that no message can have",
        write(TOKENIZER, json.dumps({"model": {"vocab": {}}, "added_tokens": [{"id": 2**32}]})),
        f"{_TOKENIZER}the id of each token must be a whole number from 0 to {2**32 - 1}",
    ),
    *(
        BadDirectory(
            f"a token {token_id!r}",
            write(TOKENIZER, json.dumps({"model": {"vocab": {"a": 0, "b": token_id}}})),
            f"{_TOKENIZER}the id of each token must be",
        )
        for token_id in _NOT_IDS
    ),
    BadDirectory("no tokenizer", write(TOKENIZER, '{"auths": {}}'), f"{_TOKENIZER}is not a tokenizer"),
]

TOKENS = [
    BadDirectory(f"a {name} of {value!r}", write(TOKENIZER_CONFIG, json.dumps({name: value})), says)
    for name, value, says in (
        ("added_tokens_decoder", [], f"{_TOKENIZER_CONFIG}added_tokens_decoder: must be an object"),
        ("added_tokens_decoder", {"a": {}}, f"{_TOKENIZER_CONFIG}added_tokens_decoder: must have token ids"),
        ("added_tokens_decoder", {"1": "a"}, f"{_TOKENIZER_CONFIG}added_tokens_decoder: must have objects"),
        ("added_tokens_decoder", {"1": {"content": "a", "lstrip": 1}}, "must be true or false"),
        ("additional_special_tokens", "a", f"{_TOKENIZER_CONFIG}extra_special_tokens: must be a list"),
        ("extra_special_tokens", [1], f"{_TOKENIZER_CONFIG}extra_special_tokens: must be a string, or an"),
    )
] + [
    BadDirectory(
        "an added token 1.5", write(ADDED_TOKENS, '{"a": 1.5}'), r"/added_tokens\.json: must have token"
    ),
    BadDirectory("a list of added tokens", write(ADDED_TOKENS, "[]"), r"/added_tokens\.json: must be a JSON"),
]

PICKLES = [
    BadDirectory(
        f"only {name}", _pickled(name), rf"has its weights as pickles only \({name}\), which run code"
    )
    for name in ("pytorch_model-00001-of-00002.bin", "consolidated.00.pth")
]

_NAMED_TEMPLATES = instead(NAMED_TEMPLATES, Path.mkdir)
TEMPLATES = [
    BadDirectory(
        "a template of bytes", write(TEMPLATE, b"\xff{{ x }}"), r"/chat_template\.jinja: is not UTF-8"
    ),
    BadDirectory(
        "a link to a secret", link(TEMPLATE, "/etc/passwd"), r"/chat_template\.jinja: is not a template"
    ),
    BadDirectory("a FIFO as the template", fifo(TEMPLATE), r"/chat_template\.jinja: .*not a regular file"),
    BadDirectory(
        "half a tokenizer_config", write(TOKENIZER_CONFIG, "{"), f"{_TOKENIZER_CONFIG}is not valid JSON"
    ),
    *(
        BadDirectory(
            f"a chat_template of {value!r}",
            write(TOKENIZER_CONFIG, json.dumps({"chat_template": value})),
            f"{_TOKENIZER_CONFIG}chat_template: must be a string, or a list of strings with distinct",
        )
        for value in ({"a": "b"}, [{"name": "a"}], [{"name": "a", "template": "b"}] * 2, "\ud800")
    ),
    *(
        BadDirectory(
            f"a bos_token of {value!r}",
            write(TOKENIZER_CONFIG, json.dumps({"chat_template": "x", "bos_token": value})),
            f"{_TOKENIZER_CONFIG}bos_token: must be a string, or an object",
        )
        for value in ({}, {"content": 2}, "\ud800")
    ),
    BadDirectory(
        "a FIFO as a named template",
        all_of(_NAMED_TEMPLATES, fifo(f"{NAMED_TEMPLATES}/rag.jinja")),
        r"/additional_chat_templates/rag\.jinja: .*not a regular file",
    ),
    BadDirectory(
        "a named template of bytes",
        all_of(_NAMED_TEMPLATES, write(f"{NAMED_TEMPLATES}/rag.jinja", b"\xff")),
        r"/additional_chat_templates/rag\.jinja: is not UTF-8",
    ),
    BadDirectory(
        "an eos_token of a number",
        all_of(write(TEMPLATE, "{{ x }}"), write(SPECIAL_TOKENS, json.dumps({"eos_token": 2}))),
        r"/special_tokens_map\.json: eos_token: must be a string, or an object",
    ),
]

TEXTS = [*TOKENIZERS, *TOKENS, *TEMPLATES]

BAD_DIRECTORIES = [*SIZES, *SETTINGS, *KINDS_OF_FILES, *HEADERS, *SHARDS, *PICKLES, *NUMBERS, *TEXTS]
