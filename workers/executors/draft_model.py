"""Loads the model that drafts for another one. Both have to have the same tokens under the same ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from workers.executors.loading import AUTO, choose_backend, load_served
from workers.executors.tokenizer_ids import difference
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
