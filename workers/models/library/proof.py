"""The self-check of a library's model: over pages against the library's own forward of the same weights.

Twice: of a small copy in float32, which shows what is wrong at all; and of the loaded model in its dtype,
which shows what is wrong with this one, on this device.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from workers.models.library.errors import library_errors
from workers.models.library.loading import LoadedLibraryModel
from workers.models.library.over_pages import over_pages
from workers.models.library.settings import LibrarySettings
from workers.models.library.small_copy import small_copy
from workers.models.self_check import prove

_log = logging.getLogger(__name__)


def prove_copy(directory: Path, settings: LibrarySettings) -> float | None:
    """The error of a small copy of a directory's model, on the CPU in float32; its weights are not read.

    None where the copy would not be small, which is logged.

    Raises:
        ModelError: The model is not right over pages.
    """
    module = small_copy(settings)
    if module is None:
        _log.warning("even a small copy of the model is large, so the check in float32 is left out")
        return None
    with library_errors("run a small copy of the model"):
        model = over_pages(module)
        return prove(
            model,
            model.layers,
            model.plain_logits,
            what=f"{directory}: a small copy of this {settings.config.model_type} model in float32",
            vocab_size=module.config.get_text_config(decoder=True).vocab_size,
            max_seq_len=settings.max_position_embeddings,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )


def prove_loaded(directory: Path, loaded: LoadedLibraryModel) -> float:
    """The error of a loaded model in its dtype.

    Raises:
        ModelError: It is not right over pages.
    """
    with library_errors("run the model"):
        return prove(
            loaded.model,
            loaded.model.layers,
            loaded.model.plain_logits,
            what=f"{directory}: this {loaded.config.model_type} model",
            vocab_size=loaded.config.vocab_size,
            max_seq_len=loaded.config.max_position_embeddings,
            dtype=loaded.model.dtype,
            device=loaded.model.device,
        )
