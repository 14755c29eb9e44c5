"""ModelExecutor: the trait every executor has, for callers in the same process.

Each data method is one forward of its engine, all of it or nothing, and refuses what the RPC of its name
refuses; see `errors`. Sequences are named by integers from 0 on that the caller chooses. Not thread-safe: one
thread works with an executor; the methods that only read may be called from any.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import torch

from workers.executors.engine import Engine
from workers.executors.errors import (
    BadTree,
    DuplicateSequence,
    EmptyTokens,
    ExecutorClosed,
    KvMissing,
    NoSuchLayer,
    RowsOutOfRange,
    SequenceTooLong,
    TokenOutOfVocabulary,
)
from workers.executors.info import (
    Capabilities,
    ExecutorStatus,
    LoraAdapterMetrics,
    ModelDescription,
)
from workers.kv.table import PoolUsage
from workers.models.active_kernels import active_kernels
from workers.models.inputs import MAX_TREE_TOKENS
from workers.models.text import ModelText
from workers.operations import (
    GREEDY,
    Accept,
    Forward,
    ForwardDone,
    Kind,
    OutputSpec,
    RowOutput,
    Sampling,
    TokenMask,
)
from workers.running import Chunk, RunningForward

# Names of sequences that no caller has.
_SCORED, _WARM, _WARM_TOO = -1, -2, -3


class ModelExecutor:
    """A model and the engine that runs it. The step loop of a worker drives `engine` itself.

    `text`: what its directory has for callers who work with text.
    """

    name: str

    def __init__(self, model: ModelDescription, engine: Engine, text: ModelText | None = None) -> None:
        self.engine = engine
        self.text = text or ModelText()
        self._model = model
        self._capabilities = _capabilities(self.name, model, engine)
        self._op_ids = itertools.count(1)
        self._closed = False

    # Work. What raises has changed nothing, but that an empty sequence may be forgotten.

    def prefill(self, sequence: int, token_ids: Sequence[int], output: OutputSpec = GREEDY) -> RowOutput:
        """Appends tokens to a sequence, new or known; says what follows the last of them."""
        return self.batch_prefill([(sequence, token_ids, output)])[0]

    def batch_prefill(self, items: Sequence[tuple[int, Sequence[int], OutputSpec]]) -> list[RowOutput]:
        """Several prefills in one forward."""
        ops = [self._operation(key, tokens, 1, output, Kind.PREFILL) for key, tokens, output in items]
        return [done.outputs[-1] for done in self._run(ops)]

    def decode(self, sequence: int, token_id: int, output: OutputSpec = GREEDY) -> RowOutput:
        """Appends one token to a known sequence; says what follows it."""
        return self.batch_decode([(sequence, token_id, output)])[0]

    def batch_decode(self, items: Sequence[tuple[int, int, OutputSpec]]) -> list[RowOutput]:
        """One decode for each of several known sequences, in one forward."""
        self._check_known(key for key, _, _ in items)
        ops = [self._operation(key, [token], 1, output, Kind.DECODE) for key, token, output in items]
        return [done.outputs[-1] for done in self._run(ops)]

    def unified_decode(
        self, items: Sequence[tuple[int, Sequence[int], int, OutputSpec]]
    ) -> list[Sequence[RowOutput]]:
        """Decodes, prefills and chunks in one forward; what follows the last `rows` tokens of each."""
        ops = []
        for key, tokens, rows, output in items:
            # The first token of a prompt comes alone too.
            decodes = len(tokens) == 1 and rows > 0 and bool(self.engine.length(key))
            ops.append(self._operation(key, tokens, rows, output, Kind.DECODE if decodes else Kind.PREFILL))
        return [done.outputs for done in self._run(ops)]

    def forward_verify(
        self,
        sequence: int,
        token_ids: Sequence[int],
        output: OutputSpec = GREEDY,
        accept: Accept = Accept.ALL,
    ) -> tuple[Sequence[RowOutput], int]:
        """Appends n + 1 tokens to a known sequence; what follows each, and how many drafts were kept."""
        self._check_known([sequence])
        op = self._operation(sequence, token_ids, len(token_ids), output, Kind.VERIFY, accept)
        (done,) = self._run([op])
        return done.outputs, done.kept - 1

    def verify_tree(
        self,
        sequence: int,
        token_ids: Sequence[int],
        parents: Sequence[int],
        output: OutputSpec = GREEDY,
    ) -> tuple[Sequence[RowOutput], Sequence[int]]:
        """Appends the path of a tree that the model chooses; what follows each token, and the path's indexes.

        See `workers.token_trees` for `parents`.
        """
        self._check_known([sequence])
        plain = self._operation(sequence, token_ids, len(token_ids), output, Kind.VERIFY, Accept.CHOSEN)
        op = dataclasses.replace(plain, parents=parents)
        (done,) = self._run([op])
        return done.outputs, done.kept_path if parents else range(done.kept)

    def forward(self, token_ids: Sequence[int], output: OutputSpec = GREEDY) -> Sequence[RowOutput]:
        """Scores tokens without keeping a cache; what follows each."""
        (done,) = self._run([self._operation(_SCORED, token_ids, len(token_ids), output, Kind.SCORE)])
        return done.outputs

    def fork(self, sequence: int, children: Sequence[int]) -> None:
        """Makes sequences that share the pages of a known one."""
        self._check_open()
        self.engine.fork(sequence, children)

    def truncate_kv(self, sequence: int, new_len: int) -> None:
        """Cuts a known sequence and frees its pages."""
        self._check_open()
        self.engine.truncate(sequence, new_len)

    def release_cache(self, sequence: int) -> bool:
        """Forgets a sequence; False if it was not known."""
        return self.engine.release(sequence)

    def warmup(self) -> None:
        """Real steps of each kind, so that the first caller of any waits for nothing. Leaves no trace.

        Needs one page: a pool that holds anything can be warmed up.
        """
        # Less than a page with the token after it, so that nothing of it stays in the prefix index.
        length = max(1, min(self._model.max_seq_len, self.engine.kv.page_size) - 2)
        self.prefill(_WARM, [i % self._model.vocab_size for i in range(length)])
        masked = OutputSpec(mask=TokenMask(allowed=(0, 1)))
        drawn = OutputSpec(sampling=Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1))
        for output in (GREEDY, masked, drawn):
            self.decode(_WARM, 0, output)
            self.truncate_kv(_WARM, length)
        if self.engine.takes_trees and length + 2 <= self._capabilities.kv_capacity_tokens:
            # Of which the first token stays: with two the page might be full, and found again.
            tree = self._operation(_WARM, [0, 0], 2, GREEDY, Kind.VERIFY)
            self._run([dataclasses.replace(tree, parents=(0,))])
            self.truncate_kv(_WARM, length)
        usage = self.cache_metrics_snapshot()
        if usage.pages_free + usage.pages_cached:  # else no two sequences ever meet
            self.unified_decode([(_WARM, [0], 1, drawn), (_WARM_TOO, [0, 0], 1, masked)])
        self.release_cache(_WARM)
        self.release_cache(_WARM_TOO)
        self.engine.reset_counts()

    def shutdown(self) -> None:
        """Forgets all sequences. Questions are answered still, work raises ExecutorClosed."""
        self._closed = True
        self.engine.release_all()

    # Questions.

    def info(self) -> ModelDescription:
        """The model."""
        return self._model

    def capabilities(self) -> Capabilities:
        """How the model is run, and what can be asked for."""
        # A runner whose graphs could not be captured goes by another name from then on.
        return dataclasses.replace(self._capabilities, runner=self.engine.runner.name)

    @property
    def supports_native_unified_decode(self) -> bool:
        """Decodes and prefills share one forward."""
        return self._capabilities.supports_native_unified_decode

    def kv_capacity(self) -> int:
        """Tokens that the pool has room for, of all sequences together."""
        return self.engine.kv.num_pages * self.engine.kv.page_size

    def status(self) -> ExecutorStatus:
        """What runs now, and what has been run."""
        metrics, device = self.engine.metrics(), self.engine.kv.device
        on_gpu = device.type == "cuda"
        return ExecutorStatus(
            counts=metrics.counts,
            step_age_ns=metrics.step_age_ns,
            step_number=metrics.step_number,
            step_expected_ns=metrics.step_expected_ns,
            device_memory_bytes=torch.cuda.memory_allocated(device) if on_gpu else 0,
            device_memory_peak_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else 0,
        )

    def cache_metrics_snapshot(self) -> PoolUsage:
        """How the pages are used."""
        return self.engine.metrics().pool

    def lora_metrics_snapshot(self) -> Sequence[LoraAdapterMetrics]:
        """How adapters are used: none, as `capabilities` says."""
        return ()

    def check_integrity(self) -> None:
        """Raises IntegrityError if the pool contradicts the sequences."""
        self.engine.check_integrity()

    # How work is done.

    def _operation(
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

    def _run(self, ops: Sequence[Forward]) -> list[ForwardDone]:
        """All operations in one forward, all or nothing."""
        self._check_open()
        for op in ops:
            self._check(op)
        if len({op.sequence for op in ops}) < len(ops):
            raise DuplicateSequence(f"one of {[op.sequence for op in ops]} is there twice")
        if not ops:
            return []
        begun: list[RunningForward] = []
        try:
            for op in ops:
                begun.append(self.engine.begin(op))  # noqa: PERF401 - what has begun is rolled back
            self.engine.execute([Chunk(one, one.computed, one.remaining) for one in begun])
            for one in begun:
                if one.failure is not None:
                    raise one.failure
        except Exception:
            for one in reversed(begun):
                self.engine.roll_back(one)
            raise
        return [self.engine.complete(one, len(ops)) for one in begun]

    def _check_open(self) -> None:
        if self._closed:
            raise ExecutorClosed("the executor was shut down")

    def _check_known(self, sequences: Iterable[int]) -> None:
        self._check_open()
        for sequence in sequences:
            if self.engine.length(sequence) is None:
                raise KvMissing(f"sequence {sequence} is not known")

    def _check(self, op: Forward) -> None:
        """Raises an ExecutorError for what the model cannot do."""
        if not op.token_ids:
            raise EmptyTokens(f"nothing to append to sequence {op.sequence}")
        if not 0 <= op.wanted_rows <= len(op.token_ids):
            raise RowsOutOfRange(f"{op.wanted_rows} rows of {len(op.token_ids)} tokens")
        if op.parents:
            _check_tree(op)
        vocab_size = self._model.vocab_size
        for tokens in (op.token_ids, op.output.logprob_token_ids):
            if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
                raise TokenOutOfVocabulary(
                    f"tokens from {min(tokens)} to {max(tokens)} of a vocabulary of {vocab_size}"
                )
        hidden, layers = op.output.hidden, self._model.num_layers
        if hidden is not None and not (
            self.engine.runner.has_hidden_states and all(0 <= layer <= layers for layer in hidden.layers)
        ):
            raise NoSuchLayer(f"hidden states of layers {list(hidden.layers)} of {layers}")
        most, end = self._capabilities.kv_capacity_tokens, op.position + len(op.token_ids)
        if end > most:
            raise SequenceTooLong(f"{end} tokens in sequence {op.sequence}, which can have {most}")


def _check_tree(op: Forward) -> None:
    """Raises BadTree."""
    if len(op.parents) != len(op.token_ids) - 1 or len(op.token_ids) > MAX_TREE_TOKENS:
        raise BadTree(f"{len(op.parents)} parents of {len(op.token_ids)} tokens")
    if any(not 0 <= parent <= index for index, parent in enumerate(op.parents)):
        raise BadTree(f"a token follows one behind it: {list(op.parents)}")


def _capabilities(name: str, model: ModelDescription, engine: Engine) -> Capabilities:
    kv = engine.kv
    return Capabilities(
        executor=name,
        runner=engine.runner.name,
        kernels=active_kernels(kv.dtype, kv.device),
        device=str(kv.device),
        # A model that runs one text at a time, in code of its own, is also the one that takes no trees.
        supports_native_unified_decode=engine.takes_trees,
        supports_verify=True,
        supports_fork=True,
        supports_sampling=True,
        supports_prefix_reuse=True,
        supports_lora=False,
        page_size_tokens=kv.page_size,
        bytes_per_page=kv.bytes_per_page,
        kv_capacity_tokens=min(model.max_seq_len, kv.num_pages * kv.page_size),
        max_lora_adapters=0,
        supports_token_trees=engine.takes_trees,
        supports_hidden_states=engine.runner.has_hidden_states,
    )
