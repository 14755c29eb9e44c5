"""Makes a tokenizer.json from the files of other libraries. Nothing here tokenises, and no code is run.

`workers.models.vocabulary_files` reads the files. What only the code of a directory says is known by the name
of its tokenizer's class.

Source: that code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.common.gguf import GgufError
from workers.common.gguf.header import Value, shown
from workers.common.gguf.splits import SPLITS
from workers.models.errors import ModelError
from workers.models.files import errors_naming, exists, read_object
from workers.models.gguf.tokenizer_json import PREFIX, tokenizer_of
from workers.models.token_settings import TokenSettings, read_settings
from workers.models.vocabulary_files import MAX_TOKENS, READERS, Reader, Vocabulary, read_tekken

# The longest texts of special tokens that templates get, in characters.
_MAX_NAME = 256
_METASPACE = "\u2581"
_NAMED = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}


@dataclass(frozen=True, slots=True)
class _Class:
    """What the code of a tokenizer's class says, and no file.

    Attributes:
        split: The name of the pre-tokenizer; "": SentencePiece has none.
        special: Special tokens behind the vocabulary.
        prefix: The tokens before a text; none: a BOS token, if the settings say so.
        bos: If the settings do not say it, a BOS token is added.
        end: The token that ends a text, if the settings do not say it.
    """

    split: str = ""
    special: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    bos: bool = False
    end: str = ""


_LLAMA = _Class(bos=True)
_CLASSES = {
    **dict.fromkeys(("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "YiTokenizer"), _LLAMA),
    **dict.fromkeys(("InternLMTokenizer", "InternLM2Tokenizer", "InternLM3Tokenizer"), _LLAMA),
    "BaichuanTokenizer": _LLAMA,
    "ChatGLMTokenizer": _Class(
        special=(
            *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
            *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ),
        prefix=("[gMASK]", "sop"),
    ),
    "ChatGLM4Tokenizer": _Class("glm4", prefix=("[gMASK]", "<sop>")),
    "TikTokenTokenizer": _Class("kimi-k2"),
    "QWenTokenizer": _Class(
        "qwen2",
        special=(
            *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            *(f"<|extra_{number}|>" for number in range(205)),
        ),
        end="<|im_end|>",
    ),
    "HYTokenizer": _Class(
        "qwen2",
        special=(
            *("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>"),
            *(f"<|extra_{number}|>" for number in range(204)),
        ),
        bos=True,
    ),
    **dict.fromkeys(("GPT2Tokenizer", "CodeGenTokenizer"), _Class("gpt-2")),
    "Qwen2Tokenizer": _Class("qwen2"),
}


@dataclass(frozen=True, slots=True)
class MadeTokenizer:
    """A tokenizer.json that was made.

    Attributes:
        content: What the file would have.
        file: What it was made from.
        named: The texts of special tokens by the names that templates use.
    """

    content: dict[str, Any]
    file: Path
    named: Mapping[str, str]


def make_tokenizer(directory: Path, settings: TokenSettings) -> MadeTokenizer | None:
    """The tokenizer of a directory without a tokenizer.json. None: it has none of the files that are known.

    Raises ModelError: the file cannot be read, or is not of a kind that is known.
    """
    name = next((name for name in READERS if exists(directory / name)), None)
    if name is None:
        return None
    with errors_naming(directory / name):
        try:
            return _made(directory / name, READERS[name], settings)
        except GgufError as error:
            raise ModelError(str(error)) from None


def _made(file: Path, read: Reader, settings: TokenSettings) -> MadeTokenizer:
    """Raises ModelError and GgufError."""
    config = read_settings(file.parent)
    name = str(config.get("tokenizer_class") or _usual_class(file.with_name("config.json")))
    kind = _Class(bos=True) if read is read_tekken else _CLASSES.get(name.removesuffix("Fast"))
    if kind is None:
        raise ModelError(f"its tokenizer_class is not known, got {shown(name)}")
    found = read(file, SPLITS[kind.split] if kind.split else None)
    _place_all(found, settings, kind.special)
    ids = {token: index for index, token in enumerate(found.tokens)}
    metadata: dict[str, Value] = {PREFIX + key: value for key, value in found.more.items()}
    if kind.end in ids:
        metadata[f"{PREFIX}eos_token_id"] = ids[kind.end]
    for named, key in _NAMED.items():
        if named in settings.named:
            metadata[PREFIX + key] = ids.get(settings.texts.get(named, ""))  # type: ignore[assignment]
    for added, default in (("add_bos_token", kind.bos), ("add_eos_token", False)):
        given = config.get(added)
        metadata[PREFIX + added] = default if given is None else given is True
    metadata |= {f"{PREFIX}token_type": found.kinds, f"{PREFIX}scores": found.scores}
    prefix = [ids[token] for token in kind.prefix if token in ids] if kind.prefix else None
    made = tokenizer_of(metadata, found.tokens, found.split, prefix)
    if found.split is None:
        _normalise(made, found.normalizers, is_legacy=config.get("legacy") is not False)
    indexes = {name: metadata.get(PREFIX + key) for name, key in _NAMED.items()}
    texts = {name: found.tokens[index] for name, index in indexes.items() if isinstance(index, int)}
    return MadeTokenizer(made, file, {name: text for name, text in texts.items() if len(text) <= _MAX_NAME})


def _usual_class(config: Path) -> str:
    """The library's class for the type of a model. Raises ModelError."""
    # Loads a part of the library, which few directories need.
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES  # noqa: PLC0415

    settings = read_object(config, takes_infinity=True) if exists(config) else {}
    found = TOKENIZER_MAPPING_NAMES.get(str(settings.get("model_type")))
    return found if found in _CLASSES else "LlamaTokenizer"


def _place_all(found: Vocabulary, settings: TokenSettings, special: tuple[str, ...]) -> None:
    """Adds the tokens of the settings and of the class. Raises ModelError."""
    for token_id, token in settings.added.items():
        if token_id >= MAX_TOKENS:
            raise ModelError(f"there is an added token with the id {token_id}, and {MAX_TOKENS} are read")
        found.place(token_id, token.content, special=token.special)
    others = [(token.content, token.special) for token in settings.to_add({}, None)]
    known = {*found.tokens}
    for content, is_special in (*((content, True) for content in special), *others):
        if content not in known:
            found.place(len(found.tokens), content, special=is_special)
            known.add(content)
    if found.split is None:
        found.scores += [0.0] * (len(found.tokens) - len(found.scores))


def _normalise(made: dict[str, Any], normalizers: list[dict[str, Any]], *, is_legacy: bool) -> None:
    """Adds what SentencePiece does to a text first.

    is_legacy: A space is added after special tokens, too; otherwise only before a text.
    """
    steps = made["normalizer"]["normalizers"]
    if not is_legacy and not normalizers and len(steps) > 1:
        made["normalizer"] = None
        made["pre_tokenizer"] = {
            "type": "Metaspace", "replacement": _METASPACE, "prepend_scheme": "first", "split": False,
        }  # fmt: skip
    steps[:0] = normalizers
