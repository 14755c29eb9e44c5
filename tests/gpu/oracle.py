"""transformers on the device of the test, as the oracle for small random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM


class Oracle:
    """A model directory in transformers, with eager attention, in evaluation mode."""

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._device = device
        model: Any = Qwen3ForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
        self._model = model.to(device)

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Of every position, [len(tokens), vocab_size] float32 on the CPU, computed without a cache."""
        result = self._model(torch.tensor([tokens], device=self._device), use_cache=False)
        logits: torch.Tensor = result.logits[0]
        return logits.float().cpu()

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """The next `count` most likely tokens."""
        text = list(tokens)
        for _ in range(count):
            text.append(int(self.logits(text)[-1].argmax()))
        return text[len(tokens) :]
