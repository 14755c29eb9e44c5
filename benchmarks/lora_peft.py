"""PEFT's decode steps of a batch with several adapters, by the library's own `adapter_names` of each row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class PeftSteps:
    """A model with random bfloat16 weights, some adapters, and sequences of one length."""

    def __init__(
        self, settings: dict[str, Any], rank: int, loaded: int, batch: int, context_tokens: int
    ) -> None:
        """`settings`: of a Hugging Face config. `loaded`: how many adapters."""
        config = AutoConfig.for_model(**settings)
        base: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        # Zeros cost as much as other numbers.
        lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=_MODULES)
        self._model: Any = get_peft_model(base, lora, adapter_name="0", autocast_adapter_dtype=False)
        for number in range(1, loaded):
            self._model.add_adapter(str(number), lora)
        self._model.to(torch.bfloat16).eval()
        self._context_tokens = context_tokens
        self._next = torch.zeros(batch, 1, dtype=torch.int64)
        with torch.inference_mode(), self._model.disable_adapter():
            self._cache = DynamicCache(config=config)
            prompt = torch.zeros(batch, context_tokens, dtype=torch.int64)
            base(prompt, past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def step_ms(self, adapters: Sequence[int]) -> float:
        """The time of one step. `adapters`: of each row, -1 for none."""
        if self._cache.get_seq_length() > self._context_tokens:
            self._cache.crop(-1)
        if max(adapters) < 0:
            with self._model.disable_adapter():
                return self._timed()
        if min(adapters) == max(adapters):
            self._model.set_adapter(str(adapters[0]))
            return self._timed()
        names = ["__base__" if adapter < 0 else str(adapter) for adapter in adapters]
        return self._timed(adapter_names=names)

    def _timed(self, **options: Any) -> float:
        began_s = time.perf_counter()
        self._model(self._next, past_key_values=self._cache, use_cache=True, **options)
        return (time.perf_counter() - began_s) * 1e3
