"""transformers on the device of the test, as the oracle for small random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Oracle:
    """A model directory in transformers, with eager attention, in evaluation mode."""

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._device = device
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
        self._model = model.to(device)

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Of every position, [len(tokens), vocab_size] float32 on the CPU, computed without a cache."""
        result = self._model(torch.tensor([tokens], device=self._device), use_cache=False)
        logits: torch.Tensor = result.logits[0]
        return logits.float().cpu()

    @torch.inference_mode()
    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """The next `count` most likely tokens."""
        cache, fed, chosen = None, tokens, []
        for _ in range(count):
            result = self._model(
                torch.tensor([fed], device=self._device), past_key_values=cache, use_cache=True
            )
            cache, fed = result.past_key_values, [int(result.logits[0, -1].argmax())]
            chosen += fed
        return chosen
