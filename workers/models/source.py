"""The interface to a model on disk, independent of its format: its config, tensors and text.

A directory has these in separate files. Other formats are translated to the settings of a config.json, and to
the names of tensors in a checkpoint of the transformers library.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from workers.common.quantised import mlx
from workers.common.quantised.methods import MXFP4, read_quantisation, with_file_of_tool
from workers.common.quantised.scheme import NotUnderstood, Quantisation
from workers.models.checkpoint import StoredTensor, read_entries
from workers.models.errors import UnsupportedError
from workers.models.files import check_not_pickled, errors_naming, exists, read_object
from workers.models.generation_defaults import read_end_tokens
from workers.models.gguf.source import gguf_source
from workers.models.quantised.mlx import mlx_to_library_layout
from workers.models.quantised.reader import quantised_tensors
from workers.models.remote_code import library_settings, library_tensors
from workers.models.text import ModelText, read_text
from workers.models.text_part import WRAPPERS, without_other_parts

CONFIG_FILE = "config.json"


class ModelSource(Protocol):
    """A model on disk. Nothing is cached, so each call reads the files again.

    Attributes:
        path: The directory, or the file.
        config_file: The file with the settings, for messages.
    """

    path: Path
    config_file: Path

    @property
    def library_can_run(self) -> bool:
        """Whether the transformers library can run it too. Raises ModelError."""

    def check(self) -> None:
        """Raises ModelError if the model would be dangerous to read."""

    def settings(self) -> dict[str, object]:
        """The settings, as in a config.json. Raises ModelError."""

    def end_tokens(self, vocab_size: int) -> tuple[int, ...]:
        """The end tokens that replace those of the settings; empty if there are none. Raises ModelError."""

    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors (of a multimodal model those of the text part) by their names in a checkpoint.

        Raises ModelError.
        """

    def notes(self) -> Sequence[str]:
        """Parts of the model that have no effect here, a line for each. Raises ModelError."""

    def text(self, vocab_size: int, max_bytes: int) -> ModelText:
        """The data that clients need for texts; see `workers.models.text.read_text`. Raises ModelError."""


class DirectorySource:
    """A `ModelSource`: a directory of the Hugging Face hub, with its weights as safetensors."""

    def __init__(self, path: Path) -> None:
        self.path, self.config_file = path, path / CONFIG_FILE

    @property
    def library_can_run(self) -> bool:
        """See `ModelSource`. False with experts in MXFP4, which only native code supports."""
        said = self._quantisation()
        return said is None or said.method != MXFP4

    def check(self) -> None:
        check_not_pickled(self.path)

    def settings(self) -> dict[str, object]:
        settings = self._own_settings
        with errors_naming(self.config_file):
            return library_settings(settings)

    @functools.cached_property
    def _own_settings(self) -> Mapping[str, object]:
        """The settings as the files have them. Raises ModelError."""
        # Configs of Mamba 2 and Nemotron-H have time_step_limit: [0.0, Infinity].
        settings = read_object(self.config_file, takes_infinity=True)
        return with_file_of_tool(settings, self._content_of)

    def _content_of(self, name: str) -> dict[str, object]:
        """The content of a JSON file beside the config. Empty: there is none. Raises ModelError."""
        file = self.path / name
        return read_object(file) if exists(file) else {}

    def end_tokens(self, vocab_size: int) -> tuple[int, ...]:
        """The end tokens of generation_config.json."""
        return read_end_tokens(self.path, vocab_size)

    def tensors(self) -> dict[str, StoredTensor]:
        entries, said = read_entries(self.path), self._quantisation()
        model_type = self.settings().get("model_type")
        if model_type in WRAPPERS:
            # First, because parts that are not served may be quantised in any way.
            entries = without_other_parts(entries)
        tensors: Mapping[str, StoredTensor] = entries
        try:
            tensors = entries if said is None else quantised_tensors(entries, said)
        except NotUnderstood as error:
            raise UnsupportedError(f"{self.config_file}: the weights are quantised: {error}") from None
        if said is not None and said.method == mlx.METHOD:
            tensors = mlx_to_library_layout(tensors, model_type)
        return library_tensors(tensors, self._own_settings)

    def notes(self) -> Sequence[str]:
        said, wrapper = self._quantisation(), self.settings().get("model_type")
        quantised = () if said is None else said.notes
        notes = [f"of the quantisation, {note}" for note in quantised]
        if wrapper in WRAPPERS:
            notes.append(f"only the text part of {wrapper} is served, which reads no images or sounds")
        return notes

    def _quantisation(self) -> Quantisation | None:
        """How the weights are quantised; None: they are not. Raises UnsupportedError."""
        settings = self.settings()
        with errors_naming(self.config_file):
            try:
                return read_quantisation(settings)
            except NotUnderstood as error:
                raise UnsupportedError(f"the weights are quantised: {error}") from None

    def text(self, vocab_size: int, max_bytes: int) -> ModelText:
        return read_text(self.path, vocab_size, max_bytes)


def source_of(path: Path | str) -> ModelSource:
    """The model at a path. Raises ModelError if it is one of several there."""
    path = Path(path)
    return gguf_source(path) or DirectorySource(path)
