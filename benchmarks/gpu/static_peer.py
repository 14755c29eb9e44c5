"""transformers on a GPU: decode with a static cache, in a graph that is captured here, or eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache

from benchmarks.peers.base import SETTLING_STEPS, Sample, timed_steps
from benchmarks.shapes import SHAPES

# Warm-up steps. Graph capture needs more than one.
_WARM_UPS = 3
_STEPS = 15
_MAX_TURNS = 12


class StaticPeer:
    """A model with random weights. Positions continue over turns, up to the cache's end."""

    def __init__(self, shape_name: str, way: str, context_tokens: int, device: torch.device) -> None:
        """`way`: graph or eager."""
        self._way, self._context_tokens, self._device = way, context_tokens, device
        self._steps: dict[int, Callable[[], None]] = {}
        config = Qwen3Config(**SHAPES[shape_name].hf_config())
        config._attn_implementation = "sdpa"  # noqa: SLF001 - what from_pretrained sets for its argument
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
        try:
            with device:
                self._model: Any = Qwen3ForCausalLM(config).eval()  # type: ignore[no-untyped-call]
        finally:
            torch.set_default_dtype(before)

    @torch.inference_mode()
    def decode(self, batch: int) -> Sample:
        """Decode with the host in the loop: the caller receives every token."""
        if batch not in self._steps:
            self._steps[batch] = self._make_step(batch)
        return Sample(timed_steps(self._steps[batch], _STEPS), batch)

    def _make_step(self, batch: int) -> Callable[[], None]:
        length = self._context_tokens + _MAX_TURNS * (SETTLING_STEPS + _STEPS) + 2 * _WARM_UPS
        cache = StaticCache(config=self._model.config, max_cache_len=length)
        prompt = torch.randint(
            self._model.config.vocab_size, (batch, self._context_tokens), device=self._device
        )
        forward = self._model.forward
        fed = _next_tokens(forward, prompt, cache)  # [B, 1], in one place for good

        def once() -> None:
            fed.copy_(_next_tokens(forward, fed, cache))

        if self._way == "graph":
            once = _captured(once, self._device)
        for _ in range(_WARM_UPS):
            once()

        def step() -> None:
            once()
            fed.tolist()

        return step


def _next_tokens(forward: Any, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
    result = forward(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    chosen: torch.Tensor = result.logits[:, -1:].argmax(-1)
    return chosen


def _captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The launches of a call as a CUDA graph, or the call itself without a GPU."""
    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], None] = graph.replay
    return replay
