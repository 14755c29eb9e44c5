"""How settings and calls name a model: one that is shipped, a directory, or an id on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from workers.common.gguf import GgufError
from workers.common.gguf.files import model_files

# The first one is served by default.
SHIPPED_MODELS = ("adder", "storyteller")
SHIPPED_MODEL = SHIPPED_MODELS[0]
_SHIPPED = Path(__file__).resolve().parents[1] / "workers" / "models"
WEIGHTLESS_MODEL = "paged-attention"
# The ids that the hub allows. None of them leads elsewhere when used in a path.
_HUB_ID = re.compile(r"(?!.*(?:--|\.\.|\.git$))[A-Za-z0-9][\w.-]*/[A-Za-z0-9](?:[\w.-]*\w)?", re.ASCII)
MAX_HUB_ID = 96
# What names one of the GGUF files of a repository, after a colon.
_FORMAT = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
MODELS = (
    f"{', '.join(SHIPPED_MODELS)}, {WEIGHTLESS_MODEL}, a directory with config.json or one GGUF model, a GGUF"
    " file, or ORG/NAME on the Hugging Face hub (GGUF: ORG/NAME:Q4_K_M)"
)


def shipped_model_dir(model: str = SHIPPED_MODEL) -> Path:
    """The directory of a model that is shipped."""
    return _SHIPPED / model


def is_hub_id(model: str) -> bool:
    """Whether it names a model on the Hugging Face hub, not a local directory."""
    return len(model) <= MAX_HUB_ID and bool(_HUB_ID.fullmatch(model)) and not _may_exist(model)


def is_hub_model(model: str) -> bool:
    """Whether it names a model on the hub as `is_hub_id` says, or with a colon one of its GGUF files."""
    hub_id, has_format, name = model.partition(":")
    if has_format and (not _FORMAT.fullmatch(name) or _may_exist(model)):
        return False
    return is_hub_id(hub_id)


def is_directory_or_file(value: str) -> bool:
    """Whether it is the path of a model on this machine, in a format that is known."""
    try:
        files = model_files(Path(value))
    except (GgufError, ValueError):
        return False
    # Path.is_file raises if a directory of the path cannot be read.
    return os.path.isfile(files[0] if files else f"{value}/config.json")  # noqa: PTH113


def local_path(model: str) -> Path:
    """The path of a model, without links but a file's own: its name says what it is."""
    path = shipped_model_dir(model) if model in SHIPPED_MODELS else Path(model)
    return path.resolve() if path.is_dir() else path.parent.resolve() / path.name


def is_local_model(value: str) -> bool:
    """Whether it names a model that is on this machine."""
    return value in (*SHIPPED_MODELS, WEIGHTLESS_MODEL) or is_directory_or_file(value)


def is_model(value: str) -> bool:
    """Whether a model can be served by this name from this machine."""
    return is_local_model(value) or is_hub_model(value)


def model_problem(value: str) -> str:
    """Why `is_model` is False, and what a model can be."""
    problem = "it does not exist"
    try:
        if _may_exist(value):
            path = Path(value)
            names = [file.name for file in path.iterdir()] if path.is_dir() else [value]
            files = model_files(path)
            what = "it has no config.json" if files is None else f"{files[0].name} is no regular file"
            problem = other_format(names) or what
    except GgufError as error:
        problem = f"it {error}"
    except OSError as error:
        problem = f"it cannot be read ({error.strerror})"
    return f"{problem}; must be {MODELS}"


def other_format(names: Collection[str]) -> str:
    """Names the format of model files that cannot be served, and what to use instead; "" if it is unknown."""
    if "adapter_config.json" in names:
        return "it is a LoRA adapter (PEFT): serve its base model, and load it with `quire adapters load`"
    return ""


def _may_exist(path: str) -> bool:
    """Whether the path exists. True if that cannot be determined."""
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True
    return True
