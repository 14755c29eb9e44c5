"""Quire on a GPU: single kernels, and models with the executor and its graph runner.

A decode step is measured in three ways. With the host in the loop it is a call of `batch_decode`: pages,
packing, launch, reading the tokens. Launched ahead, the same is done for the next step before the tokens are
read, as the step loop does. Device-fed, the graph is replayed on the tokens that it chose itself: what the
device alone needs. What lies between is the host's.
"""

from __future__ import annotations

import gc
import os

import torch

from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.timing import Timer, wall_ns
from benchmarks.peers.base import Peer, PeerConfig, Sample, prompts, timed_steps

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

from benchmarks.gpu.kernels import PAGE_SIZE, KernelBench
from benchmarks.gpu.model import Bench, make_bench
from benchmarks.gpu.profile import profiled
from benchmarks.gpu.requests import serve
from workers.decodes import POSITION, Decodes
from workers.operations import GREEDY, Forward, Kind

# A turn stays within the page that its first step starts, because the graph's page tables have no more.
_STEPS = PAGE_SIZE - 1
_COPY_BYTES = 8 << 30
_MATMUL_SIZE = 8192
_REPEATS = 20


class DevicePeer(Peer):
    """One model at a time."""

    def __init__(self, config: PeerConfig) -> None:
        self._rehearsal = config.rehearsal
        self._device = torch.device("cpu" if config.rehearsal else "cuda:0")
        self._dtype = torch.float32 if config.rehearsal else torch.bfloat16
        self._timer = Timer(self._device, 1 if config.rehearsal else _REPEATS)
        self._bench: Bench | None = None
        self._context_tokens = 0
        self._loaded, self._peaks = "kernels", dict[str, int]()

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, "cuda": str(torch.version.cuda)}

    def roof(self) -> dict[str, float]:
        """Bytes per second of a large copy (read and written), and FLOP/s of a square product."""
        copy_bytes, size = (1 << 16, 32) if self._rehearsal else (_COPY_BYTES, _MATMUL_SIZE)
        source = torch.ones(copy_bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        copy_ns = self._timer.kernel(lambda: target.copy_(source))
        # Random: on zeros the device draws less power and runs faster.
        left, right = (torch.randn(size, size, dtype=self._dtype, device=self._device) for _ in range(2))
        out = torch.empty_like(left)
        product_ns = self._timer.kernel(lambda: torch.mm(left, right, out=out))
        rates = {"bytes_per_s": (2 * copy_bytes, copy_ns), "flops_per_s": (2 * size**3, product_ns)}
        return {name: amount * 1e9 / sorted(ns)[len(ns) // 2] for name, (amount, ns) in rates.items()}

    def kernel(self, name: str, shape_name: str, size: list[int]) -> Sample:
        """One of `KernelBench`, each time with a cold cache."""
        call = getattr(KernelBench(SHAPES[shape_name], self._dtype, self._device), name)(*size)
        return Sample(self._timer.kernel(call.run), bytes_read=call.bytes_moved, flops=call.flops)

    def load(self, shape_name: str, batch: int, context_tokens: int, prompt_tokens: int) -> None:
        """Loads a model with `batch` prefilled-looking sequences, and space for the tokens of turns."""
        pool_tokens = batch * (context_tokens + 2 * PAGE_SIZE) + prompt_tokens + PAGE_SIZE
        self._bench = make_bench(SHAPES[shape_name], pool_tokens, batch, rehearsal=self._rehearsal)
        self._bench.fill(batch, context_tokens)
        self._context_tokens, self._loaded = context_tokens, f"{shape_name}, {batch} sequences"

    def decode(self, batch: int, fed: bool = False) -> Sample:
        """Decode steps of the first `batch` sequences, which are then truncated to their old lengths."""
        assert self._bench is not None
        executor, runner = self._bench.executor, self._bench.runner
        tokens = list(range(batch))

        def step() -> None:
            outputs = executor.batch_decode([(key, token, GREEDY) for key, token in enumerate(tokens)])
            tokens[:] = [output.token_id for output in outputs]

        if fed:
            step()
            ns = [self._timer.once(lambda: runner.replay_last(_STEPS)) // _STEPS]
        else:
            ns = timed_steps(step, _STEPS)
        for key in range(batch):
            executor.truncate_kv(key, self._context_tokens)
        return Sample(ns, batch)

    def decode_ahead(self, batch: int) -> Sample:
        """As `decode`, with each step launched before the tokens of the last one are read."""
        assert self._bench is not None
        engine, position = self._bench.executor.engine, self._context_tokens
        decodes = Decodes.of(
            [Forward(key + 1, key, position, [key], kind=Kind.DECODE) for key in range(batch)]
        )
        assert all(engine.begin_decodes(decodes))
        step = engine.launch(decodes)

        def advance() -> None:
            nonlocal step
            assert step is not None
            columns = step.decodes.columns.copy()
            columns[POSITION] += 1
            following = engine.launch(Decodes(columns, step.decodes.outputs), after=step)
            engine.finish(step, following)
            step = following

        ns = timed_steps(advance, _STEPS)
        assert step is not None
        engine.finish(step)
        for key in range(batch):
            self._bench.executor.truncate_kv(key, self._context_tokens)
        return Sample(ns, batch)

    def profile(self, batch: int) -> Sample:
        """A replayed step: what takes its time on the device, by kernel, and for how long nothing runs."""
        assert self._bench is not None
        executor, runner = self._bench.executor, self._bench.runner
        executor.batch_decode([(key, key, GREEDY) for key in range(batch)])
        sample = profiled(lambda: runner.replay_last(_STEPS), _STEPS, self._device)
        for key in range(batch):
            executor.truncate_kv(key, self._context_tokens)
        sample.tokens = batch
        return sample

    def mixed(self, batch: int, tokens: int, seed: int) -> Sample:
        """A step of `batch` decodes and a chunk of a new prompt."""
        assert self._bench is not None
        executor, chunk = self._bench.executor, -1
        (prompt,) = prompts(self._bench.shape.vocab_size, 1, tokens, seed)
        items = [(key, [key], 1, GREEDY) for key in range(batch)]
        ns = wall_ns(lambda: executor.unified_decode([*items, (chunk, prompt, 1, GREEDY)]), self._device)
        executor.release_cache(chunk)
        for key in range(batch):
            executor.truncate_kv(key, self._context_tokens)
        return Sample([ns], batch + tokens)

    def prefill(self, tokens: int, seed: int) -> Sample:
        """Prefill of one prompt, each time a new one, so that nothing is in the prefix cache."""
        assert self._bench is not None
        executor, key = self._bench.executor, -1
        (prompt,) = prompts(self._bench.shape.vocab_size, 1, tokens, seed)
        ns = wall_ns(lambda: executor.prefill(key, prompt), self._device)
        executor.release_cache(key)
        return Sample([ns], tokens)

    def serve(self, count: int, low: int, high: int, step_tokens: int) -> Sample:
        """Many requests at once: tokens are those of the outputs."""
        assert self._bench is not None
        for key in range(count):
            self._bench.executor.release_cache(key)
        self._bench.executor.warmup()  # captures the graphs
        return serve(self._bench, count, low, high, step_tokens)

    def release(self) -> None:
        self._bench = None
        gc.collect()
        if self._device.type == "cuda":
            self._peaks[f"on the device, {self._loaded}"] = torch.cuda.max_memory_allocated()
            self._loaded = "kernels"
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.empty_cache()

    def memory(self) -> dict[str, int]:
        return self._peaks
