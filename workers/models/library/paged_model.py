"""A model of the transformers library whose keys and values lie in our pages.

The library's code runs unchanged on packed tokens, [1, T] with their positions; only attention is ours. See
`attention`.

Dimension letters: T tokens of the batch; R wanted rows; V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from workers.kv.tensors import KvTensors, LayerKv
from workers.models.errors import ModelError
from workers.models.inputs import ForwardInputs
from workers.models.library.attention import ASKING, PAGED, STEP, AskingStep, LayerCall, PagedStep, Step

# The library's plainest attention.
EAGER = "eager"


class LibraryModel:
    """What `runners.base.Model` asks for. One forward at a time."""

    def __init__(self, module: PreTrainedModel) -> None:
        """Take over a loaded model, and ask its layers what they keep, with a forward of one token.

        Raises:
            ModelError: Its attention cannot be answered from pages; the message says what is in the way.
        """
        module.train(mode=False)
        self.module = module
        configs: list[Any] = [part.config for part in module.modules() if hasattr(part, "config")]
        self._configs = {id(config): config for config in configs}
        self.dtype: torch.dtype = module.dtype
        self.device: torch.device = module.device
        parameters = inspect.signature(module.forward).parameters
        self._takes_rows = "logits_to_keep" in parameters
        if "position_ids" not in parameters:
            raise ModelError(f"{type(module).__name__} takes no positions, so its texts cannot be packed")
        self._calls = self._ask()
        self._call_attention(PAGED)

    @property
    def layers(self) -> tuple[LayerKv, ...]:
        """What each layer keeps of a token."""
        return tuple(call.kv for call in self._calls)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Positions that a token sees in each layer; None: all of them."""
        return tuple(call.sliding_window for call in self._calls)

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs, kv: KvTensors) -> torch.Tensor:
        """Run the batch through all layers.

        Mutates `kv`: writes the keys and values of the batch's tokens to their slots.

        Args:
            inputs: The batch, on the model's device.
            kv: Pages of `layers`, in the model's dtype.

        Returns:
            [R, V] the logits of `inputs.wanted_rows`: what comes between hidden rows and logits (a cap, a
            factor) differs between families and is the library's, so the two are not parted here.
        """
        step = PagedStep(inputs, kv, self._calls)
        rows = {"logits_to_keep": inputs.wanted_rows} if self._takes_rows else {}
        self._carry(step)
        logits: torch.Tensor = self.module(
            input_ids=inputs.token_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            **rows,
        ).logits[0]  # [R or T, V]
        if step.done != len(self._calls):
            raise RuntimeError(f"attention was called {step.done} times, {len(self._calls)} when asked")
        return logits if self._takes_rows else logits.index_select(0, inputs.wanted_rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `forward` gave: logits already."""
        return hidden

    @torch.inference_mode()
    def plain_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The library's own forward of one text, without pages: what `forward` is to give.

        Args:
            token_ids: [T] int64.

        Returns:
            [T, V].
        """
        with self._attention(EAGER):
            logits: torch.Tensor = self.module(input_ids=token_ids[None], use_cache=False).logits[0]
        return logits

    @contextmanager
    def _attention(self, name: str) -> Iterator[None]:
        self._call_attention(name)
        try:
            yield
        finally:
            self._call_attention(PAGED)

    def _call_attention(self, name: str) -> None:
        """Let all parts of the model call the attention of that name."""
        for config in self._configs.values():
            # The public setter asks what the model's class supports, which does not matter here.
            config._attn_implementation_internal = name  # noqa: SLF001

    def _carry(self, step: Step) -> None:
        """Let a step answer the calls of the next forward."""
        for config in self._configs.values():
            object.__setattr__(config, STEP, step)

    @torch.inference_mode()
    def _ask(self) -> tuple[LayerCall, ...]:
        """The calls of a forward of one token. Raises ModelError."""
        config = self.module.config.get_text_config(decoder=True)
        step, token = AskingStep(), torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        name = type(self.module).__name__
        with self._attention(ASKING):
            self._carry(step)
            self.module(input_ids=token, position_ids=token, use_cache=False)
        if not step.calls:
            raise ModelError(f"{name} has attention code of its own, which cannot be run over pages")
        layers = config.num_hidden_layers
        if len(step.calls) != layers:
            raise ModelError(
                f"{name} attends {len(step.calls)} times in {layers} layers: the rest is unknown"
            )
        return tuple(step.calls)


def build(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """A model of a config, which is copied: models that share one would share their attention."""
    made: PreTrainedModel = model_class._from_config(copy.deepcopy(config), dtype=dtype)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return made
