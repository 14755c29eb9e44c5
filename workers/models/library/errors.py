"""Exceptions of the transformers library as ModelErrors; and the library made to keep silent."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers

from workers.models.errors import ModelError

_MOST_SHOWN = 300


@contextmanager
def library_errors(doing: str) -> Iterator[None]:
    """Turn what the library raises into one line, and keep its warnings and progress bars from our log.

    Args:
        doing: What is tried, for the message: "build the model".

    Raises:
        ModelError: For any exception but our own, and those of memory, of depth and of a lost device.
    """
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ModelError, MemoryError, RecursionError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        said = _one_line(str(error))
        raise ModelError(
            f"the transformers library cannot {doing}: {type(error).__name__}: {said}"
        ) from error


def _one_line(text: str) -> str:
    """The beginning of a text, whose first line often names a setting only, and a later one what is wrong."""
    joined = " ".join(text.split())
    shown = joined if len(joined) <= _MOST_SHOWN else f"{joined[:_MOST_SHOWN]}..."
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in shown)
