"""The process of a competitor, which the suite starts, calls and ends."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.base import Peer, PeerConfig, Unavailable

# Module and class of each competitor, imported only in its process.
PEERS = {
    "machine": "benchmarks.peers.machine_peer:MachinePeer",
    "transformers": "benchmarks.peers.transformers_peer:TransformersPeer",
    "llama.cpp": "benchmarks.peers.llama_cpp_peer:LlamaCppPeer",
    "executor": "benchmarks.peers.executor_peer:ExecutorPeer",
    "service": "benchmarks.peers.service_peer:ServicePeer",
    "gateway": "benchmarks.peers.gateway_peer:GatewayPeer",
    "device": "benchmarks.gpu.device_peer:DevicePeer",
}
# Timeouts of a call (a prefill of llama.cpp takes half a minute, slow loading longer), and of exit.
_CALL_TIMEOUT_S = 300.0
_CLOSE_TIMEOUT_S = 60.0


class PeerFailed(Exception):
    """The competitor has failed or does not respond. See its log."""


class PeerHangs(PeerFailed):
    """It does not respond."""


class PeerProcess:
    """One competitor. It loads with its first call. Its log is kept."""

    def __init__(self, config: PeerConfig, log_dir: Path) -> None:
        self.broken = ""
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, config, log_dir), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *, timeout_s: float = _CALL_TIMEOUT_S, **arguments: object) -> Any:
        """Calls a method of the peer. Raises Unavailable and PeerFailed; PeerHangs if it does not answer."""
        if self.broken:
            raise PeerFailed(self.broken)
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(timeout_s):
                # A late response would be taken for the response to another call.
                self.broken = f"no answer to {method} within {timeout_s:.0f} s"
                raise PeerHangs(self.broken)
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self.broken = "its process has ended"
            raise PeerFailed(self.broken) from None
        if isinstance(answer, Unavailable | PeerFailed):
            raise answer
        return answer

    def close(self) -> None:
        """Ends the process, which ends its own children first."""
        self._pipe.close()
        self._process.join(0 if self.broken else _CLOSE_TIMEOUT_S)
        if self._process.is_alive() and self._process.pid is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()


def _serve(pipe: Connection, config: PeerConfig, log_dir: Path) -> None:
    """Serves calls until the suite closes the pipe, so that this process cannot outlive it."""
    os.setsid()  # Only the suite receives Ctrl-C. It then ends all processes in order.
    log = os.open(log_dir / f"{config.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    _import_from(config.root, log_dir / "path")
    peer: Peer | None = None
    # The error of creating the peer. It is not retried, because loading may take minutes to fail.
    stillborn: Unavailable | PeerFailed | None = None
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            method, arguments = pipe.recv()
            try:
                if stillborn is None:
                    peer = peer or _make(config)
                answer = stillborn or getattr(peer, method)(**arguments)
            except Exception as error:
                traceback.print_exc()
                text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
                answer = error if isinstance(error, Unavailable) else PeerFailed(text)
                if peer is None:
                    stillborn = answer
            pipe.send(answer)
    if peer is not None:
        peer.close()
    # In case a failure has left child processes. Not this process: if it is killed, Python warns at the end
    # of the suite of semaphores that tqdm has made in it.
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if process.pid != os.getpid() and os.getpgid(process.pid) == os.getpgrp():
                os.kill(process.pid, signal.SIGKILL)


def _import_from(root: Path, alone: Path) -> None:
    """Imports these benchmarks and otherwise a checkout, in this process and its children."""
    alone.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (alone / "benchmarks").symlink_to(Path(__file__).parent, target_is_directory=True)
    first = [str(alone), str(root), str(root / "clients" / "python")]
    sys.path[:0] = first
    os.environ["PYTHONPATH"] = os.pathsep.join([*first, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    os.chdir(alone)


def _make(config: PeerConfig) -> Peer:
    module, _, kind = PEERS[config.kind].partition(":")
    peer: Peer = getattr(importlib.import_module(module), kind)(config)
    return peer
