"""What a model answers if nobody disturbs it: computed in this process, without a server.

So tests compare a server's tokens with the truth, and not with those of a server that makes the same mistake.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from benchmarks.in_process import InProcess, LlmExecutor, PagedAttentionExecutor
from service.model_names import SHIPPED_MODEL, WEIGHTLESS_MODEL, shipped_model_dir
from workers.outputs import OutputSpec, RowOutput

_PAGES = 256
_GREEDY = OutputSpec()


@functools.cache
def _executor(model: str) -> InProcess:
    if model == WEIGHTLESS_MODEL:
        return PagedAttentionExecutor.create(kv_pages=_PAGES)
    return LlmExecutor.load(shipped_model_dir() if model == SHIPPED_MODEL else Path(model), kv_pages=_PAGES)


def outputs(
    prompt: Sequence[int],
    tokens: Sequence[int],
    output: OutputSpec = _GREEDY,
    *,
    model: str = WEIGHTLESS_MODEL,
) -> list[RowOutput]:
    """Of a prefill of the prompt, and of a decode of each of the tokens."""
    executor = _executor(model)
    found = [executor.prefill(1, prompt, output)]
    found += [executor.decode(1, token, output) for token in tokens]
    executor.release_cache(1)
    return found


def greedy(prompt: Sequence[int], count: int, *, model: str = WEIGHTLESS_MODEL) -> list[int]:
    """The next `count` tokens, each of which is the likeliest after those before it."""
    executor = _executor(model)
    found = [executor.prefill(1, prompt).token_id]
    while len(found) < count:
        found.append(executor.decode(1, found[-1]).token_id)
    executor.release_cache(1)
    return found
