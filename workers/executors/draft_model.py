"""Loads the model that drafts for another one. Both have to have the same tokens under the same ids."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from workers.executors.loading import AUTO, choose_backend, load_served
from workers.models.errors import ModelError
from workers.models.model import Model, ModelDescription
from workers.models.source import source_of
from workers.models.text import ModelText
from workers.models.tokenizer import MAX_BYTES


def load_draft_model(
    directory: Path | None, text: ModelText, dtype: str, device: torch.device, *, self_check: bool
) -> tuple[Model, ModelDescription] | None:
    """Load a draft model, with its weights as they are in its files.

    Args:
        directory: Where it is; or a file. None: there is none.
        text: Of the model for which it drafts.
        dtype: As for that model: see `LlmExecutor.load`.
        device: That model's.
        self_check: See `LlmExecutor.load`.

    Raises:
        ModelError: It cannot be served, or has other tokens.
        KvSizingError: Memory is too small.
    """
    if directory is None:
        return None
    source = source_of(directory)
    source.check()
    choice = choose_backend(directory, AUTO, on_cuda=device.type == "cuda")
    own = source.text(choice.vocab_size, MAX_BYTES)
    if why := difference(text.tokenizer_json, own.tokenizer_json):
        raise ModelError(f"draft_model = {directory}: it needs the tokenizer of the model, and {why}")
    model, description = load_served(
        directory, dtype, device, None, backend=choice.backend, reason=choice.reason, self_check=self_check
    )
    if model.state_shapes:
        # Its state would have to be computed again after most rejections.
        raise ModelError(f"draft_model = {directory}: a model with recurrent layers cannot draft")
    return model, replace(description, model_id=directory.name)


def difference(ours: bytes, other: bytes) -> str:
    """In what another tokenizer.json has other ids for tokens; "": in nothing. Empty content: there is none.

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
