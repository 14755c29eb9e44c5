"""The base class of models of the transformers library that run over pages.

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

from workers.kv.state_tensors import StateShape
from workers.kv.tensors import KvTensors, LayerKv
from workers.models.capture import RowCapture
from workers.models.inputs import ForwardInputs
from workers.models.library.packed_linear import plain_products

# The library's plainest attention.
EAGER = "eager"


class LibraryModel(ABC):
    """Implements `workers.models.model.Model` with a model of the library. Runs one forward at a time."""

    takes_trees = True
    packs_kv = True
    batch_invariant = False
    graphable = False
    max_lora_slots = 0
    rotation_bytes = 0  # the library recomputes them in each step

    def __init__(self, module: PreTrainedModel) -> None:
        """Take ownership of a loaded model. It must not share its config with another model."""
        module.train(mode=False)
        self.module = module
        self.name = type(module).__name__
        self.dtype: torch.dtype = module.dtype
        self.device: torch.device = module.device
        configs: list[Any] = [part.config for part in module.modules() if hasattr(part, "config")]
        self._configs = {id(config): config for config in configs}
        parameters = inspect.signature(module.forward).parameters
        self._parameters = frozenset(parameters)
        self._takes_positions = "position_ids" in parameters
        self._takes_rows = "logits_to_keep" in parameters
        # Set by the probe of the subclass.
        self.kv_layers: tuple[LayerKv, ...] = ()
        self.state_shapes: tuple[StateShape, ...] = ()
        self.has_hidden_states = False

    @abstractmethod
    def forward(
        self, inputs: ForwardInputs, kv: KvTensors, capture: RowCapture | None = None
    ) -> torch.Tensor:
        """Run the batch through all layers.

        Mutates `kv`: writes the keys and values of the batch's tokens to their slots. Fills `capture`.

        Args:
            inputs: The batch, on the model's device.
            kv: Pages of `kv_layers`, in the model's dtype.
            capture: The hidden states to copy; None: none. With any, the library keeps all hidden states
                until the end of the forward.

        Returns:
            [R, V] the logits of `inputs.wanted_rows`. They are computed here and not in `logits`, since the
            library's code between hidden rows and logits (a cap, a factor) differs between families.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns its argument, since `forward` returns logits already."""
        return hidden

    @torch.inference_mode()
    def plain_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The library's own forward of one sequence, without pages and our kernels.

        Args:
            token_ids: [T] int64.

        Returns:
            [T, V].
        """
        with self._use_attention(EAGER), plain_products(self.module):
            logits: torch.Tensor = self.module(input_ids=token_ids[None], use_cache=False).logits[0]
        return logits

    def _outputs_hidden_states(self, **inputs: Any) -> bool:
        """Whether a forward returns hidden states of all layers, as the library documents. Runs one token."""
        text = self.module.config.get_text_config(decoder=True)
        try:
            states = self.module(**inputs, output_hidden_states=True).hidden_states
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False
        shapes = [tuple(layer.shape) for layer in states or ()]
        return shapes == [(1, 1, text.hidden_size)] * (text.num_hidden_layers + 1)

    @contextmanager
    def _use_attention(self, name: str) -> Iterator[None]:
        """Inside the block, all parts of the model use the attention of that name."""
        before = {key: config._attn_implementation_internal for key, config in self._configs.items()}  # noqa: SLF001
        self._set_attention(name)
        try:
            yield
        finally:
            for key, config in self._configs.items():
                config._attn_implementation_internal = before[key]  # noqa: SLF001

    def _set_attention(self, name: str) -> None:
        """Make all parts of the model use the attention of that name."""
        for config in self._configs.values():
            # The public setter refuses what the model's class does not declare as supported.
            config._attn_implementation_internal = name  # noqa: SLF001


def build(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """Build a model from a copy of the config: models that share a config would share their attention."""
    make: Any = model_class._from_config  # noqa: SLF001
    made: PreTrainedModel = make(copy.deepcopy(config), dtype=dtype)
    return made
