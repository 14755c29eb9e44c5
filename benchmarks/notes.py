"""Explanations of the figures in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.machine import MAX_OTHERS_SHARE, MAX_STEAL_SHARE
from benchmarks.results import WorkloadResult

_ALWAYS = """
The load generator is a process of its own on the same machine: with few cores it takes CPU time from the \
gateway and the worker, which counts against the service.
Weights are bfloat16, or what a row names: then both read one GGUF file that llama.cpp's quantiser made.
The KV is bfloat16, except in llama.cpp, whose default is float16.
Decode figures exclude the first step of each turn, when the CPU's caches hold a competitor's data.
Quire's sequences have prompts of their own and share no pages. transformers and llama.cpp get copies of one \
prompt's KV, to save time; there too each sequence has memory of its own.
Bytes per second are the least that a step must read, weights and KV, over its time; FLOP/s likewise.
Independent callers: the mean time of one token for each of them, while all were busy.
Quire's executor prefills a batch in one forward, its worker in steps of 512 tokens.
"Session, 32 callers" are 32 streams with one sequence each; "one Session of 32" is one stream with 32.
A worker's memory includes Python and torch, 250 MB.
Batch: the mean number of sequences in a step of the worker, during the turns.
The echo server answers with the gateway's own bytes, and parses nothing.
"""


def notes(disturbance: Mapping[str, float], workloads: Sequence[WorkloadResult]) -> list[str]:
    """The notes of a result."""
    found = _ALWAYS.strip().splitlines() + _disagreements(workloads)
    if not disturbance:
        return [*found, "THE RUN WAS NOT FINISHED."]
    others, steal = disturbance["others_share"], disturbance["steal_share"]
    found.append(f"During the run others took {others:.1%} of the machine, and its host {steal:.1%}.")
    if others > MAX_OTHERS_SHARE or steal > MAX_STEAL_SHARE:
        found.append("THE MACHINE WAS NOT QUIET: these figures are not to be relied on.")
    return found


def _disagreements(workloads: Sequence[WorkloadResult]) -> list[str]:
    """Whether the competitors chose the same first tokens after the same prompt."""
    found, compared = [], 0
    for workload in workloads:
        chosen = {f["label"]: f["first_tokens"] for f in workload["figures"] if "first_tokens" in f}
        compared += bool(chosen)
        if len({tuple(tokens) for tokens in chosen.values()}) > 1:
            listed = "; ".join(f"{label}: {tokens}" for label, tokens in chosen.items())
            found.append(
                f"First tokens differ in {workload['name']} ({listed}): rounding can tip a close choice."
            )
    agreed = f"{compared - len(found)} of {compared} decode workloads"
    return [f"All competitors chose the same first tokens in {agreed}.", *found] if compared else []
