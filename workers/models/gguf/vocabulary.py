"""The metadata of a GGUF file for a tokenizer.json: the reverse of `workers.models.gguf.tokenizer_json`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from workers.common.gguf import GgufError
from workers.common.gguf.header import Value, shown
from workers.common.gguf.splits import SPLITS
from workers.models.chat_template import DEFAULT
from workers.models.gguf.tokenizer import TEMPLATE, read_text
from workers.models.gguf.tokenizer_json import (
    BYTE,
    CONTROL,
    NORMAL,
    PREFIX,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    split_steps,
)
from workers.models.text import ModelText

_log = logging.getLogger(__name__)

# llama.cpp's names of pre-tokenizers, first the ones that its converters write.
_NAMES = ("llama-bpe", "qwen2", "tekken", "gpt-4o", "smollm", "gpt-2", "dbrx")
_NONE = {"tokenizer.ggml.model": "none"}
_BYTE_TEXTS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
# Settings of added tokens that GGUF cannot represent.
_FLAGS = ("lstrip", "rstrip", "single_word")
# Settings that do not change token ids.
_WITHOUT_EFFECT = ("trim_offsets",)
_MOST_NAMED = 5


def text_metadata(
    text: ModelText, vocab_size: int, ends: Mapping[str, Value], architecture: str
) -> dict[str, Value]:
    """The metadata of the tokenizer and the chat templates.

    Args:
        text: The tokenizer and chat templates of the model.
        vocab_size: The size of the model's vocabulary. Ids that the tokenizer lacks become unused tokens.
        ends: The metadata of begin and end tokens.
        architecture: The architecture of the file.

    Raises:
        GgufError: GGUF cannot represent it; the message names a part of tokenizer.json.
    """
    templates: dict[str, Value] = {
        TEMPLATE if name == DEFAULT else f"{TEMPLATE}.{name}": source
        for name, source in text.chat_template.sources.items()
    }
    if not text.tokenizer_json:
        return {**_NONE, **ends, **templates}
    tokenizer = json.loads(text.tokenizer_json)
    # The tokens that the tokenizer names override those of the config.
    found = _tokens(tokenizer, vocab_size) | dict(ends) | _named(text, tokenizer)
    first, last = _around(tokenizer.get("post_processor"))
    for name, token in (("bos", first), ("eos", last)):
        if token is not None and found.setdefault(f"{PREFIX}{name}_token_id", token) != token:
            raise GgufError(f"post_processor: adds token {token}, which is not the {name} token of the model")
        found[f"{PREFIX}add_{name}_token"] = token is not None
    return _recognised(found, tokenizer, vocab_size, architecture) | templates


def _recognised(
    found: Mapping[str, Value], tokenizer: Mapping[str, Any], vocab_size: int, architecture: str
) -> dict[str, Value]:
    """The metadata with the kind of tokenizer, checked to be read back as the same. Raises GgufError."""
    model, wanted = tokenizer["model"], _parts(tokenizer)
    more: dict[str, Value]
    if model.get("byte_fallback"):
        adds_space = any(step.get("type") == "Prepend" for step in wanted["normalizer"])
        more = {
            "model": "llama",
            "scores": _scores(found, model, architecture),
            "add_space_prefix": adds_space,
        }
    else:
        more = {
            "model": "gpt2",
            "pre": _split_name(wanted),
            "merges": [" ".join(pair) for pair in _pairs(model)],
        }
    metadata = {**found, **{PREFIX + key: value for key, value in more.items()}}
    again = read_text(metadata | {"general.architecture": architecture}, vocab_size, sys.maxsize)
    written = _parts(json.loads(again.tokenizer_json))
    for part, value in wanted.items():
        if written[part] != value:
            raise GgufError(f"{part}: that of this tokenizer.json cannot be written")
    return metadata


def _split_name(wanted: Mapping[str, Any]) -> str:
    """The name of the pre-tokenizer. Raises GgufError if it has none."""
    for name in (*_NAMES, *SPLITS):
        split = SPLITS[name]
        steps = [*_steps({"type": "Sequence", "pretokenizers": split_steps(split)}, "pretokenizers")]
        if steps == wanted["pre_tokenizer"] and split.whole == wanted["model.ignore_merges"]:
            return name
    raise GgufError(f"pre_tokenizer: none that GGUF has a name for, which are {', '.join(sorted(SPLITS))}")


def _parts(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a tokenizer.json that determine its tokens."""
    model = tokenizer["model"]
    steps = [*_steps(tokenizer.get("pre_tokenizer"), "pretokenizers")]
    has_no_spaces = model.get("byte_fallback")
    return {
        "normalizer": [*_steps(tokenizer.get("normalizer"), "normalizers")],
        # gemma's split at spaces has no effect after all spaces were replaced.
        "pre_tokenizer": [
            step for step in steps if not (has_no_spaces and step.get("pattern") == {"String": " "})
        ],
        "model.ignore_merges": bool(model.get("ignore_merges")),
        "model.unk_token": model.get("unk_token") if model.get("byte_fallback") else None,
        "model.merges": [*_pairs(model)],
        "post_processor": _around(tokenizer.get("post_processor")),
    }


