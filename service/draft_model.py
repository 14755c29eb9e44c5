"""Notices a draft model with other tokens than the model's, before a server starts for it.

Workers compare all of both tokenizers, but only once the port listens. What is unclear is left to them.
"""

from __future__ import annotations

from pathlib import Path

from service.config import Config
from service.model_names import SHIPPED_MODELS, shipped_model_dir
from workers.common.tokenizer_ids import difference

# As workers read.
_MAX_TOKENIZER_BYTES = 64 << 20


def draft_problem(config: Config) -> str:
    """What keeps a model from being served with its draft model; "": nothing, or there is none."""
    if not config.draft_model:
        return ""
    model = shipped_model_dir(config.model) if config.model in SHIPPED_MODELS else Path(config.model)
    own, its = _tokenizer(model), _tokenizer(Path(config.draft_model))
    try:
        # Other files may add tokens, which only workers read.
        why = difference(own, its, with_added=False) if own and its else ""
    except (ValueError, RecursionError):
        return ""
    return f"draft_model = {config.draft_model} needs its tokenizer, and {why}" if why else ""


def _tokenizer(model: Path) -> bytes:
    """The file of a directory; empty if there is none that can be read."""
    try:
        file = model / "tokenizer.json"
        return file.read_bytes() if file.is_file() and file.stat().st_size <= _MAX_TOKENIZER_BYTES else b""
    except OSError:
        return b""
