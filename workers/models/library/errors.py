"""Turns exceptions of the transformers library into ModelErrors, and silences its logs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers

from workers.kv.sizing import KvSizingError
from workers.models.errors import ModelError

_MAX_CHARACTERS = 300
_PASSED = (
    ModelError,
    KvSizingError,
    MemoryError,
    RecursionError,
    torch.OutOfMemoryError,
    torch.AcceleratorError,
)


@contextmanager
def library_errors(doing: str) -> Iterator[None]:
    """Turn exceptions into ModelErrors of one line, and suppress the library's warnings and progress bars.

    Args:
        doing: The action, for the message: "build the model".

    Raises:
        ModelError: For any exception except ModelError, those of memory and of a device, and RecursionError,
            which pass.
    """
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except _PASSED:
        raise
    except Exception as error:
        # All lines, because often only a later one says what is wrong.
        message = " ".join(str(error).split())
        shown = message if len(message) <= _MAX_CHARACTERS else f"{message[:_MAX_CHARACTERS]}..."
        raise ModelError(
            f"the transformers library cannot {doing}: {type(error).__name__}: {shown}"
        ) from error
