"""transformers beside us: decode with a static cache, as a process of its own that prints one line of JSON.

Three ways, the faster the more it asks of the machine: `compiled` by torch.compile with its own CUDA graphs,
`graph` captured here around the model's forward, `eager`. A way that does not work fails; the others go on.

    python -m benchmarks.gpu.peer --way graph
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache

from benchmarks.gpu.plan import Plan, real_plan, rehearsal_plan, settings
from benchmarks.gpu.timing import Spread, spread, wall_ms

WAYS = ("graph", "eager", "compiled")
# Steps before anything is timed; compiling and capturing need more than one.
_WARM_UPS = 3


def measure(plan: Plan, way: str, batch: int) -> Spread:
    """Milliseconds of a decode step with the host in the loop: the caller sees every token."""
    model = make_model(plan)
    with torch.inference_mode():
        step = make_step(plan, model, way, batch)
        return spread(
            [wall_ms(step, plan.device) / plan.decode_steps for _ in range(max(1, plan.repeats // 4))]
        )


def make_model(plan: Plan) -> Any:
    """Random weights, made on the device, in evaluation mode."""
    config = Qwen3Config(**settings(plan.workload_shape))
    config._attn_implementation = "sdpa"  # noqa: SLF001 - what from_pretrained sets for its argument
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(plan.dtype)
    try:
        with torch.device(plan.device):
            return Qwen3ForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    finally:
        torch.set_default_dtype(before)


def make_step(plan: Plan, model: Any, way: str, batch: int) -> Callable[[], None]:
    """A round of decode steps, on a cache that holds `decode_context` tokens of each sequence.

    The positions go on from round to round, up to the end of the cache.
    """
    rounds = max(1, plan.repeats // 4)
    length = plan.decode_context + plan.decode_steps * rounds + 2 * _WARM_UPS
    cache = StaticCache(config=model.config, max_cache_len=length)
    prompt = torch.randint(model.config.vocab_size, (batch, plan.decode_context), device=plan.device)
    forward = model.forward
    fed = _next_tokens(forward, prompt, cache)  # [B, 1], in one place for good

    if way == "compiled":
        forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)

    def once() -> None:
        fed.copy_(_next_tokens(forward, fed, cache))

    if way == "graph":
        once = _captured(once, plan.device)
    for _ in range(_WARM_UPS):
        once()

    def steps() -> None:
        for _ in range(plan.decode_steps):
            once()
            fed.tolist()

    return steps


def _next_tokens(forward: Any, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
    result = forward(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    chosen: torch.Tensor = result.logits[:, -1:].argmax(-1)
    return chosen


def _captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The launches of a call as a CUDA graph; the call itself where there is no GPU."""
    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], None] = graph.replay
    return replay


def main() -> int:
    """Prints {batch: milliseconds}."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.peer", description=__doc__)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    plan = rehearsal_plan() if arguments.rehearse else real_plan()
    print(json.dumps({str(batch): measure(plan, arguments.way, batch) for batch in plan.peer_batches}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
