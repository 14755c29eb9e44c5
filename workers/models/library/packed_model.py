"""A model of the transformers library that runs a whole batch at once, its attention answered over our pages.

The library's code runs unchanged on packed tokens, [1, T] with their positions; only attention is ours. See
`attention`.

Dimension letters: T tokens of the batch; R wanted rows; V vocabulary.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from workers.kv.tensors import KvTensors, LayerKv
from workers.models.errors import ModelError
from workers.models.inputs import ForwardInputs
from workers.models.library.attention import ASKING, PAGED, STEP, AskingStep, LayerCall, PagedStep, Step
from workers.models.library.library_model import LibraryModel
from workers.models.taps import Taps


class PackedModel(LibraryModel):
    """A model whose every layer calls the library's interface for attention, once."""

    def __init__(self, module: PreTrainedModel) -> None:
        """Take over a loaded model, and ask its layers what they keep, with a forward of one token.

        Raises:
            ModelError: Its attention cannot be answered from pages; the message says what is in the way.
        """
        super().__init__(module)
        if not self._takes_positions:
            raise ModelError(f"{self.name} takes no positions, so its texts cannot be packed")
        text = module.config.get_text_config(decoder=True)
        if (
            getattr(text, "attn_temperature_tuning", False)
            and text.max_position_embeddings >= text.floor_scale
        ):
            # It does so by the place of a token in the row; before floor_scale that changes nothing.
            raise ModelError(f"{self.name} scales queries by a position that it counts itself")
        self._calls = self._ask()
        self._call_attention(PAGED)

    @property
    def layers(self) -> tuple[LayerKv, ...]:
        """See `LibraryModel`."""
        return tuple(call.kv for call in self._calls)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Positions that a token sees in each layer; None: all of them."""
        return tuple(call.sliding_window for call in self._calls)

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs, kv: KvTensors, taps: Taps | None = None) -> torch.Tensor:
        """See `LibraryModel`."""
        step = PagedStep(inputs, kv, self._calls)
        rows = {"logits_to_keep": inputs.wanted_rows} if self._takes_rows else {}
        self._carry(step)
        answer = self.module(
            input_ids=inputs.token_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            **rows,
            **({} if taps is None else {"output_hidden_states": True}),
        )
        logits: torch.Tensor = answer.logits[0]  # [R or T, V]
        if step.done != len(self._calls):
            raise RuntimeError(f"attention was called {step.done} times, {len(self._calls)} when asked")
        if taps is not None:
            for layer in taps.rows:
                taps.tap(layer, inputs.wanted_rows, answer.hidden_states[layer][0])
        return logits if self._takes_rows else logits.index_select(0, inputs.wanted_rows)

    @torch.inference_mode()
    def _ask(self) -> tuple[LayerCall, ...]:
        """The calls of a forward of one token. Raises ModelError."""
        step, token = AskingStep(), torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        with self._attention(ASKING):
            self._carry(step)
            self.module(input_ids=token, position_ids=token, use_cache=False)
            calls = tuple(step.calls)
            self.has_hidden_states = self._hands_out_hidden_states(
                input_ids=token, position_ids=token, use_cache=False
            )
        if not calls:
            raise ModelError(f"{self.name} has attention code of its own")
        layers = self.module.config.get_text_config(decoder=True).num_hidden_layers
        if len(calls) != layers:
            raise ModelError(f"{self.name} calls attention {len(calls)} times in {layers} layers")
        return calls

    def _carry(self, step: Step) -> None:
        """Let a step answer the calls of the next forward."""
        for config in self._configs.values():
            object.__setattr__(config, STEP, step)
