"""How settings and calls name a model: one that is shipped, a directory, or an id on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

# The first one is served by default.
SHIPPED_MODELS = ("adder", "storyteller")
SHIPPED_MODEL = SHIPPED_MODELS[0]
_SHIPPED = Path(__file__).parents[1] / "workers" / "models"
WEIGHTLESS_MODEL = "paged-attention"
# The ids that the hub allows. None of them leads elsewhere when used in a path.
_HUB_ID = re.compile(r"(?!.*(?:--|\.\.|\.git$))[A-Za-z0-9][\w.-]*/[A-Za-z0-9](?:[\w.-]*\w)?", re.ASCII)
MAX_HUB_ID = 96
MODELS = (
    f"{', '.join(SHIPPED_MODELS)}, {WEIGHTLESS_MODEL}, a directory that holds config.json,"
    " or ORG/NAME on the Hugging Face hub"
)


def shipped_model_dir(model: str = SHIPPED_MODEL) -> Path:
    """The directory of a model that is shipped."""
    return _SHIPPED / model


def is_hub_id(model: str) -> bool:
    """Whether it names a model on the Hugging Face hub, not a local directory."""
    return len(model) <= MAX_HUB_ID and bool(_HUB_ID.fullmatch(model)) and not _may_exist(model)


def is_model(value: str) -> bool:
    """Whether a model can be served by this name from this machine."""
    shipped = value in (*SHIPPED_MODELS, WEIGHTLESS_MODEL)
    # Path.is_file raises if a directory of the path cannot be read.
    return shipped or os.path.isfile(f"{value}/config.json") or is_hub_id(value)  # noqa: PTH113


def model_problem(value: str) -> str:
    """Why `is_model` is False, and what a model can be."""
    problem = "it does not exist"
    try:
        if _may_exist(value):
            path = Path(value)
            names = [file.name for file in path.iterdir()] if path.is_dir() else [value]
            problem = other_format(names) or "it has no config.json"
    except OSError as error:
        problem = f"it cannot be read ({error.strerror})"
    return f"{problem}; must be {MODELS}"


def other_format(names: Collection[str]) -> str:
    """Names the format of model files that cannot be served, and what to use instead; "" if it is unknown."""
    if "adapter_config.json" in names:
        return "it is a LoRA adapter (PEFT): serve its base model, and load it with `quire adapters load`"
    if any(name.lower().endswith(".gguf") for name in names):
        return "it is in GGUF format, for llama.cpp: use the original model in safetensors format"
    return ""


def has_other_format(model: str) -> bool:
    """Whether it names a file or directory of a known format that cannot be served."""
    try:
        path = Path(model)
        return bool(other_format([one.name for one in path.iterdir()] if path.is_dir() else [model]))
    except (OSError, ValueError):
        return False


def _may_exist(path: str) -> bool:
    """Whether the path exists. True if that cannot be determined."""
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True
    return True
