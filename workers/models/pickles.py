"""Refuses directories whose weights are pickles only. A pickle is a program, which runs when it is loaded."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path

from workers.models.errors import ModelError

_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_SAFE = "*.safetensors*"  # weights, or the index of some


def check_not_pickled(directory: Path) -> None:
    """Raises ModelError for a directory that has weights as pickles and none as safetensors."""
    try:
        names = sorted(os.listdir(directory))  # noqa: PTH208 - names are all that is wanted
    except OSError as error:
        raise ModelError(f"{directory}: cannot be read: {error.strerror}") from error
    pickles = [name for name in names if any(fnmatch.fnmatchcase(name, kind) for kind in _PICKLES)]
    if pickles and not fnmatch.filter(names, _SAFE):
        raise ModelError(
            f"{directory}: has its weights as pickles only ({pickles[0]}), which run code when they are"
            " loaded: take a revision of the model with safetensors, or, if you trust it, load it with"
            " transformers and write it anew with save_pretrained"
        )
