"""The self-check of a library's model: compares it over pages with the library's own forward.

It runs twice: for a scaled-down model in float32, which shows errors of any size above rounding; and for the
loaded model in its dtype and on its device.
"""

from __future__ import annotations

import logging
from pathlib import Path

from workers.models.library.errors import library_errors
from workers.models.library.library_model import LibraryModel
from workers.models.library.loading import make_library_model
from workers.models.library.scaled_down_model import scaled_down_model
from workers.models.library.settings import LibrarySettings
from workers.models.model import ModelDescription
from workers.models.self_check import check_parity

_log = logging.getLogger(__name__)


def check_scaled_down(directory: Path, settings: LibrarySettings) -> float | None:
    """The relative error of a scaled-down model, on the CPU in float32. The weights are not read.

    None, with a warning in the log, if even the scaled-down model is too large.

    Raises ModelError if the error is too large.
    """
    module = scaled_down_model(settings)
    if module is None:
        _log.warning("even the scaled-down model is too large, so the check in float32 is left out")
        return None
    with library_errors("run a scaled-down model"):
        model = make_library_model(module)
        return check_parity(
            model,
            model.plain_logits,
            what=f"{directory}: a scaled-down {settings.config.model_type} model in float32",
            vocab_size=module.config.get_text_config(decoder=True).vocab_size,
            max_seq_len=settings.max_position_embeddings,
        )


def check_loaded(directory: Path, model: LibraryModel, description: ModelDescription) -> float:
    """The relative error of a loaded model in its dtype. Raises ModelError if the error is too large."""
    with library_errors("run the model"):
        return check_parity(
            model,
            model.plain_logits,
            what=f"{directory}: this {description.architecture} model",
            vocab_size=description.vocab_size,
            max_seq_len=description.max_seq_len,
            rounds_rows=bool(description.quantization) and description.rounds_rows,
        )
