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
from functools import partial
from pathlib import Path
from typing import Any, TextIO

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
    try:
        _serve(name, PeerConfig(**settings), answers)
    except BrokenPipeError:
        pass  # The suite was killed while we worked: nobody wants the answer.
    finally:
        end_descendants(os.getpid())


def _serve(name: str, config: PeerConfig, answers: TextIO) -> None:
    peer: Peer | None = None
    # Why there is no peer. Making one is not tried again: loading may take minutes to fail.
    stillborn: dict[str, Any] = {}
    for line in sys.stdin:
        call = json.loads(line)
        if peer is None and not stillborn:
            made = _answer(partial(_make, name, config))
            peer, stillborn = made.get("result"), {} if "result" in made else made
        answer = stillborn or _answer(partial(_call, peer, call))
        answers.write(json.dumps(answer, default=asdict) + "\n")
    if peer is not None:
        peer.close()


def _answer(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"result": work()}
    except Unavailable as reason:
        return {"unavailable": str(reason)}
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def _call(peer: Peer | None, call: dict[str, Any]) -> Any:
    return getattr(peer, call["method"])(**call["arguments"])


def _make(name: str, config: PeerConfig) -> Peer:
    module, kind = PEERS[name]
    peer: Peer = getattr(importlib.import_module(f"benchmarks.peers.{module}"), kind)(config)
    return peer


if __name__ == "__main__":
    main()
