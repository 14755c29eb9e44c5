"""The effect of a long prompt on decoding callers: their time between tokens."""

from __future__ import annotations

import asyncio
import random
import time

from quire.v1 import executor_pb2

from benchmarks import drivers
from benchmarks.peers.base import Peer, PeerConfig, Sample, prompts
from benchmarks.peers.grpc_peer import GrpcPeer

_CALLERS = 16
_PROMPT_TOKENS = 128
_LONG_TOKENS = 4096
# A caller restarts after this many tokens, so that a fast model does not fill the pool.
_MAX_TOKENS = 512
_KV_PAGES = (_CALLERS * _MAX_TOKENS + _LONG_TOKENS) // 16 + _CALLERS


class StallPeer(Peer):
    """Sixteen callers, each on its own Session. A gateway for each turn, because the budget is a setting."""

    def __init__(self, config: PeerConfig) -> None:
        self._config = config

    def stall(self, budget: int, seconds: float = 15.0) -> dict[str, Sample]:
        """Gaps of all callers for `seconds`, and then until a prompt of 4096 tokens is done."""
        config = self._config
        flags = ["--threads-per-worker", str(config.threads), "--kv-pages", str(_KV_PAGES)]
        flags += ["--max-mixed-prefill-tokens", str(budget)] if budget else []
        peer = GrpcPeer(config, str(config.model_dir()), flags)
        try:
            return peer.run(self._measure(peer.stub, seconds))
        finally:
            peer.close()

    async def _measure(self, stub: drivers.Stub, seconds: float) -> dict[str, Sample]:
        vocab_size = self._config.shape.vocab_size
        callers = await drivers.open_callers(stub, prompts(vocab_size, _CALLERS, _PROMPT_TOKENS))
        gaps_ns: list[int] = []
        loops = [asyncio.create_task(_decode(stub, caller, gaps_ns)) for caller in callers]
        await asyncio.sleep(seconds / 3)  # until all decode
        gaps_ns.clear()
        await asyncio.sleep(seconds)
        alone, began_ns = Sample(gaps_ns.copy()), time.perf_counter_ns()
        gaps_ns.clear()
        prompt = random.Random(1).choices(range(vocab_size), k=_LONG_TOKENS)
        await stub.Prefill(executor_pb2.PrefillRequest(token_ids=prompt), timeout=600)
        prompt_ns = time.perf_counter_ns() - began_ns
        beside = Sample(gaps_ns.copy())
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops)
        return {"alone": alone, "beside the prompt": beside, "the prompt": Sample([prompt_ns])}


async def _decode(stub: drivers.Stub, caller: drivers.Caller, gaps_ns: list[int]) -> None:
    async with drivers.SessionLane(stub) as lane:
        last_ns = time.perf_counter_ns()
        while True:
            caller.took(await lane(caller.request()))
            now_ns = time.perf_counter_ns()
            gaps_ns.append(now_ns - last_ns)
            if caller.seq_len == _MAX_TOKENS:
                await drivers.rewind_callers(stub, [caller])
                now_ns = time.perf_counter_ns()
            last_ns = now_ns
