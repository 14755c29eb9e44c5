"""How texts are split before BPE over bytes, by the names of pre-tokenizers in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workers.common.gguf import GgufError
from workers.common.gguf.header import Value, shown


@dataclass(frozen=True, slots=True)
class Split:
    """A pre-tokenizer.

    Attributes:
        pattern: A regular expression whose matches are the parts; "": that of GPT-2.
        digits: Each digit is a part of its own before.
        whole: A part that is a token is not merged from others. If a file does not say whether a first token
            is added, it is then.
        nfc: Texts are normalized before.
    """

    pattern: str = ""
    digits: bool = False
    whole: bool = False
    nfc: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_WITH_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = Split(_WORDS + r"|\p{N}{1,3}" + _REST, whole=True)
_DBRX = Split(_LLAMA3.pattern)
_QWEN2 = Split(_WORDS + r"|\p{N}" + _REST, nfc=True)
_QWEN35 = Split(
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    + r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    nfc=True,
)
_TEKKEN = Split(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    + _REST_WITH_SLASH,
    whole=True,
)
_GPT4O = Split(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}" + _REST_WITH_SLASH
)
_GPT2, _DIGITS = Split(), Split(digits=True)

SPLITS = {
    "default": _GPT2, "gpt-2": _GPT2,
    "llama3": _LLAMA3, "llama-v3": _LLAMA3, "llama-bpe": _LLAMA3, "falcon3": _LLAMA3, "pixtral": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _DBRX, "smaug-bpe": _DBRX,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "megrez": _QWEN2,
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "smollm": _DIGITS,
}  # fmt: skip

_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"


def split_of(metadata: Mapping[str, Value]) -> Split | None:
    """The pre-tokenizer of a file; None: it has SentencePiece's BPE, which needs none.

    Raises GgufError for a tokenizer that is not known.
    """
    kind, name = metadata.get(_MODEL), metadata.get(_PRE, "default")
    if kind == "llama":
        return None
    if kind != "gpt2":
        raise GgufError(f"{_MODEL}: must be gpt2 or llama, got {shown(kind)}")
    if not isinstance(name, str) or name not in SPLITS:
        raise GgufError(f"{_PRE}: must be one of {', '.join(sorted(SPLITS))}, got {shown(name)}")
    return SPLITS[name]
