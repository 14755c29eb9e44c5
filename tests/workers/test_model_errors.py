"""What clients see of the message of a ModelError: no path, and no text of an exception."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.models.errors import ModelError, for_clients, without_path

DIRECTORY = Path("/srv/models/mine")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            f"{DIRECTORY}/config.json: head_dim: must be even, got 33",
            "config.json: head_dim: must be even, got 33",
        ),
        (f"{DIRECTORY}: tensor lm_head.weight is missing", "tensor lm_head.weight is missing"),
        (f"the weights of {DIRECTORY} need 12 MiB", "the weights of the directory need 12 MiB"),
        ("vocab_size differs", "vocab_size differs"),
        (
            f"{DIRECTORY}: the transformers library cannot build the model: KeyError; and native code: y: z",
            "the transformers library cannot build the model; and native code: y: z",
        ),
        (
            f"{DIRECTORY}: the transformers library cannot load the weights: OSError: [Errno 2] '/a/b'",
            "the transformers library cannot load the weights",
        ),
        (
            "GPU kernels are stored in /root/.triton/cache, which fails",
            "GPU kernels are stored in a file, which fails",
        ),
        ("a dtype of bfloat16/float32 is fine", "a dtype of bfloat16/float32 is fine"),
    ],
)
def test_what_is_shown(message: str, shown: str) -> None:
    assert for_clients(message, DIRECTORY) == shown


def test_a_path_with_escaped_characters_is_left_out_too() -> None:
    directory = Path("/srv/\x1bmine")
    message = str(ModelError(f"{directory}/config.json: is not valid JSON"))
    assert without_path(message, directory) == "config.json: is not valid JSON"
