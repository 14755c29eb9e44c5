"""Quire on a GPU: single kernels, and models with the executor and its graph runner.

A decode step is measured in four ways. With the host in the loop it is a call of `batch_decode`: pages,
packing, launch, reading the tokens. Launched ahead, the same is done for the next step before the tokens are
read. Through the step loop, as a worker does it, commands come from another thread. Device-fed, the graph is
replayed on the tokens that it chose itself: what the device alone needs. What lies between is the host's.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
import threading
from typing import Any

import torch

from benchmarks import machine
from benchmarks.gpu.interpreted import convert_scalars
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.timing import Timer, wall_ns
from benchmarks.peers.base import Peer, PeerConfig, Sample, Unavailable, prompts, timed, timed_steps
from benchmarks.weights import make_model

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    convert_scalars()

from benchmarks.gpu.kernels import PAGE_SIZE, KernelBench, attention_tiles
from benchmarks.gpu.loop import Caller, LoopOnThread, packed_mask
from benchmarks.gpu.model import Bench, make_bench
from benchmarks.gpu.profile import profiled
from benchmarks.gpu.requests import serve
from benchmarks.gpu.static_peer import StaticPeer
from benchmarks.in_process import LlmExecutor
from workers.common.worker_pb2 import AbortCommand, WorkerCommand
from workers.decodes import Column, Decodes
from workers.executors import launched_steps
from workers.operations import Chunk, Forward, Kind
from workers.outputs import GREEDY, OutputSpec, Sampling, TokenMask
from workers.runners.rank_processes import RankProcesses
from workers.runners.tensor_parallel import RankGroup

# A turn stays within the page that its first step starts, because the graph's page tables have no more.
_STEPS = PAGE_SIZE - 1
# Each takes a second of the interpreter.
_REHEARSED_STEPS = 4
_STEP_TOKENS = 8192
_COPY_BYTES = 8 << 30
_MATMUL_SIZE = 8192
_REPEATS = 20
# Of a model that is split over ranks, whose weights are written to disk.
_RANKED_LAYERS = 4


class DevicePeer(Peer):
    """One model at a time."""

    def __init__(self, config: PeerConfig) -> None:
        self._config, self._rehearsal = config, config.rehearsal
        self._steps = _REHEARSED_STEPS if config.rehearsal else _STEPS
        self._device = torch.device("cpu" if config.rehearsal else "cuda:0")
        self._dtype = torch.float32 if config.rehearsal else torch.bfloat16
        self._timer = Timer(self._device, 1 if config.rehearsal else _REPEATS)
        self._bench: Bench | None = None
        self._peer: StaticPeer | None = None
        self._context_tokens = self._batch = 0

    def describe(self, commit: str | None) -> dict[str, Any]:
        """The machine and its device; see `machine.describe`."""
        return machine.describe(commit, gpu=True)

    def roof(self) -> dict[str, float]:
        """What the device itself reads, copies (counting both ways) and multiplies in a second."""
        found = self._roof()
        self.release()  # for tests in other processes
        return found

    def _roof(self) -> dict[str, float]:
        copy_bytes, size = (1 << 16, 32) if self._rehearsal else (_COPY_BYTES, _MATMUL_SIZE)
        source = torch.ones(copy_bytes // 4, device=self._device)
        target = torch.empty_like(source)
        # Random: on zeros the device draws less power and runs faster.
        left, right = (torch.randn(size, size, dtype=self._dtype, device=self._device) for _ in range(2))
        out = torch.empty_like(left)
        taken = {
            "read": (copy_bytes, self._timer.kernel(lambda: torch.sum(source))),
            "copied": (2 * copy_bytes, self._timer.kernel(lambda: target.copy_(source))),
            "flops": (2 * size**3, self._timer.kernel(lambda: torch.mm(left, right, out=out))),
        }
        return {name: amount * 1e9 / sorted(ns)[len(ns) // 2] for name, (amount, ns) in taken.items()}

    def precompile(
        self, shape_name: str, batch: int, context_tokens: int, quantization: str = ""
    ) -> dict[str, Any]:
        """Compiles what a worker with this model launches: see `benchmarks.gpu.precompiled`."""
        sizes = (shape_name, str(batch), str(context_tokens), str(int(self._rehearsal)), quantization)
        command = [sys.executable, "-m", "benchmarks.gpu.precompiled", *sizes]
        # Another process, since daemons such as this one may not have children of multiprocessing.
        compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run(command, stdout=subprocess.PIPE, env=compiling, check=True)  # noqa: S603
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def kernel(self, kernel: str, shape_name: str, size: list[int]) -> Sample:
        """One of `KernelBench`, each time with a cold cache."""
        call = getattr(KernelBench(SHAPES[shape_name], self._dtype, self._device), kernel)(*size)
        return Sample(self._timer.kernel(call.run), bytes_read=call.bytes_moved, flops=call.flops)

    def attention_tiles(self, kernel: str, shape_name: str) -> list[str]:
        """Those that `attention_with` can try, by number; the first are in use."""
        bench = KernelBench(SHAPES[shape_name], self._dtype, self._device)
        return [
            f"{tiles.block_m} rows, {tiles.tile} keys, {tiles.num_warps} warps, {tiles.num_stages} stages"
            for tiles in bench.tiles_of(kernel)
        ]

    def attention_with(self, kernel: str, shape_name: str, way: int, size: list[int]) -> Sample:
        """As `kernel`, for "decode" or "prefill" attention with tiles of that number."""
        bench = KernelBench(SHAPES[shape_name], self._dtype, self._device)
        with attention_tiles(kernel, bench.tiles_of(kernel)[way]):
            return self.kernel(f"{kernel}_attention", shape_name, size)

    def chosen_tiles(self) -> dict[str, str]:
        """What the warm-up has chosen for products of few rows, by place and number of rows."""
        tiles = self._loaded().decoder.tiles
        return {
            f"{place} {rows}": f"{way or 'separate'} {share:.2f}"
            for (place, rows), (way, share) in ({} if tiles is None else tiles.chosen).items()
        }

    def load(
        self,
        shape_name: str,
        batch: int,
        context_tokens: int,
        prompt_tokens: int,
        adapters: int = 0,
        batch_invariant: bool = False,
        quantization: str | None = None,
    ) -> None:
        """Loads a model with `batch` prefilled-looking sequences, and space for the tokens of turns."""
        self.release()
        pool_tokens = batch * (context_tokens + 2 * PAGE_SIZE) + prompt_tokens + PAGE_SIZE
        self._bench = make_bench(
            SHAPES[shape_name],
            pool_tokens,
            batch,
            rehearsal=self._rehearsal,
            adapters=adapters,
            batch_invariant=batch_invariant,
            quantization=quantization,
        )
        self._bench.fill(batch, context_tokens)
        self._context_tokens, self._batch = context_tokens, batch

    def warm(self) -> dict[str, float]:
        """What a worker does before it serves: compiles and captures. Returns how far that went."""
        bench = self._loaded()
        for key in range(self._batch):
            bench.executor.release_cache(key)
        bench.executor.warmup()
        bench.fill(self._batch, self._context_tokens)
        gib = torch.cuda.memory_reserved() / 2**30 if self._device.type == "cuda" else 0.0
        return {"graphs": float(bench.runner.name == "cuda_graph"), "GiB": gib}

    def decode(self, batch: int, fed: bool = False) -> Sample:
        """Decode steps of the first `batch` sequences, which then have their old lengths."""
        bench = self._loaded()
        executor, runner = bench.executor, bench.runner
        tokens = list(range(batch))

        def step() -> None:
            outputs = executor.batch_decode([(key, token, GREEDY) for key, token in enumerate(tokens)])
            tokens[:] = [output.token_id for output in outputs]

        if fed:
            step()
            ns = [self._timer.once(lambda: runner.replay_last(self._steps)) // self._steps]
        else:
            ns = timed_steps(step, self._steps)
        self._truncate(batch)
        return Sample(ns, batch)

    def decode_ahead(self, batch: int) -> Sample:
        """As `decode`, with each step launched before the tokens of the last one are read."""
        engine, position = self._loaded().executor.engine, self._context_tokens
        decodes = Decodes.of(
            [Forward(key + 1, key, position, [key], kind=Kind.DECODE) for key in range(batch)]
        )
        assert all(engine.begin_decodes(decodes))
        step = launched_steps.launch(engine, decodes)

        def advance() -> None:
            nonlocal step
            assert step is not None
            columns = step.decodes.columns.copy()
            columns[Column.POSITION] += 1
            following = launched_steps.launch_after(engine, step, Decodes(columns, step.decodes.outputs))
            launched_steps.finish(engine, step, following)
            step = following

        ns = timed_steps(advance, self._steps)
        assert step is not None
        launched_steps.finish(engine, step)
        self._truncate(batch)
        return Sample(ns, batch)

    def decode_in_loop(self, batch: int, kind: str = "greedy") -> Sample:
        """Through the step loop, whose tokens are asked for again; `kind`: see `_output`.

        The time is that of all steps: one that is computed ahead is answered at once.
        """
        bench, sequences, output = self._loaded(), range(batch), self._output(kind)
        engine, most = bench.executor.engine, bench.shape.max_position_embeddings
        tokens, position = list(sequences), self._context_tokens
        with LoopOnThread(engine, max_items=batch, max_tokens=_STEP_TOKENS, max_seq_tokens=most) as loop:

            def step() -> None:
                nonlocal position
                tokens[:] = loop.decode(sequences, [position] * batch, tokens, output)
                position += 1

            def all_steps() -> None:
                for _ in range(steps):
                    step()

            step()
            steps = self._steps - 2  # one more is computed ahead
            ns = timed(all_steps) // steps
        self._truncate(batch)
        return Sample([ns], batch)

    def decode_beside_masks(self, batch: int, masked: int) -> Sample:
        """Through the step loop, each caller for itself: the last `masked` have a new mask for each token.

        The time is that of the others' steps, with which these tokens are counted.
        """
        bench, position = self._loaded(), self._context_tokens
        vocab, most = bench.shape.vocab_size, bench.shape.max_position_embeddings
        masks = [OutputSpec(mask=TokenMask(packed=packed_mask(vocab, every))) for every in (2, 3, 5)]
        callers = [
            Caller(key, position, key, (GREEDY,) if key < batch - masked else masks) for key in range(batch)
        ]
        with LoopOnThread(
            bench.executor.engine, max_items=batch, max_tokens=_STEP_TOKENS, max_seq_tokens=most
        ) as loop:
            loop.keep_asking(callers, 1)
            before, steps = sum(caller.position for caller in callers), self._steps - 3
            ns = timed(lambda: loop.keep_asking(callers, steps)) // steps
        tokens = sum(caller.position for caller in callers) - before
        self._truncate(batch)
        return Sample([ns], tokens // steps)

    def decode_on_ranks(self, shape_name: str, ranks: int, batch: int) -> Sample:
        """A model of a few layers over so many GPUs, through the step loop; in a rehearsal over CPUs."""
        if not self._rehearsal and torch.cuda.device_count() < ranks:
            raise Unavailable(f"{torch.cuda.device_count()} of {ranks} GPUs")
        self.release()
        shape = SHAPES[shape_name]
        few = dataclasses.replace(
            shape, name=f"{shape.name}-few", num_hidden_layers=min(_RANKED_LAYERS, shape.num_hidden_layers)
        )
        directory, ended = make_model(few, self._config.cache), threading.Event()
        group = RankGroup(RankProcesses(ranks, [], ended.set))
        try:
            executor = LlmExecutor.load(
                directory, device=str(self._device), kv_pages=4 * batch, self_check=False, ranks=group
            )
            callers = [Caller(key, 0, key, (GREEDY,)) for key in range(batch)]
            with LoopOnThread(
                executor.engine, max_items=batch, max_tokens=_STEP_TOKENS, max_seq_tokens=4 * PAGE_SIZE
            ) as loop:
                prompts_of = [Forward(loop.op_id(), key, 0, [key, key], prompt_len=2) for key in range(batch)]
                loop.ask(prompts_of)
                for caller in callers:
                    caller.position = 2
                loop.keep_asking(callers, 3)
                steps = PAGE_SIZE
                ns = timed(lambda: loop.keep_asking(callers, steps)) // steps
        finally:
            group.close()
        return Sample([ns], batch)

    def _output(self, kind: str) -> OutputSpec:
        """greedy, top_p, penalties, mask, or logprobs."""
        return {
            "greedy": GREEDY,
            "top_p": OutputSpec(sampling=Sampling(temperature=0.8, top_p=0.9, seed=1)),
            "penalties": OutputSpec(sampling=Sampling(temperature=0.8, repetition_penalty=1.1, seed=1)),
            "mask": OutputSpec(mask=TokenMask(packed=packed_mask(self._loaded().shape.vocab_size, 3))),
            "logprobs": OutputSpec(top_logprobs=5),
        }[kind]

    def decode_adapted(self, batch: int, adapters: int) -> Sample:
        """As `decode`, row r with adapter r modulo `adapters`; 0: none, as the same objects."""
        executor = self._loaded().executor
        engine, position, tokens = executor.engine, self._context_tokens, list(range(batch))

        def step() -> None:
            nonlocal position
            ops = [
                Forward(
                    key + 1,
                    key,
                    position,
                    [token],
                    kind=Kind.DECODE,
                    adapter=key % adapters + 1 if adapters else 0,
                    lora_slot=key % adapters if adapters else -1,
                )
                for key, token in enumerate(tokens)
            ]
            for op in ops:
                engine.begin(op)
            engine.execute([Chunk(op, 0, 1) for op in ops])
            for op in ops:
                engine.complete(op)
            tokens[:] = [op.outputs[0].token_id for op in ops]
            position += 1

        ns = timed_steps(step, self._steps)
        self._truncate(batch)
        return Sample(ns, batch)

    def profile(self, batch: int) -> Sample:
        """A replayed step: what takes its time on the device, by kernel, and for how long nothing runs."""
        bench = self._loaded()
        executor, runner = bench.executor, bench.runner
        executor.batch_decode([(key, key, GREEDY) for key in range(batch)])
        sample = profiled(lambda: runner.replay_last(self._steps), self._steps, self._device)
        self._truncate(batch)
        sample.tokens = batch
        return sample

    def mixed(self, batch: int, tokens: int, seed: int) -> Sample:
        """A step of `batch` decodes and a chunk of a new prompt."""
        bench, chunk = self._loaded(), -1
        executor = bench.executor
        (prompt,) = prompts(bench.shape.vocab_size, 1, tokens, seed)
        items = [(key, [key], 1, GREEDY) for key in range(batch)]
        ns = wall_ns(lambda: executor.unified_decode([*items, (chunk, prompt, 1, GREEDY)]), self._device)
        executor.release_cache(chunk)
        self._truncate(batch)
        return Sample([ns], batch + tokens)

    def decode_beside_prompt(self, batch: int, tokens: int, seed: int) -> Sample:
        """Through the step loop, callers as of `decode_beside_masks` while a prompt is computed in chunks.

        `tokens` of the sample: those of a step, of decodes and of the prompt.
        """
        bench, key = self._loaded(), -1
        engine, most = bench.executor.engine, bench.shape.max_position_embeddings
        callers = [Caller(each, self._context_tokens, each, (GREEDY,)) for each in range(batch)]
        (prompt,) = prompts(bench.shape.vocab_size, 1, tokens, seed)
        with LoopOnThread(engine, max_items=batch + 1, max_tokens=_STEP_TOKENS, max_seq_tokens=most) as loop:
            loop.keep_asking(callers, 1)
            asked = Forward(loop.op_id(), key, 0, prompt, prompt_len=tokens)
            loop.loop.submit([asked])
            before, steps = engine.stats.status().counts, self._steps - 3
            ns = timed(lambda: loop.keep_asking(callers, steps))
            after = engine.stats.status().counts
            abort = AbortCommand(target_op_id=asked.op_id)
            loop.loop.submit([WorkerCommand(op_id=loop.op_id(), abort=abort)])
        bench.executor.release_cache(key)
        self._truncate(batch)
        count = max(1, after.steps - before.steps)
        return Sample([ns // count], (after.step_tokens - before.step_tokens) // count)

    def prefill(self, tokens: int, seed: int) -> Sample:
        """Prefill of one prompt, each time a new one, so that nothing is in the prefix cache."""
        bench, key = self._loaded(), -1
        executor = bench.executor
        (prompt,) = prompts(bench.shape.vocab_size, 1, tokens, seed)
        ns = wall_ns(lambda: executor.prefill(key, prompt), self._device)
        executor.release_cache(key)
        return Sample([ns], tokens)

    def serve(self, count: int, low: int, high: int, step_tokens: int) -> Sample:
        """Many requests at once: tokens are those of the outputs."""
        bench = self._loaded()
        for key in range(count):
            bench.executor.release_cache(key)
        return serve(bench, count, low, high, step_tokens)

    def load_peer(self, shape_name: str, way: str, context_tokens: int) -> None:
        """Transformers in this process, in place of what was loaded; `way`: see `StaticPeer`."""
        self.release()
        self._peer = StaticPeer(shape_name, way, context_tokens, self._device)

    def decode_peer(self, batch: int) -> Sample:
        """Decode steps of transformers."""
        assert self._peer is not None, "load_peer comes first"
        return self._peer.decode(batch)

    def release(self) -> None:
        self._bench = self._peer = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _loaded(self) -> Bench:
        assert self._bench is not None, "load comes first"
        return self._bench

    def _truncate(self, batch: int) -> None:
        for key in range(batch):
            self._loaded().executor.truncate_kv(key, self._context_tokens)
