"""Reads how a model's hidden states become an embedding, from the files of the sentence-transformers library.

`modules.json` lists the steps for a text: the model, a pooling, and perhaps more.
https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from workers.models.errors import ModelError
from workers.models.files import MAX_SETTINGS_BYTES, exists, parse_object, read_file, read_object

_log = logging.getLogger(__name__)

MODULES_FILE = "modules.json"
# In the older form, one of these is true.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
# The module of cross-encoders.
_LOGITS = "LogitScore"
_UNKNOWN = "unknown"
# Modules without an effect here: callers choose whether vectors are normalised.
_WITHOUT_EFFECT = ("Transformer", "Normalize")


def read_pooling(directory: Path) -> str:
    """The pooling that a model's files name. Further modules follow after plus signs: "mean+Dense".

    For a cross-encoder "LogitScore", and after colons its tokens for yes and for no.

    Empty: none. "unknown", with a warning in the log: the files cannot be read.
    """
    file = directory / MODULES_FILE
    if not exists(file):
        return ""
    try:
        modules = parse_object(b'{"modules":' + read_file(file, MAX_SETTINGS_BYTES) + b"}", file)["modules"]
        if not isinstance(modules, list):
            raise ModelError("is no list of modules")
        return "+".join(filter(None, (_named(directory, module) for module in modules)))
    except ModelError as error:
        _log.warning("%s: %s: the model makes no embeddings", file, error)
        return _UNKNOWN


def makes_embeddings(directory: Path) -> bool:
    """Whether the files name a pooling, so that it is an embedding model."""
    pooling = read_pooling(directory)
    return bool(pooling) and pooling != _UNKNOWN and not pooling.startswith(_LOGITS)


def _named(directory: Path, module: object) -> str:
    """The operation of a module on hidden states. Empty: none. Raises ModelError."""
    if not isinstance(module, Mapping) or not isinstance(module.get("type"), str):
        raise ModelError("a module has no type")
    kind = str(module["type"]).rpartition(".")[2]
    if kind in _WITHOUT_EFFECT:
        return ""
    if kind not in ("Pooling", _LOGITS):
        return kind
    path = module.get("path")
    if not isinstance(path, str) or Path(path).name != path:
        raise ModelError("a module has no directory below the model's")
    file = directory / path / "config.json"
    settings = read_object(file)
    if kind == _LOGITS:
        ids = [settings.get(name) for name in ("true_token_id", "false_token_id")]
        return ":".join([kind, *(str(each) for each in ids if isinstance(each, int))])
    if isinstance(settings.get("pooling_mode"), str):
        return str(settings["pooling_mode"])
    return "+".join(name for mode, name in _MODES.items() if settings.get(mode) is True)
