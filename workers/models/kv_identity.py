"""The identity of stored KV: a digest of everything that keys and values depend on except tokens and salt.

Two workers with the same identity compute the same bits for a page, or at least bits that either could have
computed. So each can continue with pages of the other.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch

from kernels.cpu import library
from workers.common.code import worker_code
from workers.kv.tensors import KvTensors
from workers.models.files import open_regular
from workers.models.model import ModelDescription
from workers.models.passed_checks import VARIABLES
from workers.models.source import source_of

_PART_BYTES = 1 << 20
# The fields of a description that have no influence on keys and values.
_NAMES = {"model_id", "eos_token_ids", "bos_token_id"}


def kv_identity(
    kv: KvTensors, model: ModelDescription, weights: bytes, *, batch_invariant: bool, bytes_wanted: int
) -> bytes:
    """The identity of a worker's pages.

    Args:
        kv: The pages and the recurrent states: files have the same layout as memory.
        model: The model that computes them.
        weights: The digest of its weights; see `weights_digest`.
        batch_invariant: Whether their bits depend only on the text. Otherwise they also depend on the number
            of threads.
        bytes_wanted: The length of the identity.

    Raises OSError.
    """
    described = {name: getattr(model, name) for name in model.__slots__ if name not in _NAMES}
    states = () if kv.states is None else kv.states.tensors
    layout = (
        sys.byteorder,
        str(kv.dtype),
        kv.quantised,
        kv.page_size,
        kv.layers,
        [[type(part).__name__ for part in kv.layer(index)] for index in range(kv.num_layers)],
        [(tuple(one.shape[1:]), str(one.dtype)) for one in states],
    )
    machine = (
        library.build_name(),
        sorted(library.cpu_flags()),
        0 if batch_invariant else torch.get_num_threads(),
        sorted(item for item in os.environ.items() if item[0].startswith(VARIABLES)),
    )
    parts = worker_code(), machine, layout, sorted(described.items()), weights
    return hashlib.blake2b(repr(parts).encode(), digest_size=bytes_wanted).digest()


def weights_digest(directory: Path) -> bytes:
    """A digest of all bytes of a model's weights.

    The `fingerprint` of a model is only of samples, and finetuned weights may differ elsewhere. This reads
    all files, which were just read: a few gigabytes per second.

    Raises OSError or ModelError.
    """
    files = {tensor.file for tensor in source_of(directory).tensors().values()}
    if directory.is_dir():
        files.update(directory.glob("*.safetensors"))
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0")
        digest.update(struct.pack("<Q", file.stat().st_size))
        for checksum in _checksums(file):
            digest.update(struct.pack("<I", checksum))
    return digest.digest()


def _checksums(file: Path) -> Iterable[int]:
    """The CRC-32 of each part of a file. Raises OSError or ModelError."""
    buffer = bytearray(_PART_BYTES)
    with open_regular(file) as opened:
        while count := opened.readinto(buffer):
            yield zlib.crc32(memoryview(buffer)[:count])
