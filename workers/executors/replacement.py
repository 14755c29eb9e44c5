"""Replaces the weights of a served model: they are read beside the present ones, then put into their place.

Reading takes main memory for the new weights and happens on a thread of its own, while steps run. They are
put into place between two steps, when no sequence is left whose KV is of other weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

from workers.kv.sizing import KvSizingError
from workers.models.adapted import Adapted
from workers.models.errors import ModelError, for_clients
from workers.models.model import Model, ModelDescription
from workers.operations import Failed, FailureReason, ReplacementRead, WeightsRead

_Weights = TypeVar("_Weights")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Served:
    """The model that runs. Nothing else may refer to it, or its memory stays when it is replaced."""

    model: Model

    @property
    def adapted(self) -> Adapted:
        """A native model, which takes adapters: only executors that have some ask for it."""
        return cast(Adapted, self.model)


class WeightsReplacement(Generic[_Weights]):
    """Owns the weights that were read and are not in place."""

    def __init__(
        self,
        read: Callable[[Path], tuple[_Weights, ModelDescription]],
        apply: Callable[[_Weights, ModelDescription], None],
    ) -> None:
        """Take the functions of an executor.

        read: Called on another thread. Raises ModelError for weights that do not fit the model, and then
            leaves nothing behind.
        apply: Called between two steps. Must not fail.
        """
        self._read = read
        self._apply = apply
        # Called from the reading thread. Set by the step loop.
        self.submit: Callable[[ReplacementRead], None]
        # Called by `discard`, for weights that this process does not own.
        self.on_discard: Callable[[], None] | None = None
        self.was_applied = False
        # The command whose weights are wanted. 0: none.
        self._wanted, self._directory = 0, ""
        self._ready: tuple[_Weights, ModelDescription] | None = None
        # Held while weights are read: those of cancelled commands must not be in memory together.
        self._reading = threading.Lock()

    def read(self, op_id: int, directory: str) -> None:
        """Starts to read. What was read before is dropped."""
        self.discard()
        self._wanted, self._directory = op_id, directory
        threading.Thread(target=self._run, args=(op_id, directory), name="weights", daemon=True).start()

    def _run(self, op_id: int, directory: str) -> None:
        """The reading thread."""
        outcome: object
        with self._reading:
            if op_id != self._wanted:
                return
            began_s = time.monotonic()
            try:
                outcome = self._read(Path(directory))
                _log.info("other weights were read in %.4f s", time.monotonic() - began_s)
            except Exception as error:
                known = isinstance(error, ModelError | KvSizingError)
                _log.warning("weights cannot be used: %s", error if known else repr(error))
                outcome = error
        self.submit(ReplacementRead(op_id, outcome))

    def was_read(self, read: ReplacementRead) -> Sequence[WeightsRead | Failed]:
        """Takes the weights that were read. Returns the answer, unless the read was discarded meanwhile."""
        if read.op_id != self._wanted:
            if not self._wanted:
                # Other processes may have begun to read only after they were told to forget it.
                self.discard()
            return ()
        if isinstance(read.outcome, Exception):
            self.discard()
            # The caller of LoadWeights sees it: see `WorkerError.detail`.
            known = isinstance(read.outcome, ModelError | KvSizingError)
            why = for_clients(str(read.outcome), Path(self._directory)) if known else ""
            return (Failed(read.op_id, FailureReason.WEIGHTS, why),)
        self._ready = read.outcome  # type: ignore[assignment]  # what `_read` returns
        assert self._ready is not None
        return (WeightsRead(read.op_id, self._ready[1]),)

    def apply(self) -> None:
        """Puts what was read into place. Raises RuntimeError if there is nothing."""
        if self._ready is None:
            raise RuntimeError("no weights were read")
        weights, description = self._ready
        self._wanted, self._ready, self.was_applied = 0, None, True
        began_s = time.monotonic()
        self._apply(weights, description)
        _log.info("other weights were put into place in %.4f s", time.monotonic() - began_s)

    def discard(self) -> None:
        """Forgets what was read, or is being read."""
        self._wanted, self._ready = 0, None
        if self.on_discard is not None:
            self.on_discard()
