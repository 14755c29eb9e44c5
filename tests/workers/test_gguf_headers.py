"""Hostile GGUF files: each is refused in one line, or read as what it says, and nothing else is read."""

from __future__ import annotations

import os
import random
import resource
import struct
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.gguf_files import byte_level, write_gguf
from tests.model_factory import TinyModel, make_model
from workers.common.gguf import GgufError
from workers.common.gguf.architectures import ARCHITECTURES
from workers.common.gguf.header import Header, read_header
from workers.executors.loading import NATIVE, load_served
from workers.kv.sizing import KvSizingError
from workers.models.errors import ModelError
from workers.models.gguf.tensors import FileHeader, stored_tensors
from workers.models.source import source_of

FUZZED = 500


def read(content: bytes, arrays: tuple[str, ...] = ()) -> Header:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        with os.fdopen(os.dup(file.fileno()), "rb") as reader:
            return read_header(reader, arrays)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def file_of(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: int = 0,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    keys, tensors = keys or [], tensors or []
    count = counts or (len(tensors), len(keys))
    header = magic + struct.pack("<IQQ", version, *count) + b"".join((*keys, *tensors))
    return header + bytes(-len(header) % 32) + bytes(data)


F32, Q4_0 = 0, 2
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is cut short: it ends inside of the header, at byte 0"),
    "another file": (file_of(magic=b"GGML"), "is not a GGUF file"),
    "version 1": (file_of(version=1), "has version 1 of GGUF: only 2 and 3 are served"),
    "big-endian": (file_of(version=3 << 24), "is big-endian: only little-endian files are served"),
    "huge number of tensors": (file_of(counts=(1 << 62, 0)), "tensors, which is more than"),
    "huge number of keys": (file_of(counts=(0, 1 << 62)), "keys of metadata, which is more than"),
    "long key": (file_of([struct.pack("<Q5x", 1 << 60)]), "a key of metadata: has 1152921504606846976 bytes"),
    "long text": (file_of([key("a", 8, struct.pack("<Q", 1 << 40))]), "a: has 1099511627776 bytes"),
    "long array": (
        file_of([key("a", 9, struct.pack("<IQ", 4, 1 << 50))]),
        "numbers in a, which is more",
    ),
    "many texts": (
        file_of([key("a", 9, struct.pack("<IQ", 8, 1 << 50))]),
        "strings in a, which is more",
    ),
    "array of arrays": (file_of([key("a", 9, struct.pack("<IQ", 9, 1))]), "a: has an array of type 9"),
    "unknown type": (file_of([key("a", 77, b"")]), "a: has type 77, which is none of GGUF"),
    "no truth": (file_of([key("a", 7, b"\x02")]), "a: must be 0 or 1"),
    "no UTF-8": (file_of([key("a", 8, text(b"\xff"))]), "a: is not UTF-8"),
    "key twice": (file_of([key("a", 0, b"1"), key("a", 0, b"1")]), "a: is there twice"),
    "escape": (file_of([key("\x1b[31m", 7, b"\x02")]), "'\\x1b[31m': must be 0 or 1"),
    "alignment": (
        file_of([key("general.alignment", 4, struct.pack("<I", 33))]),
        "general.alignment: must be a power of two up to 65536, got 33",
    ),
    "no alignment": (file_of([key("general.alignment", 4, bytes(4))]), "general.alignment: must be a power"),
    "dimensions": (file_of(tensors=[tensor("t", (1,) * 9, F32, 0)], data=4), "tensor t: has 9 dimensions"),
    "overflow": (
        file_of(tensors=[tensor("t", (1 << 40,) * 4, F32, 0)], data=4),
        "which is empty or too large",
    ),
    "no size": (file_of(tensors=[tensor("t", (4, 0), F32, 0)], data=16), "which is empty or too large"),
    "half a block": (
        file_of(tensors=[tensor("t", (48, 2), Q4_0, 0)], data=100),
        "tensor t: has rows of (48,) values, and q4_0 blocks of 32",
    ),
    "unknown type of a tensor": (
        file_of(tensors=[tensor("t", (1,), 999, 0)], data=4),
        "tensor t: has type 999, which is not known",
    ),
    "offset": (
        file_of(tensors=[tensor("t", (1,), F32, 3)], data=40),
        "begins at 3, which is no multiple of 32",
    ),
    "beyond the end": (
        file_of(tensors=[tensor("t", (9,), F32, 0)], data=32),
        "ends beyond the end of the file",
    ),
    "far beyond": (
        file_of(tensors=[tensor("t", (1,), F32, (1 << 64) - 32)], data=32),
        "ends beyond the end of the file",
    ),
    "overlap": (
        file_of(tensors=[tensor("a", (9,), F32, 0), tensor("b", (8,), F32, 32)], data=64),
        "tensor b: overlaps tensor a",
    ),
    "tensor twice": (file_of(tensors=[tensor("a", (8,), F32, 0)] * 2, data=64), "tensor a: is there twice"),
}


@pytest.mark.parametrize(("content", "said"), BAD.values(), ids=[*BAD])
def test_a_lie_is_refused_in_a_line(content: bytes, said: str) -> None:
    with pytest.raises(GgufError) as refusal:
        read(content)
    assert said in str(refusal.value)
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 300


