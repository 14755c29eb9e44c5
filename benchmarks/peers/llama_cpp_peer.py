"""llama.cpp through llama-cpp-python's C interface: float16 KV, batches over sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.base import Peer, PeerConfig, Sample, optional, prompts, timed, timed_steps

# Space for the tokens of a turn. llama.cpp gives each sequence an equal part of the context.
_SLACK_TOKENS = 128


class LlamaCppPeer(Peer):
    """One llama.cpp context for each workload, of the size it needs. Everything else is left at its default.

    Raises Unavailable without the packages of the extra `bench`.
    """

    def __init__(self, config: PeerConfig) -> None:
        self._llama = optional("llama_cpp")
        self._shape, self._threads = config.shape, config.threads
        path = config.gguf_file()
        # What a step reads is known by the file only if that is quantised.
        self._file_bytes = path.stat().st_size if config.quantised else 0
        self._most_kv_bytes = 0
        self._llama.llama_backend_init()
        self._model = self._llama.llama_model_load_from_file(
            str(path).encode(), self._llama.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}; its log says why")
        self._context: Any = None
        self._batch: Any = None
        self._context_tokens = 0
        self._first: list[int] = []
        self._next: list[int] = []

    def versions(self) -> dict[str, str]:
        found = self._llama.llama_print_system_info().decode()
        return {"llama-cpp-python": self._llama.__version__, "llama.cpp": found.strip()}

    def prepare_decode(self, batch: int, context_tokens: int) -> list[int]:
        self._open(batch, context_tokens + _SLACK_TOKENS)
        self._context_tokens = context_tokens
        # One prompt for all, prefilled once and copied. Each sequence still has its own memory.
        prompt = prompts(self._shape.vocab_size, batch, context_tokens)[0]
        self._first = self._forward([prompt], 0) * batch
        memory = self._llama.llama_get_memory(self._context)
        for sequence in range(1, batch):
            self._llama.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        self._next, self._position = self._first, context_tokens
        self._step()
        tokens = [self._first[0], self._next[0]]
        self._reset()
        return tokens

    def decode(self, steps: int) -> Sample:
        if steps >= _SLACK_TOKENS:
            raise ValueError(f"{steps} steps do not fit in {_SLACK_TOKENS} tokens")
        ns = timed_steps(self._step, steps)
        self._reset()
        found = Sample(ns, len(self._first))
        if self._file_bytes:
            found.bytes_read = self._file_bytes + self._shape.kv_bytes(
                len(self._first) * self._context_tokens
            )
        return found

    def prepare_prefill(self, batch: int, prompt_tokens: int) -> None:
        self._open(batch, prompt_tokens)

    def prefill(self, batch: int, prompt_tokens: int, seed: int) -> Sample:
        token_ids = prompts(self._shape.vocab_size, batch, prompt_tokens, seed)
        ns = timed(lambda: self._forward(token_ids, 0))
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), False)
        return Sample([ns], batch * prompt_tokens)

    def held(self) -> dict[str, int]:
        return {"": self._file_bytes + self._most_kv_bytes} if self._file_bytes else {}

    def release(self) -> None:
        if self._context is not None:
            self._llama.llama_batch_free(self._batch)
            self._llama.llama_free(self._context)
            self._context = None

    def close(self) -> None:
        self.release()
        self._llama.llama_model_free(self._model)

    def _open(self, batch: int, tokens: int) -> None:
        """A context for `batch` sequences of `tokens` each."""
        self.release()
        params = self._llama.llama_context_default_params()
        params.n_ctx = batch * tokens
        params.n_seq_max = batch
        # The maximum tokens of one call, which it processes in smaller parts of the default size.
        params.n_batch = batch * tokens
        params.n_threads = params.n_threads_batch = self._threads
        params.no_perf = True
        self._context = self._llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context; its log says why")
        self._batch = self._llama.llama_batch_init(batch * tokens, 0, 1)
        self._most_kv_bytes = max(self._most_kv_bytes, self._shape.kv_bytes(batch * tokens))

    def _forward(self, token_ids: list[list[int]], position: int) -> list[int]:
        """Appends tokens to the first sequences at `position`. Returns the most likely next token of each."""
        batch, count = self._batch, 0
        for sequence, tokens in enumerate(token_ids):
            for offset, token in enumerate(tokens):
                batch.token[count] = token
                batch.pos[count] = position + offset
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = sequence
                batch.logits[count] = offset == len(tokens) - 1
                count += 1
        batch.n_tokens = count
        status = self._llama.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode says {status}")
        logits = np.ctypeslib.as_array(
            self._llama.llama_get_logits(self._context), (len(token_ids), self._shape.vocab_size)
        )
        chosen: NDArray[np.intp] = logits.argmax(-1)
        return [int(token) for token in chosen]

    def _step(self) -> None:
        self._next = self._forward([[token] for token in self._next], self._position)
        self._position += 1

    def _reset(self) -> None:
        memory = self._llama.llama_get_memory(self._context)
        for sequence in range(len(self._first)):
            self._llama.llama_memory_seq_rm(memory, sequence, self._context_tokens, -1)
        self._next, self._position = self._first, self._context_tokens
