"""The machine's peak: memory bandwidth, and matrix multiplication."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.peers.base import Peer, PeerConfig, timed

_BUFFER_BYTES = 1 << 30
_ROWS = 1 << 13
_REPEATS = 6
_MATMUL_ROWS = 512


class MachinePeer(Peer):
    """Not a competitor: the roofline, measured in turns with the competitors."""

    def __init__(self, config: PeerConfig) -> None:
        torch.set_num_threads(config.threads)
        self._shape = config.shape
        # Larger than any last-level cache.
        self._buffer = torch.ones(_BUFFER_BYTES // torch.float32.itemsize).view(_ROWS, -1)
        self._ones = torch.ones(self._buffer.shape[1])

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    def roof(self) -> dict[str, float]:
        """Bytes/s of the fastest of several ways to read a large buffer once, and FLOP/s of a product.

        The product is torch's in bfloat16 or, where that is faster, in float32.
        """
        hidden, width = self._shape.hidden_size, 2 * self._shape.intermediate_size
        with torch.inference_mode():
            reading_s = min(
                _fastest_s(lambda: torch.sum(self._buffer)),
                _fastest_s(lambda: torch.mv(self._buffer, self._ones)),
            )
            product_s = min(_product_s(hidden, width, dtype) for dtype in (torch.bfloat16, torch.float32))
        return {
            "bytes_per_s": _BUFFER_BYTES / reading_s,
            "flops_per_s": 2 * _MATMUL_ROWS * hidden * width / product_s,
        }


def _product_s(hidden: int, width: int, dtype: torch.dtype) -> float:
    rows, matrix = torch.ones(_MATMUL_ROWS, hidden, dtype=dtype), torch.ones(width, hidden, dtype=dtype)
    return _fastest_s(lambda: torch.nn.functional.linear(rows, matrix))


def _fastest_s(work: Callable[[], object]) -> float:
    """The shortest time, because it measures the peak."""
    return min(timed(work) for _ in range(_REPEATS)) / 1e9
