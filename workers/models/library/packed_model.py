"""A model of the transformers library that runs a whole batch in one forward, with paged attention.

The library's code runs unchanged on packed tokens [1, T] with their positions. Only attention is replaced;
see `attention`.

Dimension letters: T tokens of the batch; R wanted rows; V vocabulary.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from workers.kv.tensors import KvTensors
from workers.models.capture import RowCapture
from workers.models.errors import ModelError
from workers.models.inputs import ForwardInputs
from workers.models.library.attention import (
    HANDLER_ATTRIBUTE,
    PAGED,
    PROBE,
    AttentionHandler,
    AttentionProbe,
    LayerCall,
    PagedAttention,
)
from workers.models.library.library_model import LibraryModel


class PackedModel(LibraryModel):
    """A model in which every layer calls the library's attention interface once."""

    def __init__(self, module: PreTrainedModel) -> None:
        """Take ownership of a loaded model, and run one token to find the shapes of its keys and values.

        Raises ModelError if its attention cannot run over pages; the message says why.
        """
        super().__init__(module)
        if not self._takes_positions:
            raise ModelError(f"{self.name} does not take position_ids, so sequences cannot be packed")
        text = module.config.get_text_config(decoder=True)
        if (
            getattr(text, "attn_temperature_tuning", False)
            and text.max_position_embeddings >= text.floor_scale
        ):
            # The scale depends on the index of a token in the packed row; below floor_scale it is 1.
            raise ModelError(
                f"{self.name} scales queries by their index in the batch (attn_temperature_tuning),"
                " so sequences cannot be packed"
            )
        self._calls = self._probe()
        self.kv_layers = tuple(call.kv for call in self._calls)
        self._set_attention(PAGED)

    @torch.inference_mode()
    def forward(
        self, inputs: ForwardInputs, kv: KvTensors, capture: RowCapture | None = None
    ) -> torch.Tensor:
        attention = PagedAttention(inputs, kv, self._calls)
        rows = {"logits_to_keep": inputs.wanted_rows} if self._takes_rows else {}
        self._set_handler(attention)
        answer = self.module(
            input_ids=inputs.token_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            **rows,
            **({} if capture is None else {"output_hidden_states": True}),
        )
        logits: torch.Tensor = answer.logits[0]  # [R or T, V]
        if attention.done != len(self._calls):
            raise RuntimeError(
                f"attention was called {attention.done} times, but {len(self._calls)} times by the probe"
            )
        if capture is not None:
            for layer in capture.rows:
                capture.capture_rows(layer, inputs.wanted_rows, answer.hidden_states[layer][0])
        return logits if self._takes_rows else logits.index_select(0, inputs.wanted_rows)

    @torch.inference_mode()
    def _probe(self) -> tuple[LayerCall, ...]:
        """The attention calls of a forward of one token. Raises ModelError."""
        probe, token = AttentionProbe(), torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        with self._use_attention(PROBE):
            self._set_handler(probe)
            self.module(input_ids=token, position_ids=token, use_cache=False)
            calls = tuple(probe.calls)
            self.has_hidden_states = self._outputs_hidden_states(
                input_ids=token, position_ids=token, use_cache=False
            )
        if not calls:
            raise ModelError(f"{self.name} does not use the library's attention interface")
        layers = self.module.config.get_text_config(decoder=True).num_hidden_layers
        if len(calls) != layers:
            raise ModelError(f"{self.name} calls attention {len(calls)} times in {layers} layers")
        return calls

    def _set_handler(self, handler: AttentionHandler) -> None:
        """Pass the attention calls of the next forward to `handler`."""
        for config in self._configs.values():
            object.__setattr__(config, HANDLER_ATTRIBUTE, handler)
