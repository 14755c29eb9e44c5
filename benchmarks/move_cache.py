"""How long a cache takes to move between two workers: a copy of its KV against a replay of its tokens.

python -m benchmarks.move_cache adder --tokens 448
python -m benchmarks.move_cache qwen3-0.6b --tokens 1024 --cache-dir DIRECTORY
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from quire.v1 import admin_pb2, admin_pb2_grpc
from quire.v1 import executor_pb2 as pb

from benchmarks.gateway_process import GatewayProcess
from benchmarks.shapes import SHAPES
from benchmarks.weights import make_model

TIMEOUT_S = 600


def main() -> None:
    """Prints the medians of `--repeat` moves of as many caches, each of other tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="adder, or a shape of benchmarks/shapes.py")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cache-dir", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    shape = SHAPES.get(options.model)
    model = options.model if shape is None else str(make_model(shape, options.cache_dir))
    flags = ["--kv-pages", "512", "--no-self-check"]
    rng = random.Random(0)
    computed_s: list[float] = []
    moved_s: list[float] = []
    sizes: list[int] = []
    with GatewayProcess(model=model, workers=2, flags=flags) as gateway:
        assert gateway.channel is not None
        admin = admin_pb2_grpc.AdminServiceStub(gateway.channel)
        for _ in range(options.repeat):
            tokens = [rng.randrange(12) for _ in range(options.tokens)]
            began_s = time.perf_counter()
            cache = gateway.stub.Prefill(pb.PrefillRequest(token_ids=tokens), timeout=TIMEOUT_S).kv_cache
            computed_s.append(time.perf_counter() - began_s)
            others = (w.worker_id for w in gateway.status().workers if w.worker_id != cache.worker_id)
            request = admin_pb2.MoveCacheRequest(cache_id=cache.cache_id, worker_id=next(others))
            moved = admin.MoveCache(request, timeout=TIMEOUT_S)
            assert moved.copied_tokens == options.tokens, moved
            moved_s.append(moved.time.ToNanoseconds() / 1e9)
            sizes.append(moved.copied_bytes)
            gateway.stub.ReleaseCache(pb.ReleaseCacheRequest(cache_id=cache.cache_id), timeout=TIMEOUT_S)
    copy_s, replay_s = statistics.median(moved_s), statistics.median(computed_s)
    size = sizes[0]
    print(
        f"{options.model}, {options.tokens} tokens: {size / 1e6:.1f} MB copied in {copy_s:.3f} s,"
        f" {size / copy_s / 1e6:.0f} MB/s; computed again in {replay_s:.3f} s"
    )


if __name__ == "__main__":
    main()
