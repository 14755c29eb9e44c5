"""Notices a model that workers would refuse, before a server starts for it.

They notice it too, but only once the port listens and torch is loaded. What is unclear is left to them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from service.config import UNQUANTISED, Config
from service.model_names import other_format
from workers.common.gguf import GgufError
from workers.common.gguf.files import model_files
from workers.common.gguf.header import Header, read_header
from workers.common.gguf.settings import DENSE, TOKEN_ARRAYS, read_settings, served_types
from workers.common.gguf.splits import split_of
from workers.common.quantised.methods import is_quantised, read_quantisation, with_file_of_tool
from workers.common.quantised.scheme import NotUnderstood

_MAX_CONFIG_BYTES = 1 << 20
# A header of safetensors begins with its size. One that is larger is looked at in part.
_SIZE_BYTES, _MAX_HEADER_BYTES = 8, 1 << 20
# What only tensors say: GPTQ and AWQ; compressed-tensors; bitsandbytes; and 8-bit floats.
_IN_HEADERS = (
    *(b'.qweight"', b'.qzeros"', b'.weight_packed"', b'.weight_scale_inv"'),
    *(b'.weight.absmax"', b'.SCB"', b'"F8_E4M3"', b'"F8_E5M2"'),
)
_ADVICE = "use the original model, or one in a format of docs/models.md"


def refusal(config: Config) -> str:
    """Why a model cannot be served; "": nothing was found here."""
    if config.has_remote_workers:
        return ""
    return _gguf_files_problem(config) or quantised_problem(config)


# Directories with quantised weights.


def quantised_problem(config: Config) -> str:
    """Why the quantised weights of a directory cannot be served as requested; "": they can."""
    directory = Path(config.model)
    if problem := quantised(directory):
        return problem
    settings = _settings(directory)
    if not is_quantised(settings):
        return ""
    return _unless_again(config, "its weights are quantised")


def _unless_again(config: Config, quantised: str) -> str:
    """`quantised` and what to do, if weights are to be quantised again; "": they are not."""
    return "" if config.quantization == UNQUANTISED else f"{quantised} already: leave out quantization"


def quantised(directory: Path) -> str:
    """How weights are quantised that cannot be served, and what to use instead; "": that is not so."""
    try:
        names = [file.name for file in directory.iterdir()]
    except OSError:
        return ""
    settings = _settings(directory)
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if not weights and (problem := other_format(names)):
        return problem
    try:
        said = read_quantisation(settings)
    except NotUnderstood as error:
        return f"its weights are quantised, and config.json says {error}: {_ADVICE}"
    if said is None and weights and any(mark in _header(directory / weights[0]) for mark in _IN_HEADERS):
        marked = f"by the tensors of {weights[0]}, and config.json does not say how"
        return f"its weights are quantised, {marked}: {_ADVICE}"
    return ""


def _settings(directory: Path) -> Mapping[str, object]:
    """The config of a model; empty if it cannot be read."""
    return with_file_of_tool(_content(directory / "config.json"), lambda name: _content(directory / name))


def _content(file: Path) -> Mapping[str, object]:
    """The content of a JSON file; empty if it cannot be read."""
    try:
        if not file.is_file():
            return {}
        with file.open("rb") as opened:
            content = json.loads(opened.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _header(file: Path) -> bytes:
    try:
        if not file.is_file():
            return b""
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(_SIZE_BYTES), "little")
            return opened.read(min(size, _MAX_HEADER_BYTES))
    except OSError:
        return b""


# GGUF files.


def _gguf_files_problem(config: Config) -> str:
    """Why a GGUF file cannot be served; "": it can, or it is none."""
    try:
        files = model_files(Path(config.model))
        if files is None:
            return ""
        headers = [_gguf_header(file, TOKEN_ARRAYS if file == files[0] else ()) for file in files]
    except GgufError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or config.model} cannot be read: {error.strerror}"
    try:
        return _gguf_problem(config, headers)
    except GgufError as error:
        return f"{files[0].name}: {error}"


def _gguf_problem(config: Config, headers: list[Header]) -> str:
    """Raises GgufError too."""
    tensors = {name: info for header in headers for name, info in header.tensors.items()}
    metadata = headers[0].metadata
    # Workers read the factors.
    read_settings(metadata, tensors, lambda _: [])
    if TOKEN_ARRAYS[0] in metadata:
        # Without a tokenizer only tokens are served.
        split_of(metadata)
    types = served_types(tensors) - DENSE
    return _unless_again(config, f"it is quantised ({', '.join(sorted(types))})") if types else ""


def _gguf_header(file: Path, arrays: Collection[str]) -> Header:
    """Raises GgufError, with the name of the file, and OSError."""
    try:
        if not file.is_file():
            raise GgufError("is not there")
        with file.open("rb") as opened:
            return read_header(opened, arrays)
    except GgufError as error:
        raise GgufError(f"{file.name}: {error}") from None
