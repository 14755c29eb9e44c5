"""Reads the vocabularies of other libraries, as the metadata that a GGUF file has of a tokenizer.

SentencePiece's BPE, tiktoken's ranks, Mistral's tekken.json, and vocab.json with merges.txt. Which classes of
tokenizers they are of is not known here.

Sources: `sentencepiece_model.proto` of sentencepiece; `convert_slow_tokenizer.py` and
`integrations/mistral/tokenizer.py` of transformers.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workers.common.byte_level import BYTES
from workers.common.gguf.header import Value
from workers.common.gguf.splits import Split
from workers.models.errors import ModelError
from workers.models.files import parse_object, read_file
from workers.models.gguf.tokenizer_json import CONTROL, NORMAL, UNUSED, USER_DEFINED, merges_of

# The largest known ones are tekken.json, with 20 MB and 600,000 values.
_MAX_BYTES = 32 << 20
_MAX_VALUES = 2_500_000
MAX_TOKENS = 1 << 20
# A kind of model in sentencepiece_model.proto.
_BPE = 2

# The characters that are written for bytes.
_LETTERS = {byte: letter for letter, byte in BYTES.items()}


@dataclass(slots=True)
class Vocabulary:
    """What a file says.

    Attributes:
        tokens: Their texts, by their ids.
        kinds: Their types, as GGUF numbers them.
        split: How texts are split; None: SentencePiece does not.
        scores: Of SentencePiece's pieces.
        more: More metadata of GGUF.
        normalizers: What changes a text before its spaces are replaced.
    """

    tokens: list[str]
    kinds: list[int]
    split: Split | None = None
    scores: list[float] = field(default_factory=list)
    more: dict[str, Value] = field(default_factory=dict)
    normalizers: list[dict[str, Any]] = field(default_factory=list)

    def place(self, token_id: int, content: str, *, special: bool) -> None:
        """Gives an id a token. Ids between the last one and this one get tokens that no text has."""
        for unused in range(len(self.tokens), token_id + 1):
            self.tokens.append(f"<|reserved_token_{unused}|>")
            self.kinds.append(UNUSED)
        self.tokens[token_id], self.kinds[token_id] = content, CONTROL if special else USER_DEFINED


def _model(file: Path, split: Split | None) -> Vocabulary:
    """A tokenizer.model of SentencePiece, or of tiktoken. Raises ModelError."""
    return _sentencepiece(file) if split is None else _tiktoken(file, split)


def _sentencepiece(file: Path) -> Vocabulary:
    """Raises ModelError."""
    # Loads a part of the library, which few directories need.
    from google.protobuf.message import DecodeError  # noqa: PLC0415
    from transformers.utils import sentencepiece_model_pb2_new  # noqa: PLC0415

    messages: Any = sentencepiece_model_pb2_new
    model = messages.ModelProto()
    try:
        model.ParseFromString(read_file(file, _MAX_BYTES))
    except DecodeError:
        raise ModelError("is not a model of SentencePiece") from None
    trained, rules = model.trainer_spec, model.normalizer_spec
    if trained.model_type != _BPE or trained.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        raise ModelError("of SentencePiece only BPE with marks before words is supported")
    _check_count(len(model.pieces))
    found = Vocabulary([one.piece for one in model.pieces], [one.type for one in model.pieces])
    if bytes in map(type, found.tokens):  # what is not UTF-8
        raise ModelError("is not a model of SentencePiece")
    found.scores = [one.score for one in model.pieces]
    found.more["add_space_prefix"] = rules.add_dummy_prefix
    for key, token_id in (("bos", trained.bos_id), ("eos", trained.eos_id), ("unknown", trained.unk_id)):
        if 0 <= token_id < len(found.tokens):
            found.more[f"{key}_token_id"] = token_id
    if rules.precompiled_charsmap:
        charsmap = base64.b64encode(rules.precompiled_charsmap).decode()
        found.normalizers.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if rules.remove_extra_whitespaces:
        found.normalizers += [
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ]
    return found


def _tiktoken(file: Path, split: Split | None) -> Vocabulary:
    """Lines with a token in base64 and its rank. Raises ModelError and GgufError."""
    lines = read_file(file, _MAX_BYTES).split(b"\n")
    _check_count(len(lines))
    try:
        pairs = (line.split() for line in lines if line.strip())
        ranks = sorted((int(rank), base64.b64decode(token, validate=True)) for token, rank in pairs)
    except ValueError:
        raise ModelError("each line must be a token in base64 and its rank") from None
    if split is None or [rank for rank, _ in ranks] != [*range(len(ranks))]:
        raise ModelError("must be of a class that is known, with the ranks 0, 1 and so on")
    return _of_bytes([token for _, token in ranks], split)


def read_tekken(file: Path, _: Split | None) -> Vocabulary:
    """Raises ModelError and GgufError."""
    content: dict[str, Any] = parse_object(read_file(file, _MAX_BYTES), file, max_values=_MAX_VALUES)
    try:
        config, special = content["config"], content["special_tokens"]
        count = int(config["default_num_special_tokens"])
        tokens = [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"]]
        names = {int(entry["rank"]): str(entry["token_str"]) for entry in special}
        pattern, size = str(config["pattern"]), int(config["default_vocab_size"])
    except (KeyError, TypeError, ValueError):
        raise ModelError("is not a tokenizer of Mistral whose version is known") from None
    _check_count(count + len(tokens))
    found = _of_bytes(tokens[: max(0, size - count)], Split(pattern))
    texts = [names.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]
    found.tokens[:0], found.kinds[:0] = texts, [CONTROL] * count
    for key, text in (("bos", "<s>"), ("eos", "</s>"), ("unknown", "<unk>")):
        if text in texts:
            found.more[f"{key}_token_id"] = texts.index(text)
    return found


def _vocab_json(file: Path, split: Split | None) -> Vocabulary:
    """With merges.txt beside it. Raises ModelError."""
    ids = parse_object(read_file(file, _MAX_BYTES), file, max_values=_MAX_VALUES)
    tokens: dict[int, str] = {index: token for token, index in ids.items() if type(index) is int}
    _check_count(len(tokens))
    if split is None or sorted(tokens) != [*range(len(ids))]:
        raise ModelError("must be of a class that is known, with the ids 0, 1 and so on")
    try:
        text = read_file(file.with_name("merges.txt"), _MAX_BYTES).decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise ModelError("the merges beside it are not UTF-8") from None
    if text.count("\n") > MAX_TOKENS:
        raise ModelError(f"there are more than {MAX_TOKENS} merges beside it")
    lines = text.split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    kinds = [NORMAL] * len(ids)
    return Vocabulary([tokens[index] for index in range(len(ids))], kinds, split, more={"merges": merges})


Reader = Callable[[Path, Split | None], Vocabulary]
"""Reads a file whose class splits texts so; None: it is of SentencePiece. Raises ModelError and GgufError."""

READERS: Mapping[str, Reader] = {
    "tekken.json": read_tekken,
    "tokenizer.model": _model,
    "tiktoken.model": _tiktoken,
    "qwen.tiktoken": _tiktoken,
    "hy.tiktoken": _tiktoken,
    "vocab.json": _vocab_json,
}


def _of_bytes(tokens: list[bytes], split: Split) -> Vocabulary:
    """A vocabulary of tiktoken: any two tokens are merged whose bytes make one, those of the lowest first."""
    texts = [token.decode("latin-1").translate(_LETTERS) for token in tokens]
    ids = {text: index for index, text in enumerate(texts)}
    merges = [" ".join(pair) for pair in merges_of(ids, texts, range(0, -len(texts), -1))]
    return Vocabulary(texts, [NORMAL] * len(texts), replace(split, whole=True), more={"merges": merges})


def _check_count(count: int) -> None:
    """Raises ModelError."""
    if not 0 < count <= MAX_TOKENS:
        raise ModelError(f"must have from 1 to {MAX_TOKENS} tokens, got {count}")
