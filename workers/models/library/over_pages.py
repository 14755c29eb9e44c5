"""How a model of the transformers library runs over our pages: packed where it can be, else text by text."""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

from workers.models.errors import ModelError
from workers.models.library.errors import library_errors
from workers.models.library.gathered_model import GatheredModel
from workers.models.library.library_model import LibraryModel
from workers.models.library.packed_model import PackedModel

_log = logging.getLogger(__name__)


def over_pages(module: PreTrainedModel) -> LibraryModel:
    """A loaded model, over pages. Takes it over.

    Raises:
        ModelError: It cannot run so. The message says why not in a batch, and why not text by text.
    """
    try:
        with library_errors("run a batch of the model"):
            return PackedModel(module)
    except ModelError as error:
        why_not = str(error)
    try:
        with library_errors("run a text of the model on a cache"):
            model = GatheredModel(module)
    except ModelError as error:
        raise ModelError(f"the model cannot run over pages: {why_not}; and {error}") from None
    _log.info("each text of a step runs by itself, which is slow: %s", why_not)
    return model
