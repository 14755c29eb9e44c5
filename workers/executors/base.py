"""ModelExecutor: the base class of all executors, with an API for callers in the same process.

Each data method runs one forward, completely or not at all, and rejects what the RPC of the same name rejects
(see `errors`). The caller chooses the sequence numbers, from 0 on. Not thread-safe: one thread calls the
methods that change something. Methods that only read may be called from any thread.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from workers.adapters.slots import LoraAdapterMetrics
from workers.adapters.table import AdapterTable
from workers.executors.engine import Engine
from workers.executors.errors import ExecutorClosed, ExecutorError, KvMissing
from workers.executors.info import Capabilities, ExecutorStatus
from workers.executors.replacement import WeightsReplacement
from workers.given_experts import GivenExperts
from workers.kv.table import PoolUsage
from workers.models.active_kernels import active_kernels, active_products
from workers.models.inputs import MAX_TREE_TOKENS
from workers.models.model import ModelDescription
from workers.models.text import ModelText
from workers.operations import (
    GREEDY,
    Accept,
    Chunk,
    DraftProbabilities,
    Forward,
    HiddenSpec,
    Kind,
    LogitsFormat,
    OutputSpec,
    RowChoice,
    RowOutput,
    Sampling,
    TokenMask,
)

# Internal sequences. Callers use numbers from 0 on.
_SCORED, _WARM, _WARM_TOO = -1, -2, -3
# What the warm-up asks for, together everything that a row can have.
_MASKED = OutputSpec(mask=TokenMask(allowed=(0, 1)))
_DRAWN = OutputSpec(
    sampling=Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logit_bias={0: 1.0}),
    sampled_logprob=True,
)
_PLAINLY_DRAWN = OutputSpec(sampling=Sampling(temperature=1.0))
_LISTED = OutputSpec(
    logprob=True, sampled_logprob=True, top_logprobs=1, logprob_token_ids=(0,), logits=LogitsFormat.F32
)
_WARM_OUTPUTS = (_MASKED, _DRAWN, _PLAINLY_DRAWN, _LISTED)


class ModelExecutor:
    """A model and the engine that runs it. The step loop of a worker uses `engine` directly.

    `text`: the tokenizer, chat template and sampling defaults of its directory.
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
        """`adapters`: None if the model supports none. `backend_reason`: see `Capabilities`."""
        self.engine = engine
        self.adapters = adapters
        # None: its weights cannot be replaced.
        self.replacement: WeightsReplacement[Any] | None = None
        self.text = text or ModelText()
        self._model = model
        self._capabilities = dataclasses.replace(
            _capabilities(self.name, model, engine),
            supports_lora=adapters is not None,
            max_lora_adapters=0 if adapters is None else adapters.max_adapters,
            backend_reason=backend_reason,
        )
        self._op_ids = itertools.count(1)
        self._closed = False

    # Data methods. A method that raises has no effect, except that an empty sequence may be removed.

    def prefill(self, sequence: int, token_ids: Sequence[int], output: OutputSpec = GREEDY) -> RowOutput:
        """Appends tokens to a new or known sequence. Returns the output of the last one."""
        return self.batch_prefill([(sequence, token_ids, output)])[0]

    def batch_prefill(self, items: Sequence[tuple[int, Sequence[int], OutputSpec]]) -> list[RowOutput]:
        """Several prefills in one forward."""
        ops = [self._make_forward(key, tokens, 1, output, Kind.PREFILL) for key, tokens, output in items]
        return [done.outputs[-1] for done in self._run(ops)]

    def decode(self, sequence: int, token_id: int, output: OutputSpec = GREEDY) -> RowOutput:
        """Appends one token to a known sequence. Returns its output."""
        return self.batch_decode([(sequence, token_id, output)])[0]

    def batch_decode(self, items: Sequence[tuple[int, int, OutputSpec]]) -> list[RowOutput]:
        """One decode for each of several known sequences, in one forward."""
        self._check_known(key for key, _, _ in items)
        ops = [self._make_forward(key, [token], 1, output, Kind.DECODE) for key, token, output in items]
        return [done.outputs[-1] for done in self._run(ops)]

    def unified_decode(
        self, items: Sequence[tuple[int, Sequence[int], int, OutputSpec]]
    ) -> list[Sequence[RowOutput]]:
        """Decodes, prefills and chunks in one forward. Returns the outputs of the last `rows` tokens each."""
        ops = []
        for key, tokens, rows, output in items:
            # A single token of an empty sequence is a prompt.
            is_decode = len(tokens) == 1 and rows > 0 and bool(self.engine.length(key))
            kind = Kind.DECODE if is_decode else Kind.PREFILL
            ops.append(self._make_forward(key, tokens, rows, output, kind))
        return [done.outputs for done in self._run(ops)]

    def forward_verify(
        self,
        sequence: int,
        token_ids: Sequence[int],
        output: OutputSpec = GREEDY,
        accept: Accept = Accept.ALL,
    ) -> tuple[Sequence[RowOutput], int]:
        """Appends n + 1 tokens to a known sequence. Returns their outputs, and how many drafts were kept."""
        self._check_known([sequence])
        op = self._make_forward(sequence, token_ids, len(token_ids), output, Kind.VERIFY, accept)
        (done,) = self._run([op])
        return done.outputs, done.kept - 1

    def verify_tree(
        self,
        sequence: int,
        token_ids: Sequence[int],
        parents: Sequence[int],
        output: OutputSpec = GREEDY,
    ) -> tuple[Sequence[RowOutput], Sequence[int]]:
        """Appends the path of a tree that the model chooses. Returns all outputs, and the path's indexes.

        See `workers.token_trees` for `parents`.
        """
        self._check_known([sequence])
        plain = self._make_forward(sequence, token_ids, len(token_ids), output, Kind.VERIFY, Accept.CHOSEN)
        op = dataclasses.replace(plain, parents=parents)
        (done,) = self._run([op])
        return done.outputs, done.kept_path if parents else range(done.kept)

    def forward(
        self, token_ids: Sequence[int], output: OutputSpec = GREEDY, experts: GivenExperts | None = None
    ) -> Sequence[RowOutput]:
        """Computes the outputs of all tokens, without keeping a cache."""
        op = self._make_forward(_SCORED, token_ids, len(token_ids), output, Kind.SCORE)
        if experts is not None:
            op = dataclasses.replace(op, experts=experts, salt=experts.salted(b""))
        (done,) = self._run([op])
        return done.outputs

    def fork(self, sequence: int, children: Sequence[int]) -> None:
        """Makes sequences that share the pages of a known one."""
        self._check_open()
        self.engine.fork(sequence, children)

    def truncate_kv(self, sequence: int, new_len: int) -> None:
        """Truncates a known sequence and frees its pages."""
        self._check_open()
        self.engine.truncate(sequence, new_len)

    def release_cache(self, sequence: int) -> bool:
        """Removes a sequence. False if it was not known."""
        return self.engine.release(sequence)

    def warmup(self) -> None:
        """Runs a step of each kind, so that no caller waits for its first one. Needs one page.

        Everything that a request can ask for is asked for once: on a GPU its kernels are compiled then.
        """
        # With the next token less than a page, so that no page of it is indexed.
        length = max(1, min(self._model.max_seq_len, self.engine.kv.page_size) - 2)
        self.prefill(_WARM, [i % self._model.vocab_size for i in range(length)])
        for output in (GREEDY, *_WARM_OUTPUTS, *self._captured_outputs()):
            self.decode(_WARM, 0, output)
            self.truncate_kv(_WARM, length)
        if length + 2 <= self._capabilities.kv_capacity_tokens:
            self._warm_verifies(length)
        usage = self.cache_metrics_snapshot()
        if usage.pages_free + usage.pages_cached:  # otherwise the pool has room for one sequence only
            self.unified_decode([(_WARM, [0], 1, _DRAWN), (_WARM_TOO, [0, 0], 1, _MASKED)])
        self.release_cache(_WARM)
        self.release_cache(_WARM_TOO)
        self.engine.reset_counts()

    def _captured_outputs(self) -> list[OutputSpec]:
        """What is captured of the layers, if the model can."""
        found = [OutputSpec(hidden=HiddenSpec((0,)))] if self.engine.runner.has_hidden_states else []
        return found + ([OutputSpec(experts=True)] if self._model.moe_layers else [])

    def _warm_verifies(self, length: int) -> None:
        """Verifies of the warm sequence, of so many tokens, which a page has room for two more of."""
        # Only the first token stays: with two the page might be full, and then indexed. So drafts and scored
        # tokens follow a shorter text.
        if self.engine.takes_trees:
            tree = self._make_forward(_WARM, [0, 0], 2, GREEDY, Kind.VERIFY)
            self._run([dataclasses.replace(tree, parents=(0,))])
        shorter = max(1, length - 1)
        draft = RowChoice(draft=DraftProbabilities(np.array([0]), np.array([1.0])))
        for output in (_PLAINLY_DRAWN, _DRAWN):
            self.truncate_kv(_WARM, shorter)
            drafts = self._make_forward(_WARM, [0, 0], 2, output, Kind.VERIFY, Accept.CHOSEN)
            self._run([dataclasses.replace(drafts, choices=(draft, RowChoice()))])
        self.truncate_kv(_WARM, shorter)
        scored = self._make_forward(_WARM, [0, 0], 1, _PLAINLY_DRAWN, Kind.PREFILL)
        self._run([dataclasses.replace(scored, scored=1, sample_seeds=(1,))])
        self.truncate_kv(_WARM, length)

    def shutdown(self) -> None:
        """Removes all sequences. After that data methods raise ExecutorClosed; others still work."""
        self._closed = True
        self.engine.release_all()

    # Metadata and metrics.

    def info(self) -> ModelDescription:
        """The model."""
        return self._model

    def capabilities(self) -> Capabilities:
        """How the model is run, and which features it supports."""
        # The runner changes its name if its graphs cannot be captured.
        return dataclasses.replace(self._capabilities, runner=self.engine.runner.name)

    @property
    def supports_native_unified_decode(self) -> bool:
        """Whether decodes and prefills share one forward."""
        return self._capabilities.supports_native_unified_decode

    def kv_capacity(self) -> int:
        """The maximum length of a sequence in tokens, as in `capabilities`."""
        return self._capabilities.kv_capacity_tokens

    def status(self) -> ExecutorStatus:
        """The running step, and the counts since the start."""
        return self.engine.status()

    def cache_metrics_snapshot(self) -> PoolUsage:
        """How the pages are used."""
        return self.engine.kv_table.usage()

    def lora_metrics_snapshot(self) -> Sequence[LoraAdapterMetrics]:
        """The use of adapters."""
        return () if self.adapters is None else self.adapters.metrics()

    def check_integrity(self) -> None:
        """Raises IntegrityError if pool and sequences disagree."""
        self.engine.kv_table.check_integrity()

    # Internals.

    def _make_forward(
        self,
        key: int,
        token_ids: Sequence[int],
        rows: int,
        output: OutputSpec,
        kind: Kind,
        accept: Accept = Accept.ALL,
    ) -> Forward:
        position = self.engine.length(key) or 0
        return Forward(
            op_id=next(self._op_ids),
            sequence=key,
            position=position,
            token_ids=token_ids,
            rows=rows,
            output=output,
            accept=accept,
            kind=kind,
            prompt_len=position + len(token_ids) if kind is Kind.PREFILL else position,
            ephemeral=kind is Kind.SCORE,
        )

    def _run(self, ops: Sequence[Forward]) -> Sequence[Forward]:
        """Runs all operations in one forward, or none. Returns them, complete."""
        self._check_open()
        for op in ops:
            self._check(op)
        if len({op.sequence for op in ops}) < len(ops):
            raise ExecutorError(f"sequences {[op.sequence for op in ops]} contain a duplicate")
        if not ops:
            return []
        try:
            for op in ops:
                self.engine.begin(op)
            self.engine.execute([Chunk(op, op.computed, op.remaining) for op in ops])
            _raise_failure(ops)
        except Exception:
            for op in reversed([op for op in ops if op.has_begun]):
                self.engine.roll_back(op)
            raise
        for op in ops:
            self.engine.complete(op)
        return ops

    def _check_open(self) -> None:
        if self._closed:
            raise ExecutorClosed("the executor was shut down")

    def _check_known(self, sequences: Iterable[int]) -> None:
        self._check_open()
        for sequence in sequences:
            if self.engine.length(sequence) is None:
                raise KvMissing(f"sequence {sequence} is not known")

    def _check(self, op: Forward) -> None:
        """Raises an ExecutorError for a forward that the model cannot run."""
        if not op.token_ids:
            raise ExecutorError(f"nothing to append to sequence {op.sequence}")
        if not 0 <= op.wanted_rows <= len(op.token_ids):
            raise ExecutorError(f"{op.wanted_rows} rows of {len(op.token_ids)} tokens")
        if op.parents:
            _check_tree(op)
        vocab_size = self._model.vocab_size
        for tokens in (op.token_ids, op.output.logprob_token_ids):
            if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
                raise ExecutorError(
                    f"tokens from {min(tokens)} to {max(tokens)} of a vocabulary of {vocab_size}"
                )
        hidden, layers = op.output.hidden, self._model.num_layers
        if hidden is not None and not (
            self.engine.runner.has_hidden_states and all(0 <= layer <= layers for layer in hidden.layers)
        ):
            raise ExecutorError(f"hidden states of layers {list(hidden.layers)} of {layers}")
        if (op.output.experts or op.experts is not None) and not self._model.moe_layers:
            raise ExecutorError(f"experts of {self._model.architecture}")
        limit, end = self._capabilities.kv_capacity_tokens, op.position + len(op.token_ids)
        if end > limit:
            raise ExecutorError(f"{end} tokens in sequence {op.sequence}, which can have {limit}")


