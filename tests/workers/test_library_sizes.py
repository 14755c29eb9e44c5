"""Large numbers in a config.json: those of which nothing is built keep no model from serving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workers.models.errors import ModelError
from workers.models.library.settings import LibrarySettings, read_settings

_BASE: dict[str, Any] = {"model_type": "gpt_neox", "vocab_size": 97, "hidden_size": 64}


def _read(directory: Path, config: dict[str, Any]) -> LibrarySettings:
    (directory / "config.json").write_text(json.dumps(config))
    return read_settings(directory)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_max_length": 10**30},
        {"model_max_length": 1e30},
        {"training": {"tokens_seen": 3 * 10**12}},
        {"num_labels": 10**9},  # the library would make a table of them
    ],
)
def test_a_name_that_the_library_does_not_know_is_left_out(settings: dict[str, Any], tmp_path: Path) -> None:
    found = _read(tmp_path, _BASE | settings)
    assert found.vocab_size == 97 and len(found.config.id2label or ()) < 10
    assert found.digest != _read(tmp_path, _BASE).digest


@pytest.mark.parametrize("longest", [10 * 2**20, 100 * 2**20])
def test_long_texts_are_no_size(longest: int, tmp_path: Path) -> None:
    assert _read(tmp_path, _BASE | {"max_position_embeddings": longest}).max_position_embeddings == longest


def test_the_same_of_a_part(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 10 * 2**20, "vocab_size": 97, "model_max_length": 10**30}
    found = _read(tmp_path, {"model_type": "llama4", "text_config": text})
    assert (found.max_position_embeddings, found.vocab_size) == (10 * 2**20, 97)


@pytest.mark.parametrize(
    ("model_type", "settings", "why"),
    [
        (
            "gpt_neox",
            {"max_position_embeddings": 10**12},
            "max_position_embeddings: must be at most 134217728",
        ),
        ("gpt2", {"n_positions": 1 << 25}, "n_positions: must be at most 16777216"),
        ("mpt", {"max_seq_len": 1 << 25}, "max_seq_len: must be at most 16777216"),
        ("llama4", {"text_config": {"hidden_size": 1 << 30}}, "hidden_size: must be at most 1048576"),
        ("gemma3", {"vision_config": {"image_size": 1 << 30}}, "image_size: must be at most"),
        ("gpt_neox", {"partial": 10**400}, "partial: must be at most"),
        ("gpt_neox", {"rope_parameters": {"factor": 10**30}}, "factor: must be at most"),
    ],
)
def test_what_would_be_built_is_refused(
    model_type: str, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=why):
        _read(tmp_path, {"model_type": model_type} | settings)
