"""The process of one competitor: `python -m benchmarks.peers.host NAME CONFIG`.

Reads a call per line from standard input, {"method": ..., "arguments": {...}}, and writes an answer per line,
{"result": ...}, {"unavailable": why} or {"failed": why}. Ends when its input does, so that it cannot outlive
the suite. Whatever libraries print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.base import Peer, PeerConfig, Unavailable, end_descendants

# Module and class of each competitor. Imported here, in its process, and nowhere else.
PEERS = {
    "machine": ("machine_peer", "MachinePeer"),
    "transformers": ("transformers_peer", "TransformersPeer"),
    "llama.cpp": ("llama_cpp_peer", "LlamaCppPeer"),
    "executor": ("executor_peer", "ExecutorPeer"),
    "service": ("service_peer", "ServicePeer"),
    "gateway": ("gateway_peer", "GatewayPeer"),
}


def main() -> None:
    """Serves calls until the input ends."""
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings["model_dir"] = Path(settings["model_dir"])
    peer: Peer | None = None
    stillborn: dict[str, Any] = {}
    for line in sys.stdin:
        call = json.loads(line)
        if peer is None and not stillborn:
            made = _answer(lambda: _make(name, PeerConfig(**settings)))
            peer = made.get("result")
            # Not tried again: loading may take minutes to fail.
            stillborn = {} if peer else made
        answer = stillborn or _answer(lambda: getattr(peer, call["method"])(**call["arguments"]))  # noqa: B023
        answers.write(json.dumps(answer, default=asdict) + "\n")
    if peer is not None:
        peer.close()
    end_descendants(os.getpid())


def _answer(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"result": work()}
    except Unavailable as reason:
        return {"unavailable": str(reason)}
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def _make(name: str, config: PeerConfig) -> Peer:
    module, kind = PEERS[name]
    peer: Peer = getattr(importlib.import_module(f"benchmarks.peers.{module}"), kind)(config)
    return peer


if __name__ == "__main__":
    main()
