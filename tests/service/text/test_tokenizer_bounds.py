"""Which tokenizers run in the gateway's own process: those of well-known models, and no unknown ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from service.text.tokenizer_bounds import QWEN_2, decodes_in_bounds, encodes_in_bounds
from tests.service.text.kinds import byte_fallback, byte_level, metaspace

SHIPPED = Path(__file__).parents[3] / "workers" / "models" / "adder" / "tokenizer.json"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# As in the files of these models.
SPLITS = {
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES,
    ),
    "llama3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES,
    ),
    "qwen3.5": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
        r"|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES,
    ),
    "gpt-oss": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES,
    ),
    "mistral": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES,
    ),
    "deepseek": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        (
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
            " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
        ),
    ),
}


def with_part(name: str, part: object) -> Tokenizer:
    tokenizer = byte_level()
    setattr(tokenizer, name, part)
    return tokenizer


def split(*expressions: str) -> Tokenizer:
    parts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return with_part("pre_tokenizer", pre_tokenizers.Sequence([*parts, last]))


ORDINARY = {
    **{name: split(*expressions) for name, expressions in SPLITS.items()},
    "gpt2": byte_level(),
    "llama2": byte_fallback(),
    "shipped": Tokenizer.from_file(str(SHIPPED)),
    "normalized": with_part("normalizer", normalizers.NFC()),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_tokenizer_needs_no_process(name: str) -> None:
    assert encodes_in_bounds(ORDINARY[name]) and decodes_in_bounds(ORDINARY[name])


UNKNOWN = {
    "expression": split(QWEN_2, "(a+)+b"),
    "model": metaspace(),
    "prefix": with_part("normalizer", normalizers.Prepend("a" * 1000)),
    "pattern": with_part("normalizer", normalizers.Replace(Regex("a*"), "b")),
    "sequence": with_part("normalizer", normalizers.Sequence([normalizers.ByteLevel()] * 40)),
    "template": with_part(
        "post_processor", processors.TemplateProcessing("$A" + " a" * 1000, special_tokens=[("a", 1)])
    ),
    "affix": with_part("model", models.BPE({"a": 0}, [], continuing_subword_prefix="#" * 1000)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_part_needs_a_process(name: str) -> None:
    assert not encodes_in_bounds(UNKNOWN[name])


def test_padding_and_truncation_need_a_process() -> None:
    padding, truncating = byte_level(), byte_level()
    padding.enable_padding(length=1 << 40)
    truncating.enable_truncation(1000, stride=999)
    assert not encodes_in_bounds(padding) and not encodes_in_bounds(truncating)


def test_a_vocabulary_with_a_long_token_is_not_used() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["a" * 5000])
    assert not decodes_in_bounds(tokenizer)
