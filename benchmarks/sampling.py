"""What choosing tokens costs on the CPU: `python -m benchmarks.sampling [--rows 64] [--vocabulary 151936]`.

Rows of random logits, each with settings of its own sequence. A case is a step's calls of the engine: choose
tokens, apply drafts, build outputs, and log-probabilities of drawn tokens. Prints JSON: milliseconds
of CPU time for each row, the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from workers.distribution import apply_drafts, sampled_logprobs
from workers.operations import DraftProbabilities, OutputSpec, Sampling, TokenMask
from workers.row_outputs import build_outputs, score_tokens
from workers.sampling import Draft, SamplingRow, choose_tokens

_HISTORY_TOKENS = 2048
_DRAFTED_TOKENS = 64
_PLAIN = Sampling(temperature=1.0)
_CUT = Sampling(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02)
_PENALTIES = Sampling(0.8, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.2, logit_bias={7: 2.0})
_SAMPLED = OutputSpec(sampled_logprob=True)
_EVERYTHING = OutputSpec(top_logprobs=5, sampled_logprob=True)

Make = Callable[[np.random.Generator, int, int], SamplingRow]


def _rows(spec: Sampling, *, masked: bool = False, drafted: int | None = None) -> Make:
    """`drafted`: a draft from a distribution over so many tokens; 0: over all."""

    def make(rng: np.random.Generator, vocab: int, index: int) -> SamplingRow:
        draft = None
        if drafted is not None:
            ids = np.sort(rng.choice(vocab, drafted, replace=False)) if drafted else None
            weights = rng.random(drafted or vocab)
            token = int(rng.integers(vocab)) if ids is None else int(ids[0])
            draft = Draft([token], DraftProbabilities(ids, weights / weights.sum()))
        mask = TokenMask(packed=rng.bytes(-(-vocab // 32) * 4)) if masked else None
        history = rng.integers(0, vocab, _HISTORY_TOKENS) if spec.has_penalty else ()
        return SamplingRow(spec, mask, position=index, history=history, draft=draft)

    return make


# By name: how a row is made from a generator, the vocabulary and its index, and what is wanted of it.
CASES: Mapping[str, tuple[Make, OutputSpec]] = {
    "greedy, sampled_logprob": (lambda *_: SamplingRow(), _SAMPLED),
    "plain draw": (_rows(_PLAIN), OutputSpec()),
    "plain draw, sampled_logprob": (_rows(_PLAIN), _SAMPLED),
    "top_p": (_rows(Sampling(0.8, top_p=0.95)), OutputSpec()),
    "top_p at temperature 5": (_rows(Sampling(5.0, top_p=0.95)), OutputSpec()),
    "top_k, top_p, min_p": (_rows(_CUT), OutputSpec()),
    "top_k, top_p, min_p, sampled_logprob": (_rows(_CUT), _SAMPLED),
    "mask": (_rows(_PLAIN, masked=True), OutputSpec()),
    "penalties, top_p, sampled_logprob": (_rows(_PENALTIES), _SAMPLED),
    "everything": (_rows(_PENALTIES, masked=True), _EVERYTHING),
    "logprob": (lambda *_: SamplingRow(), OutputSpec(logprob=True)),
    "top_logprobs 5": (lambda *_: SamplingRow(), OutputSpec(top_logprobs=5)),
    "logprob_token_ids": (lambda *_: SamplingRow(), OutputSpec(logprob_token_ids=[1, 2, 3, 4])),
    "draft of few tokens": (_rows(_PLAIN, drafted=_DRAFTED_TOKENS), _SAMPLED),
    "draft of all tokens": (_rows(_PLAIN, drafted=0), _SAMPLED),
}  # fmt: skip


def step(logits: torch.Tensor, rows: list[SamplingRow], specs: list[OutputSpec]) -> None:
    """What the engine does with the logits of a step."""
    chosen = apply_drafts(logits, choose_tokens(logits, rows), rows)
    tokens = [output.token_id for output in build_outputs(logits, chosen, specs)]
    sampled_logprobs(logits, tokens, rows, specs)


def _median_ms(run: Callable[[], object], rounds: int) -> float:
    times_ns = []
    for _ in range(rounds):
        began_ns = time.process_time_ns()
        run()
        times_ns.append(time.process_time_ns() - began_ns)
    return statistics.median(times_ns) / 1e6


def main() -> None:
    """Runs the command line and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rng, count = np.random.default_rng(0), options.rows
    logits = torch.randn(count, options.vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    before, found = machine.times_s(), dict[str, Any]()
    for name, (make, spec) in CASES.items():
        rows = [make(rng, options.vocabulary, index) for index in range(count)]
        run_ms = _median_ms(lambda rows=rows, spec=spec: step(logits, rows, [spec] * count), options.rounds)  # type: ignore[misc]
        found[name] = round(run_ms / count, 3)
    targets = torch.zeros(count, dtype=torch.int64)
    found["score"] = round(_median_ms(lambda: score_tokens(logits, targets), options.rounds) / count, 3)
    result = {"machine": machine.describe(), "options": vars(options), "ms_per_row": found}
    print(json.dumps(result | {"disturbance": machine.disturbance(before, machine.times_s())}, indent=2))


if __name__ == "__main__":
    main()