def test_all_that_a_file_may_have_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    values: dict[str, Any] = {}
    for kind, value in {
        "uint8": 200, "int8": -100, "uint16": 60_000, "int16": -30_000, "uint32": 4_000_000_000,
        "int32": -2_000_000_000, "float32": 1.5, "uint64": 1 << 63, "int64": -(1 << 62), "float64": 0.1,
        "bool": True, "string": "ä🙂",
    }.items():  # fmt: skip
        getattr(writer, f"add_{kind}")(kind, value)
        values[kind] = value
    arrays: dict[str, list[Any]] = {
        "ints": [1, -2],
        "floats": [0.5, 2.0],
        "texts": ["", "ö"],
        "truths": [True, False],
    }
    for name, array in arrays.items():
        writer.add_array(name, array)
    values |= arrays
    writer.add_custom_alignment(64)
    writer.add_array("long", [*range(10_000)])
    writer.add_tensor("a", np.ones((3, 5), dtype=np.float32))
    writer.add_tensor("b", gguf.quantize(np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read(file.read_bytes())
    assert values.items() <= header.metadata.items() and "long" not in header.metadata
    assert read(file.read_bytes(), ("long",)).metadata["long"] == [*range(10_000)]
    found = {name: (info.shape, info.type, info.begin, info.nbytes) for name, info in header.tensors.items()}
    assert found == {
        one.name: (
            tuple(map(int, reversed(one.shape))),
            one.tensor_type.name.lower(),
            one.data_offset,
            one.n_bytes,
        )
        for one in gguf.GGUFReader(file).tensors
    }


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model with a tokenizer."""
    directory = tmp_path_factory.mktemp("good")
    vocabulary = byte_level("qwen2").metadata
    make_model(
        directory, TinyModel(vocab_size=len(vocabulary["tokens"]), hidden_size=32, intermediate_size=32)
    )
    file = directory / "model.gguf"
    kinds = {"q_proj": "q8_0", "o_proj": "q4_0"}
    return write_gguf(
        file,
        directory,
        lambda name: next((kind for part, kind in kinds.items() if part in name), "f16"),
        tokenizer=vocabulary,
    ).read_bytes()


def damaged(good: bytes, seed: int) -> bytes:
    """A file that is cut short, or has other bytes and numbers in its header."""
    dice = random.Random(seed)
    content = bytearray(good)
    end = min(info.begin for info in read(good).tensors.values())
    for _ in range(dice.choice((0, 1, 1, 1, 2, 5))):
        # As often among the numbers at the beginning, and near the tensors, as among the tokens.
        place = dice.choice((dice.randrange(24), dice.randrange(end), end - dice.randrange(1, 3000)))
        match dice.randrange(4):
            case 0:
                content[place] = dice.randrange(256)
            case 1:
                number = dice.choice((0, 1, 1 << 31, 1 << 62, (1 << 64) - 1))
                content[place : place + 8] = struct.pack("<Q", number)
            case 2:
                number = dice.choice((0, 1, 8, 9, 12, 1 << 31, (1 << 32) - 1))
                content[place : place + 4] = struct.pack("<I", number)
            case _:
                del content[place : place + dice.randrange(1, 64)]
    if dice.random() < 0.3:
        del content[dice.randrange(len(content)) :]
    return bytes(content)


def read_all(file: Path) -> str:
    """Why a file is refused; "": it was read."""
    try:
        source = source_of(file)
        source.settings()
        for entry in source.tensors().values():
            for _ in entry.parts():
                pass
        source.text(1000, 1 << 20)
    except ModelError as error:
        return str(error)
    return ""


def load(file: Path) -> str:
    """As `read_all`, with all that a worker does before it serves."""
    try:
        load_served(file, "auto", torch.device("cpu"), None, backend=NATIVE, self_check=False)
    except (ModelError, KvSizingError) as error:
        return str(error)
    return ""


def test_damaged_files_are_refused_in_a_line_or_read(good: bytes, tmp_path: Path) -> None:
    """Nothing else comes of them: no other exception, and no memory beyond a small multiple of the file."""
    file = tmp_path / "model.gguf"
    before, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for seed in range(FUZZED):
        file.write_bytes(damaged(good, seed))
        said = read_all(file)
        refused += bool(said)
        assert not said or (said.startswith(f"{file}: ") and said.isprintable()), said
    assert FUZZED // 3 < refused < FUZZED
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 100 << 10


def test_damaged_models_are_refused_in_a_line_or_load(good: bytes, tmp_path: Path) -> None:
    file, said = tmp_path / "model.gguf", []
    for seed in range(FUZZED, FUZZED + FUZZED // 20):
        file.write_bytes(damaged(good, seed))
        said.append(load(file))
    assert all(not each or (str(file) in each and "\n" not in each) for each in said)
    assert any(said) and not all(said)


@pytest.mark.parametrize("name", ["a{}{}", "a{}{x}", "a{}{", "{:>1000000000}{}"])
def test_a_name_is_no_pattern(name: str) -> None:
    """A tensor that is not known has the name that the file gives it."""
    content = read(file_of([], [tensor(name, (2, 2, 2), 0, 0)], data=32))
    header = FileHeader(Path("model.gguf"), (), content)
    settings = {"model_type": "llama", "num_hidden_layers": 1, "head_dim": 2}
    assert [*stored_tensors([header], ARCHITECTURES["llama"], settings)] == [name]


def test_a_file_that_changes_is_noticed(good: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(good)
    entries = source_of(file).tensors()
    with file.open("r+b") as opened:
        opened.truncate(len(good) // 2)
    parts = (part for entry in entries.values() for part in entry.parts())
    with pytest.raises(ModelError, match="has changed while the model was loaded"):
        deque(parts, maxlen=0)


def test_a_fifo_does_not_stop_a_worker(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="is not a regular file"):
        source_of(tmp_path / "model.gguf").settings()
