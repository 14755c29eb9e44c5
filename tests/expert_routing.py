"""The experts that the transformers library routes tokens to, and what it computes with given ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tests.model_factory import hf_model


def routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


@contextlib.contextmanager
def hooked(model: torch.nn.Module, hook: Any) -> Iterator[None]:
    """`hook(layer, output)` may replace the output of each router: logits, weights and experts."""
    handles = [
        router.register_forward_hook(lambda _module, _inputs, output, layer=layer: hook(layer, output))
        for layer, router in enumerate(routers(model))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def router_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """[tokens, layers, experts], of the library."""
    found: list[torch.Tensor] = []
    with hooked(model, lambda _layer, output: found.append(output[0])), torch.inference_mode():
        model(torch.tensor([tokens]), use_cache=False)
    return torch.stack(found, 1)


def library_experts(directory: Path, tokens: list[int]) -> NDArray[np.int64]:
    """[tokens, layers, experts of a token], the one with the highest weight first.

    Asserts that no other computation in float32 chooses others. Its logits differ from exact ones by about
    as much as the library's do, but for another draw of the rounding errors, and the margin that counts is a
    difference of two: a factor of 3, see `float32_losses`, and of 2.
    """
    model: Any = hf_model(directory)
    model.set_experts_implementation("eager")  # others have no float64
    logits = router_logits(model, tokens)
    try:
        exact = router_logits(model.double(), tokens)
    finally:
        model.float()
    errors = (logits - exact).abs().amax((0, 2))  # [layers]
    chosen = model.config.num_experts_per_tok
    ranked, ids = exact.sort(descending=True)
    gaps = ranked[..., :chosen] - ranked[..., 1 : chosen + 1]
    assert (gaps.amin(-1) > 6 * errors).all(), "two experts are all but equal: take another text"
    return ids[..., :chosen].numpy()


def given_logprobs(directory: Path, tokens: list[int], given: NDArray[Any]) -> torch.Tensor:
    """[tokens, vocabulary], of the library with other experts: each row's are those of `given`."""
    model = hf_model(directory)
    # Mixtral has no such setting.
    normalized = getattr(model.config, "norm_topk_prob", True)

    def replace(layer: int, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        ids = torch.from_numpy(given[:, layer].astype(np.int64))
        weights = functional.softmax(output[0], dim=-1, dtype=torch.float32).gather(1, ids)
        if normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return output[0], weights, ids

    with hooked(model, replace), torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.log_softmax(-1)
