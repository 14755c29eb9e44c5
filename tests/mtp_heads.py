"""Tiny models with a head for multi-token prediction, and the head in plain torch as an oracle."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import PreTrainedModel

from tests.families import settings_of
from tests.model_factory import WEIGHT_SCALE, hf_model, hf_states, make_family_model

_FILE = "model-mtp.safetensors"
# By the name of a model in `tests.families`: which of the library's layers is as the head's one.
LAYERS = {
    "qwen3_5": 1,
    "qwen3_5 with experts": 1,
    "qwen3_next": 1,
    "deepseek_v3": 3,
    "glm4_moe_lite": 3,
}


class _Names:
    """The names of the tensors in a checkpoint."""

    def __init__(self, name: str, layers: int) -> None:
        self.is_deepseek = not name.startswith("qwen")
        self.layer = f"model.layers.{layers}." if self.is_deepseek else "mtp.layers.0."
        prefix = self.layer if self.is_deepseek else "mtp."
        self.projection, self.of_embedding, self.of_hidden, self.norm = (
            f"{prefix}{part}.weight"
            for part in (
                ("eh_proj", "enorm", "hnorm", "shared_head.norm")
                if self.is_deepseek
                else ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
            )
        )


def make_mtp_model(directory: Path, name: str, *, seed: int = 7) -> Path:
    """A model of `tests.families` with a head, all with random weights."""
    make_family_model(directory, *settings_of(name), seed=seed)
    model, generator = hf_model(directory), torch.Generator().manual_seed(seed)
    names, width = _Names(name, len(model.model.layers)), model.config.hidden_size

    def drawn(*shape: int) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        return 1 + 0.3 * noise if len(shape) == 1 else WEIGHT_SCALE * noise

    tensors = {
        names.layer + part: drawn(*tensor.shape)
        for part, tensor in model.model.layers[LAYERS[name]].state_dict().items()
    }
    tensors |= {one: drawn(width) for one in (names.of_embedding, names.of_hidden, names.norm)}
    tensors[names.projection] = drawn(width, 2 * width)
    if names.is_deepseek:  # these checkpoints have what is shared twice
        tensors[f"{names.layer}embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
        tensors[f"{names.layer}shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    index = directory / "model.safetensors.index.json"
    assert index.exists(), "the shards are listed"
    _add(index, tensors)
    return directory


def _add(index: Path, tensors: dict[str, torch.Tensor]) -> None:
    listed = json.loads(index.read_text())
    listed["weight_map"] |= dict.fromkeys(tensors, _FILE)
    index.write_text(json.dumps(listed))
    save_file(tensors, index.parent / _FILE, metadata={"format": "pt"})


class MtpOracle:
    """What the head of a directory drafts, computed anew for each text, without a cache."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._model: PreTrainedModel = hf_model(directory)
        self._tensors = load_file(directory / _FILE)
        self._names = _Names(name, len(self._model.model.layers))
        self._layer = _layer(directory, name)
        self._offset = 0.0 if self._names.is_deepseek else 1.0

    @torch.inference_mode()
    def logits(self, text: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
        """[len(drafted) + 1, V]: of the token behind `text`, and of that behind each draft."""
        hidden = self._after_norm(text[:-1])
        rows = [hidden[i] for i in range(len(text) - 1)]
        found = []
        for token in [None, *drafted]:
            tokens = [*text[1:], *drafted][: len(rows)]
            assert token is None or tokens[-1] == token
            before, after = self._run(tokens, torch.stack(rows))
            found.append(self._model.lm_head(after[-1]))
            rows.append(before[-1] if self._names.is_deepseek else after[-1])
        return torch.stack(found)

    def _after_norm(self, text: Sequence[int]) -> torch.Tensor:
        return hf_states(self._directory, list(text))[-2]

    def _run(self, tokens: Sequence[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer returns for these tokens behind these rows, and the same after the norm."""
        model = self._model.model
        embedded = model.embed_tokens(torch.tensor(tokens))
        names = self._names
        both = [self._normed(embedded, names.of_embedding), self._normed(hidden, names.of_hidden)]
        x = (torch.cat(both, dim=1) @ self._tensors[names.projection].T)[None]
        count = len(tokens)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        rotations = model.rotary_emb(x, torch.arange(count)[None])
        out = self._layer(x, attention_mask=mask, position_embeddings=rotations)
        out = out[0] if isinstance(out, tuple) else out
        rows = out.reshape(count, -1)
        return rows, self._normed(rows, names.norm)

    def _normed(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._tensors[name] + self._offset
        return functional.rms_norm(rows, rows.shape[-1:], weight, self._model.config.rms_norm_eps)


@functools.lru_cache(maxsize=4)
def _layer(directory: Path, name: str) -> torch.nn.Module:
    model = hf_model(directory)
    names = _Names(name, len(model.model.layers))
    like = model.model.layers[LAYERS[name]]
    layer: torch.nn.Module = type(like)(model.config, LAYERS[name]).eval()
    tensors = load_file(directory / _FILE)
    own = {part: tensors[names.layer + part] for part in like.state_dict()}
    layer.load_state_dict(own)
    return layer