def _steps(part: Mapping[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """The steps of a sequence, or the part itself if it is a single step."""
    if part is None:
        return
    if part.get("type") == "Sequence":
        for each in part.get(name) or ():
            yield from _steps(each, name)
        return
    yield {key: value for key, value in part.items() if key not in _WITHOUT_EFFECT}


def _pairs(model: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for merge in model.get("merges") or ():
        yield tuple(merge.split(" ") if isinstance(merge, str) else merge)


def _tokens(tokenizer: Mapping[str, Any], vocab_size: int) -> dict[str, Value]:
    """The texts of all tokens and their kinds. Raises GgufError."""
    model = tokenizer["model"]
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise GgufError(f"model: only BPE can be written, got {shown(model.get('type'))}")
    texts = [""] * vocab_size
    kinds = [UNUSED] * vocab_size
    of_bytes = _BYTE_TEXTS if model.get("byte_fallback") else frozenset()
    added = [(token["content"], token["id"], token) for token in tokenizer.get("added_tokens") or ()]
    for text, token_id, token in (*((text, number, None) for text, number in model["vocab"].items()), *added):
        if token_id >= vocab_size:
            raise GgufError(
                f"token {shown(text)}: its id {token_id} is not in the vocabulary of {vocab_size}"
            )
        texts[token_id] = text
        kinds[token_id] = BYTE if text in of_bytes else NORMAL
        if token is not None:
            kinds[token_id] = CONTROL if token["special"] else USER_DEFINED
    if (unknown := model.get("unk_token")) is not None and model["vocab"].get(unknown) is not None:
        kinds[model["vocab"][unknown]] = UNKNOWN
    for token_id, kind in enumerate(kinds):
        if kind == UNUSED:
            texts[token_id] = f"[PAD{token_id}]"
    ignored = [text for text, _, token in added if any(token.get(flag) for flag in _FLAGS)]
    if ignored:
        named = ", ".join(map(shown, ignored[:_MOST_NAMED]))
        _log.warning("files have no place for lstrip, rstrip and single_word of added tokens: %s", named)
    return {f"{PREFIX}tokens": [*texts], f"{PREFIX}token_type": [*kinds]}


def _named(text: ModelText, tokenizer: Mapping[str, Any]) -> dict[str, Value]:
    """The ids of the unknown and padding tokens."""
    ids = dict(tokenizer["model"]["vocab"])
    ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    texts = dict(text.chat_template.special_tokens)
    if tokenizer["model"].get("unk_token") is not None:
        texts["unk_token"] = tokenizer["model"]["unk_token"]
    names = {"bos": "bos_token", "unknown": "unk_token", "padding": "pad_token"}
    return {
        f"{PREFIX}{key}_token_id": ids[texts[name]] for key, name in names.items() if texts.get(name) in ids
    }


def _scores(found: Mapping[str, Value], model: Mapping[str, Any], architecture: str) -> list[float]:
    """The score of each token: pieces that are merged first have the highest."""
    tokens = found[f"{PREFIX}tokens"]
    assert isinstance(tokens, list)
    if architecture.startswith("gemma"):
        return [-float(token_id) for token_id in range(len(tokens))]
    ranks: dict[str, int] = {}
    for pair in _pairs(model):
        ranks.setdefault("".join(pair), len(ranks))
    return [-float(ranks.get(str(token), len(ranks))) for token in tokens]


def _around(post_processor: Mapping[str, Any] | None) -> tuple[int | None, int | None]:
    """The ids of the tokens added before and after a text. Raises GgufError."""
    found: tuple[int | None, int | None] = (None, None)
    for step in _steps(post_processor, "processors"):
        if step.get("type") == "ByteLevel":
            continue
        if step.get("type") != "TemplateProcessing":
            raise GgufError(f"post_processor: a {shown(step.get('type'))} cannot be written")
        ids = {name: token["ids"] for name, token in step["special_tokens"].items()}
        parts = [
            ids[part["SpecialToken"]["id"]] if "SpecialToken" in part else None for part in step["single"]
        ]
        match parts:
            case [None]:
                pass
            case [[int(first)], None]:
                found = first, None
            case [None, [int(last)]]:
                found = None, last
            case [[int(first)], None, [int(last)]]:
                found = first, last
            case _:
                raise GgufError("post_processor: adds more than one token before or after a text")
    return found
