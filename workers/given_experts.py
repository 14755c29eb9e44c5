"""Experts that tokens are computed with, whatever the router says: the replay of a routing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

from numpy.typing import NDArray

# Up to so many experts of a layer, the id of one takes one byte, else two.
ONE_BYTE_EXPERTS = 256

_PREFIX: Final = b"experts "
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class GivenExperts:
    """The experts that some tokens of a forward are computed with.

    Attributes:
        start: The index of the first of these tokens.
        ids: [tokens, layers with experts, experts of a token], of any integer type.
    """

    start: int
    ids: NDArray[Any]

    def salted(self, salt: bytes) -> bytes:
        """The salt of sequences with exactly these. The gateway's own salts begin with other characters."""
        key = self.start.to_bytes(4)
        digest = hashlib.blake2b(self.ids.tobytes(), digest_size=_DIGEST_BYTES, key=key).digest()
        return _PREFIX + digest + salt


def given_salt(salt: bytes) -> bytes:
    """The salt that the gateway gave, of one that may be the result of `GivenExperts.salted`."""
    return salt[len(_PREFIX) + _DIGEST_BYTES :] if salt.startswith(_PREFIX) else salt
