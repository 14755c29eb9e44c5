"""What a worker holds when another gateway comes, and what of it stays: that gateway knows its tokens.

It runs on the thread of the step loop, before the new gateway is served.
"""

from __future__ import annotations

from hashlib import blake2b

from workers.executors.engine import Engine
from workers.kv.shared_list import TokenList
from workers.operations import Adopt, Adopted, Holdings

# More would make messages of tens of megabytes. What is beyond is computed again when it is needed.
MAX_HOLDINGS = 65_536
DIGEST_BYTES = 16


def take_stock(engine: Engine, stream: int) -> Holdings:
    """What is held, for a stream that begins. Releases sequences beyond MAX_HOLDINGS."""
    held = [(sequence.key, len(sequence)) for sequence in engine.sequences]
    for number, _ in held[MAX_HOLDINGS:]:
        engine.release(number)
    return Holdings(stream, held[:MAX_HOLDINGS])


def keep_claimed(engine: Engine, command: Adopt) -> Adopted:
    """Cuts sequences to what is claimed of them, and releases all others."""
    claims = {claim.sequence: claim for claim in command.claims}
    kept = []
    for sequence in list(engine.sequences):
        claim = claims.get(sequence.key)
        if claim is not None and len(sequence) >= claim.length:
            engine.truncate(sequence.key, claim.length)
            if token_digest(sequence.token_ids) == claim.digest:
                kept.append(sequence.key)
                continue
        engine.release(sequence.key)
    return Adopted(command.op_id, kept)


def token_digest(token_ids: TokenList) -> bytes:
    """The digest of tokens as little-endian uint32, by which gateway and worker compare them."""
    return blake2b(
        token_ids.as_array().astype("<u4", copy=False).tobytes(), digest_size=DIGEST_BYTES
    ).digest()