def _raise_failure(ops: Sequence[Forward]) -> None:
    """Raises the failure of the first forward that has one."""
    for op in ops:
        if op.failure is not None:
            raise op.failure


def _check_tree(op: Forward) -> None:
    """Raises ExecutorError if the parents are not a tree."""
    if len(op.parents) != len(op.token_ids) - 1 or len(op.token_ids) > MAX_TREE_TOKENS:
        raise ExecutorError(f"{len(op.parents)} parents of {len(op.token_ids)} tokens")
    if any(not 0 <= parent <= index for index, parent in enumerate(op.parents)):
        raise ExecutorError(f"a parent is not before its token: {list(op.parents)}")


def _capabilities(name: str, model: ModelDescription, engine: Engine) -> Capabilities:
    kv = engine.kv
    return Capabilities(
        executor=name,
        runner=engine.runner.name,
        kernels=active_kernels(kv.device),
        products=active_products(
            kv.device,
            model.dtype,
            batch_invariant=engine.batch_invariant,
            quantization=model.quantization or None,
        ),
        device=str(kv.device),
        # Models that run one sequence at a time, in the library's code, are those that take no trees.
        supports_native_unified_decode=engine.takes_trees,
        page_size_tokens=kv.page_size,
        bytes_per_page=kv.bytes_per_page,
        kv_capacity_tokens=min(model.max_seq_len, kv.num_pages * kv.page_size),
        supports_token_trees=engine.takes_trees,
        supports_hidden_states=engine.runner.has_hidden_states,
        batch_invariant=engine.batch_invariant,
    )
