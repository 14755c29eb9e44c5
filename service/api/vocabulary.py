"""Token ids that a request names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from service.errors import InvalidArgument

if TYPE_CHECKING:
    from service.api.validation import RequestLimits


def check_vocabulary(token_ids: Sequence[int], limits: RequestLimits, field: str) -> None:
    """All tokens are in the vocabulary; there is at least one."""
    if max(token_ids) >= limits.vocab_size:
        index = next(i for i, token in enumerate(token_ids) if token >= limits.vocab_size)
        raise InvalidArgument(
            "TOKEN_OUT_OF_VOCAB",
            f"{field}[{index}]",
            f"token {token_ids[index]} is not below the vocabulary size {limits.vocab_size}",
        )
