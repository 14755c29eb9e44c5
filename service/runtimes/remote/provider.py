"""One provider as all its calls share it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from service.errors import ProviderFailure
from service.logging import get_logger
from service.runtimes.remote.breaker import Breaker, Outcome, Pass
from service.runtimes.remote.clock import Clock
from service.runtimes.remote.config import ProviderConfig
from service.runtimes.remote.dialects.base import Dialect
from service.runtimes.remote.failures import failure
from service.runtimes.remote.gate import Gate
from service.runtimes.remote.sessions import Sessions

_log = get_logger(__name__)
# What says that the provider is not well.
_UNWELL = frozenset({"NETWORK_ERROR", "SERVER_ERROR", "TIMEOUT"})
# How soon to ask again while another request tries whether the provider is well.
_PROBE_S = 1.0


@dataclass(frozen=True, slots=True)
class Provider:
    """Its configuration, and what is known of it."""

    config: ProviderConfig
    dialect: Dialect
    sessions: Sessions
    gate: Gate
    breaker: Breaker
    clock: Clock

    @contextmanager
    def recorded(self) -> Iterator[Pass]:
        """Around a request: how it ends is recorded. Raises ProviderFailure: none is sent now."""
        now_s = self.clock.now_s()
        own = self.breaker.begin(now_s)
        if own is None:
            left_s = self.breaker.left_s(now_s) or _PROBE_S
            raise failure("CIRCUIT_OPEN", "the provider has failed again and again", retry_after_s=left_s)
        outcome = Outcome.NEITHER
        try:
            yield own
            outcome = Outcome.SUCCESS
        except ProviderFailure as error:
            if error.reason in _UNWELL:
                outcome = Outcome.FAILURE
            raise
        finally:
            self._record(own, outcome)

    def _record(self, own: Pass, outcome: Outcome) -> None:
        now_s = self.clock.now_s()
        was_closed = not self.breaker.left_s(now_s)
        self.breaker.record(own, outcome, now_s)
        if was_closed and self.breaker.left_s(now_s):
            _log.warning("a provider fails again and again: it is left alone", runtime=self.config.name)
