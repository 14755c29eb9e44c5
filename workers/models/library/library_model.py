"""What models of the transformers library have in common here, however their attention comes to our pages.

Dimension letters: T tokens; R wanted rows; V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from workers.kv.tensors import KvTensors, LayerKv
from workers.models.inputs import ForwardInputs
from workers.models.library.packed_linear import plain_products
from workers.models.taps import Taps

# The library's plainest attention.
EAGER = "eager"


class LibraryModel(ABC):
    """What `workers.models.model.Model` asks for, by a model of the library. One forward at a time.

    takes_trees: it attends token trees, as `AttentionBatch` says.
    """

    takes_trees = True

    def __init__(self, module: PreTrainedModel) -> None:
        """Take over a loaded model whose config no other model shares."""
        module.train(mode=False)
        self.module = module
        self.name = type(module).__name__
        self.dtype: torch.dtype = module.dtype
        self.device: torch.device = module.device
        configs: list[Any] = [part.config for part in module.modules() if hasattr(part, "config")]
        self._configs = {id(config): config for config in configs}
        parameters = inspect.signature(module.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_rows = "logits_to_keep" in parameters
        # Whether the library hands them out; found out while asking.
        self.has_hidden_states = False

    @property
    @abstractmethod
    def layers(self) -> tuple[LayerKv, ...]:
        """What each layer keeps of a token."""

    @abstractmethod
    def forward(self, inputs: ForwardInputs, kv: KvTensors, taps: Taps | None = None) -> torch.Tensor:
        """Run the batch through all layers.

        Mutates `kv`: writes the keys and values of the batch's tokens to their slots. Fills `taps`.

        Args:
            inputs: The batch, on the model's device.
            kv: Pages of `layers`, in the model's dtype.
            taps: Hidden states that are wanted. With any, the library keeps all of the forward's.

        Returns:
            [R, V] the logits of `inputs.wanted_rows`: what comes between hidden rows and logits (a cap, a
            factor) differs between families and is the library's, so the two are not parted here.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `forward` gave: logits already."""
        return hidden

    @torch.inference_mode()
    def plain_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The library's own forward of one text, without pages or kernels of ours: what `forward` is to give.

        Args:
            token_ids: [T] int64.

        Returns:
            [T, V].
        """
        with self._attention(EAGER), plain_products(self.module):
            logits: torch.Tensor = self.module(input_ids=token_ids[None], use_cache=False).logits[0]
        return logits

    def _hands_out_hidden_states(self, **inputs: Any) -> bool:
        """Whether a forward of one token comes with as many hidden states as the library's documents say."""
        text = self.module.config.get_text_config(decoder=True)
        try:
            states = self.module(**inputs, output_hidden_states=True).hidden_states
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False
        shapes = [tuple(layer.shape) for layer in states or ()]
        return shapes == [(1, 1, text.hidden_size)] * (text.num_hidden_layers + 1)

    @contextmanager
    def _attention(self, name: str) -> Iterator[None]:
        """Let all parts of the model call the attention of that name, for a while."""
        before = {key: config._attn_implementation_internal for key, config in self._configs.items()}  # noqa: SLF001
        self._call_attention(name)
        try:
            yield
        finally:
            for key, config in self._configs.items():
                config._attn_implementation_internal = before[key]  # noqa: SLF001

    def _call_attention(self, name: str) -> None:
        """The same from now on."""
        for config in self._configs.values():
            # The public setter asks what the model's class supports, which does not matter here.
            config._attn_implementation_internal = name  # noqa: SLF001


def build(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """A model of a config, which is copied: models that share one would share their attention."""
    make: Any = model_class._from_config  # noqa: SLF001
    made: PreTrainedModel = make(copy.deepcopy(config), dtype=dtype)
    return made
