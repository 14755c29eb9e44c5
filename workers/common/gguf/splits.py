"""How texts are split before BPE over bytes, by the names of pre-tokenizers in GGUF files.

The expressions are those in the tokenizer.json of the models that a name stands for; see `llama-vocab.cpp` of
llama.cpp.
"""

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
        before: What is a part of its own before: matches of these, one after the other.
        digits: Each digit is a part of its own before.
        whole: A part that is a token is not merged from others.
        nfc: Texts are normalized before.
        bos: If a file does not say whether a first token is added, it is.
    """

    pattern: str = ""
    before: tuple[str, ...] = ()
    digits: bool = False
    whole: bool = False
    nfc: bool = False
    bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_WITH_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = Split(_WORDS + r"|\p{N}{1,3}" + _REST, whole=True, bos=True)
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
    bos=True,
)
_GPT4O = Split(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}" + _REST_WITH_SLASH
)
_GPT2, _DIGITS = Split(), Split(digits=True)
_COMMAND_R = Split(digits=True, nfc=True)
_STABLELM2 = Split(_QWEN2.pattern)
_GLM4 = Split(_LLAMA3.pattern, whole=True)
_SEED = Split(_WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+")
_DEEPSEEK = Split(
    r"\p{N}+",
    before=(
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    ),
)
_DEEPSEEK3 = Split(
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    before=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
)
# Chinese characters are apart.
_CASED, _SMALL = (f"[{each[1:-1]}&&[^\\p{{Han}}]]" for each in (_UPPER, _LOWER))
_KIMI2 = Split(
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_CASED}*{_SMALL}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_CASED}+{_SMALL}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}" + _REST
)

# Digits are in groups of three from the last one, and some scripts of Asia are apart.
_OF_ASIA = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e00-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff"
    "\uac00-\ud7af\u1100-\u11ff]+"
)
_AFMOE = Split(_DEEPSEEK3.pattern, before=(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _OF_ASIA))

SPLITS = {
    "default": _GPT2, "gpt-2": _GPT2, "olmo": _GPT2, "granite-docling": _GPT2, "phi-2": _GPT2,
    "exaone4": _GPT2, "mpt": _GPT2,
    "llama3": _LLAMA3, "llama-v3": _LLAMA3, "llama-bpe": _LLAMA3, "falcon3": _LLAMA3, "pixtral": _LLAMA3,
    "lfm2": _LLAMA3, "falcon-h1": _LLAMA3, "midm-2.0": _LLAMA3,
    "dbrx": _DBRX, "smaug-bpe": _DBRX, "chatglm-bpe": _DBRX,
    "glm4": _GLM4, "seed-coder": _SEED, "kimi-k2": _KIMI2,
    "deepseek-llm": _DEEPSEEK, "deepseek-v3": _DEEPSEEK3, "hunyuan-dense": _DEEPSEEK3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "megrez": _QWEN2,
    "qwen35": _QWEN35, "stablelm2": _STABLELM2, "hunyuan": _STABLELM2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O, "minimax-m2": _GPT4O,
    "afmoe": _AFMOE,
    "smollm": _DIGITS, "refact": _DIGITS, "exaone": _DIGITS, "starcoder": _DIGITS,
    "codeshell": _DIGITS, "command-r": _COMMAND_R,
}  # fmt: skip

# The kind of a tokenizer over characters that lists its merges.
GEMMA4 = "gemma4"
_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"


def split_of(metadata: Mapping[str, Value]) -> Split | None:
    """The pre-tokenizer of a file; None: it has SentencePiece's BPE, which needs none.

    Raises GgufError for a tokenizer that is not known.
    """
    kind, name = metadata.get(_MODEL), metadata.get(_PRE, "default")
    if kind in ("llama", GEMMA4):
        return None
    if kind != "gpt2":
        raise GgufError(f"{_MODEL}: must be gpt2, llama or {GEMMA4}, got {shown(kind)}")
    if not isinstance(name, str) or name not in SPLITS:
        raise GgufError(f"{_PRE}: must be one of {', '.join(sorted(SPLITS))}, got {shown(name)}")
    return SPLITS[name]
