"""Which sequences a worker keeps when another gateway connects: those whose tokens that gateway confirms.

Runs on the step loop's thread, before the new gateway's first forward.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from workers.common.worker_pb2 import AdoptCommand, Adopted, WorkerEvent
from workers.executors.engine import Engine
from workers.given_experts import given_salt
from workers.operations import HeldSequences

# More would need messages of tens of megabytes. The KV of further sequences is recomputed when it is needed.
MAX_HELD_SEQUENCES = 65_536
DIGEST_BYTES = 16


def report_sequences(engine: Engine, stream: int) -> HeldSequences:
    """List the sequences for a new stream. Releases those beyond MAX_HELD_SEQUENCES."""
    held = [(sequence.key, len(sequence)) for sequence in engine.kv_table]
    for number, _ in held[MAX_HELD_SEQUENCES:]:
        engine.release(number)
    return HeldSequences(stream, held[:MAX_HELD_SEQUENCES])


def keep_confirmed(engine: Engine, op_id: int, command: AdoptCommand) -> WorkerEvent:
    """Truncate each claimed sequence to the claimed length, and release all others."""
    claims = {claim.sequence: claim for claim in command.items}
    kept = []
    for sequence in list(engine.kv_table):
        claim = claims.get(sequence.key)
        if claim is not None and len(sequence) >= claim.length:
            engine.truncate(sequence.key, claim.length)
            salt = given_salt(engine.kv_table.prefixes.salt_of(sequence))
            if token_digest(sequence.token_ids.as_array(), salt) == claim.digest:
                kept.append(sequence.key)
                continue
        engine.release(sequence.key)
    return WorkerEvent(op_id=op_id, adopted=Adopted(kept=kept))


def token_digest(token_ids: NDArray[np.uint32], salt: bytes = b"") -> bytes:
    """blake2b (16 bytes) of tokens as little-endian uint32, under a salt. As in the gateway."""
    key = blake2b(salt, digest_size=DIGEST_BYTES).digest() if salt else b""
    return blake2b(token_ids.astype("<u4", copy=False).tobytes(), digest_size=DIGEST_BYTES, key=key).digest()
