"""ModelExecutor: the base class of all executors.

Not thread-safe: one thread calls the methods that change something. Methods that only read may be called from
any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from quire.v1.types_pb2 import ExecutorCapabilities

from workers.adapters.table import AdapterTable
from workers.common.draft_models import MTP_HEAD
from workers.common.worker_pb2 import WorkerSnapshot
from workers.drafting import Drafting, Drafts
from workers.executors.engine import Engine
from workers.executors.replacement import WeightsReplacement
from workers.head_drafting import HeadDrafting
from workers.kv_disk import KvDisk
from workers.models.active_kernels import active_kernels, active_products
from workers.models.errors import ModelError
from workers.models.model import ModelDescription
from workers.models.text import ModelText
from workers.operations import Accept, Chunk, Forward, Kind
from workers.outputs import (
    GREEDY,
    DataType,
    DraftProbabilities,
    HiddenSpec,
    OutputSpec,
    Sampling,
    TokenMask,
    VerifyRow,
)
from workers.sampling import BadLogitsError

# Internal sequences. Callers use numbers from 0 on.
_SCORED, _WARM, _WARM_TOO = -1, -2, -3
# The outputs of the warm-up: together, everything that a row can have.
_MASKED = OutputSpec(mask=TokenMask(allowed=(0, 1)))
_DRAWN = OutputSpec(
    sampling=Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logit_bias={0: 1.0}),
    sampled_logprob=True,
)
_PLAINLY_DRAWN = OutputSpec(sampling=Sampling(temperature=1.0))
_LISTED = OutputSpec(
    logprob=True,
    sampled_logprob=True,
    top_logprobs=1,
    logprob_token_ids=(0,),
    entropy=True,
    logits=DataType.F32,
)
_WARM_OUTPUTS = (_MASKED, _DRAWN, _PLAINLY_DRAWN, _LISTED)


class ModelExecutor:
    """A model and the engine that runs it. The step loop of a worker uses `engine` directly.

    `text`: the tokenizer, chat template and sampling defaults of the model's directory.
    """

    name: str

    def __init__(
        self,
        model: ModelDescription,
        engine: Engine,
        text: ModelText | None = None,
        adapters: AdapterTable[Any] | None = None,
        *,
        backend_reason: str = "",
    ) -> None:
        """`adapters`: None if the model supports none. `backend_reason`: see ExecutorCapabilities."""
        self.engine = engine
        self.adapters = adapters
        # None: its weights cannot be replaced.
        self.replacement: WeightsReplacement[Any] | None = None
        # None: its KV is not stored.
        self.kv_disk: KvDisk | None = None
        # None: nothing is drafted. See `use_draft_model`.
        self.drafting: Drafts | None = None
        self._draft_model: ModelExecutor | None = None
        self.text = text or ModelText()
        self._model = model
        kv = engine.kv
        self._capabilities = ExecutorCapabilities(
            executor=self.name,
            runner=engine.runner.name,
            kernels=active_kernels(kv.device),
            products=active_products(
                kv.device,
                model.dtype,
                batch_invariant=engine.batch_invariant,
                quantization=model.quantization or None,
                rounds_rows=model.rounds_rows,
            ),
            device=str(kv.device),
            # The models that run one sequence at a time, in the library's code, are those without trees.
            supports_native_unified_decode=engine.takes_trees,
            page_size_tokens=kv.page_size,
            bytes_per_page=kv.bytes_per_page,
            bytes_per_state=kv.bytes_per_state,
            kv_capacity_tokens=min(model.max_seq_len, kv.num_pages * kv.page_size),
            supports_token_trees=engine.takes_trees,
            supports_hidden_states=engine.runner.has_hidden_states,
            batch_invariant=engine.batch_invariant,
            supports_verify=True,
            supports_fork=True,
            supports_sampling=True,
            supports_prefix_reuse=True,
            supports_lora=adapters is not None,
            max_lora_adapters=0 if adapters is None else adapters.max_adapters,
            backend_reason=backend_reason,
        )

    def use_draft_model(self, other: ModelExecutor, step_tokens: int) -> None:
        """Drafts with another model from now on. This executor takes ownership of it.

        `step_tokens`: the most tokens that the draft model computes in a step before it drafts.
        """
        model = other.info()
        self._draft_model = other
        self.drafting = Drafting(
            other.engine,
            vocab_sizes=(model.vocab_size, self._model.vocab_size),
            max_seq_tokens=other.capabilities().kv_capacity_tokens,
            step_tokens=step_tokens,
        )
        self._capabilities.draft_model = model.model_id

    def use_mtp_head(self) -> None:
        """Drafts with the model's own head for multi-token prediction from now on."""
        self.drafting = HeadDrafting(self.engine, self._capabilities.kv_capacity_tokens)
        self._capabilities.draft_model = MTP_HEAD

    def warmup(self) -> None:
        """Runs a step of each kind, so that no caller waits for the first one. Needs one page.

        Everything that a request can ask for is requested once: on a GPU that compiles the kernels.
        """
        length, truncate = self.run_first_step(), self.engine.truncate
        for output in (GREEDY, *_WARM_OUTPUTS, *self._captured_outputs()):
            self._run(self._append(_WARM, [0], output, kind=Kind.DECODE))
            truncate(_WARM, length)
        if length + 2 <= self._capabilities.kv_capacity_tokens:
            self._warm_verifies(length)
        usage = self.engine.kv_table.usage()
        if usage.pages_free + usage.pages_cached:  # otherwise the pool has room for one sequence only
            decode = self._append(_WARM, [0], _DRAWN, kind=Kind.DECODE)
            self._run(decode, self._append(_WARM_TOO, [0, 0], _MASKED))
        self.engine.release(_WARM)
        self.engine.release(_WARM_TOO)
        self.engine.reset_counts()
        if self._draft_model is not None:
            self._draft_model.warmup()

    def run_first_step(self) -> int:
        """Runs the short prompt with which the warm-up begins. Returns its length in tokens. Needs one page.

        Raises ModelError if the logits are not finite.
        """
        # Together with the next token it is shorter than a page, so that no page of it is indexed.
        length = max(1, min(self._model.max_seq_len, self.engine.kv.page_size) - 2)
        self._run(self._append(_WARM, [i % self._model.vocab_size for i in range(length)]))
        return length

    def _captured_outputs(self) -> list[OutputSpec]:
        """Hidden states and experts, if the model has them."""
        found = [OutputSpec(hidden=HiddenSpec((0,)))] if self.engine.runner.has_hidden_states else []
        return found + ([OutputSpec(experts=True)] if self._model.moe_layers else [])

    def _warm_verifies(self, length: int) -> None:
        """Runs verifies on the warm sequence of `length` tokens, whose page has room for two more."""
        # A tree keeps only its first token. Other verifies keep two, which might fill the page, so that it
        # would be indexed. So they follow a shorter sequence.
        if self.engine.takes_trees:
            self._run(self._append(_WARM, [0, 0], rows=2, kind=Kind.VERIFY, parents=(0,)))
        shorter, truncate = max(1, length - 1), self.engine.truncate
        draft = VerifyRow(draft=DraftProbabilities(np.array([0]), np.array([1.0])))
        for output in (_PLAINLY_DRAWN, _DRAWN):
            truncate(_WARM, shorter)
            choices = {"accept": Accept.CHOSEN, "choices": (draft, VerifyRow())}
            self._run(self._append(_WARM, [0, 0], output, rows=2, kind=Kind.VERIFY, **choices))
        truncate(_WARM, shorter)
        self._run(self._append(_WARM, [0, 0], _PLAINLY_DRAWN, scored=1, sample_seeds=(1,)))
        truncate(_WARM, length)

    def _append(
        self, sequence: int, token_ids: Sequence[int], output: OutputSpec = GREEDY, **options: Any
    ) -> Forward:
        """An append of the warm-up, with an output for its last token."""
        position = self.engine.length(sequence) or 0
        return Forward(0, sequence, position, token_ids, output=output, prompt_len=position, **options)

    def _run(self, *forwards: Forward) -> None:
        """Run the warm-up's forwards in one step. After an error a worker does not start."""
        for forward in forwards:
            self.engine.begin(forward)
        self.engine.execute([Chunk(one, one.computed, one.remaining) for one in forwards])
        for forward in forwards:
            if isinstance(forward.failure, BadLogitsError):
                overflow = "its logits are not finite, though its weights are: they overflow"
                # Weights that are tried before they replace others have no name yet.
                name = f"{self._model.model_id}: " if self._model.model_id else ""
                raise ModelError(name + overflow) from forward.failure
            if forward.failure is not None:
                raise forward.failure
            self.engine.complete(forward)

    # Metadata and metrics.

    def info(self) -> ModelDescription:
        return self._model

    def capabilities(self) -> ExecutorCapabilities:
        """How the model is run, and what it supports. The caller owns it, and adds the limits of a step."""
        found = ExecutorCapabilities()
        found.CopyFrom(self._capabilities)
        # The runner changes its name if its graphs cannot be captured.
        found.runner = self.engine.runner.name
        return found

    def status(self) -> WorkerSnapshot:
        """The part of a snapshot that says what runs, and what has run since the start."""
        status = self.engine.stats.status()
        if self._draft_model is not None and not status.step_age_ns:
            # Drafting between two steps counts as a step, so that the gateway notices if it never ends.
            drafting = self._draft_model.status()
            status.step_age_ns, status.step_expected_ns = drafting.step_age_ns, drafting.step_expected_ns
        return status
