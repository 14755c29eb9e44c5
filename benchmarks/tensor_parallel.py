"""A model split over ranks on this CPU, beside one process: `python -m benchmarks.tensor_parallel`.

Both have the same number of threads in all, and their turns alternate. Before that, how long ranks take to
add up a tensor. Numbers are those of docs/reports/performance.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.in_process import LlmExecutor
from benchmarks.shapes import DEFAULT_SHAPE, SHAPES
from benchmarks.weights import make_model
from kernels.cpu import library
from workers.operations import OutputSpec
from workers.runners.collectives import Collectives
from workers.runners.rank_processes import RankProcesses
from workers.runners.tensor_parallel import RankGroup

_PROMPT_TOKENS, _STEPS = 512, 8
_SUMS = 2000
_GREEDY = OutputSpec()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor_parallel", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default=DEFAULT_SHAPE)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of all ranks together")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="turns of each")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "quire-benchmarks")
    options = parser.parse_args()
    print(f"{machine.describe()}\n{library.kernel_name()}, {options.ranks} ranks, {options.threads} threads")
    _measure_sums(options.ranks)
    directory = make_model(SHAPES[options.shape], options.cache_dir)
    group = RankGroup(RankProcesses(options.ranks, [], lambda: os._exit(1)))
    threads = {"one process": options.threads, "ranks": max(1, options.threads // options.ranks)}
    executors: dict[str, LlmExecutor] = {}
    for name, ranks in (("ranks", group), ("one process", None)):
        torch.set_num_threads(threads[name])
        executors[name] = LlmExecutor.load(directory, kv_pages=2048, self_check=False, ranks=ranks)
    rates: dict[str, dict[str, list[float]]] = {}
    for turn in range(options.rounds + 1):
        for name, executor in executors.items():
            torch.set_num_threads(threads[name])
            for what, rate in _rates(executor, turn).items():
                found = rates.setdefault(what, {}).setdefault(name, [])
                found += [rate] if turn else []
    for what, by_name in rates.items():
        for name, found in by_name.items():
            print(f"{what:12} {name:12} {statistics.median(found):8.1f} tokens/s, at most {max(found):8.1f}")
    group.close()


def _rates(executor: LlmExecutor, turn: int) -> dict[str, float]:
    """Tokens per second of a prefill, and of decode steps of some sequences."""
    # Other tokens in each turn, so that no prefix is reused.
    prompt = [(turn * 7919 + index * 31) % 50_000 for index in range(_PROMPT_TOKENS)]
    rates = {"prefill": _PROMPT_TOKENS / _s(lambda: executor.prefill(0, prompt))}
    executor.release_cache(0)
    for batch in (1, 8, 32):
        for key in range(batch):
            executor.prefill(key, prompt[key : key + 128])
        items = [(key, 1 + key, _GREEDY) for key in range(batch)]
        executor.batch_decode(items)
        taken = statistics.median(_s(lambda: executor.batch_decode(items)) for _ in range(_STEPS))  # noqa: B023
        rates[f"decode {batch}"] = batch / taken
        for key in range(batch):
            executor.release_cache(key)
    return rates


def _s(function: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    function()
    return time.perf_counter() - began_s


def _measure_sums(ranks: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        context = multiprocessing.get_context("spawn")
        others = [context.Process(target=_sums, args=(rank, ranks, place)) for rank in range(1, ranks)]
        for other in others:
            other.start()
        _sums(0, ranks, place)
        for other in others:
            other.join()


def _sums(rank: int, ranks: int, place: str) -> None:
    torch.set_num_threads(1)
    group = Collectives(rank, ranks)
    group.connect(Path(place) / "store", torch.device("cpu"))
    for kib in (2, 64):
        x = torch.ones(kib << 9, dtype=torch.bfloat16)
        taken = sorted(_s(lambda: group.sum(x)) * 1e6 for _ in range(_SUMS))  # noqa: B023
        if rank == 0:
            half, most = taken[_SUMS // 2], taken[_SUMS * 99 // 100]
            print(f"a sum of {kib} KiB: median {half:.0f} us, least {taken[0]:.0f} us, p99 {most:.0f} us")


if __name__ == "__main__":
    main()
