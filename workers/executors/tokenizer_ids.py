"""Whether two tokenizers have the same tokens under the same ids, by their files (tokenizer.json)."""

from __future__ import annotations

import json
from typing import Any


def difference(ours: bytes, other: bytes) -> str:
    """In what another tokenizer differs; "": in no token. Empty: there is none.

    What is no tokenizer has no tokens. Raises ValueError for what is no JSON.
    """
    if bool(ours) != bool(other):
        return f"{'it' if ours else 'the model'} has no tokenizer.json"
    own, its = _ids(ours), _ids(other)
    for token, token_id in own.items():
        if its.get(token) != token_id:
            found = f"its id is {its[token]} there" if token in its else "which is not there"
            return f"that has the token {token!r} as {token_id}: {found}"
    more = next(iter(its.keys() - own.keys()), None)
    return "" if more is None else f"that does not have its token {more!r}"


def _ids(content: bytes) -> dict[str, int]:
    """The id of each token."""
    parsed: Any = json.loads(content) if content else {}
    if not isinstance(parsed, dict):
        return {}
    model, added = parsed.get("model"), parsed.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = {}
    if isinstance(vocab, dict):
        ids |= vocab
    elif isinstance(vocab, list):  # pieces with scores, in the order of their ids
        ids |= {
            str(piece[0]): index for index, piece in enumerate(vocab) if isinstance(piece, list) and piece
        }
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            ids[str(token.get("content"))] = token.get("id", -1)
    return ids
