"""Makes the answers to failed commands and forwards, and logs what is unexpected."""

from __future__ import annotations

from workers.adapters.errors import AdapterError
from workers.executors.engine import KvMissing, NoTrees
from workers.kv.page_pool import OutOfPages
from workers.logging import get_logger
from workers.models.errors import ModelError
from workers.operations import Failed, FailureReason, Forward
from workers.sampling import BadLogitsError

_log = get_logger(__name__)
# A message for clients.
_OVERFLOW = (
    "its sums overflow, so that logits are not finite: train it again, or lower its lora_alpha or strength"
)


def failure_of_running(forward: Forward, error: Exception, overflowed: set[str]) -> Failed:
    """The answer to a forward that failed in a step.

    Mutates `overflowed`: the adapters, or the model, whose logits were not finite. That is no bug of ours and
    may happen with all of their forwards, so it is logged once for each.
    """
    if not isinstance(error, BadLogitsError):
        _log.error("a forward failed", exc_info=error)
        return Failed(forward.op_id, FailureReason.FAULT, repr(error))
    whose = f"adapter {forward.adapter}" if forward.adapter else "the model"
    if whose not in overflowed:
        overflowed.add(whose)
        _log.error("logits are not finite: the sums overflow", whose=whose)
    if forward.adapter:
        return Failed(forward.op_id, FailureReason.ADAPTER, _OVERFLOW)
    return Failed(forward.op_id, FailureReason.FAULT, repr(error))


def failure_of(op_id: int, error: Exception, what: str) -> Failed:
    """The answer to a failed command. Logs unexpected errors, with the message `what`."""
    match error:
        case OutOfPages():
            needed, available = error.needed, error.available
            return Failed(op_id, FailureReason.KV_EXHAUSTED, pages_needed=needed, pages_available=available)
        case KvMissing():
            return Failed(op_id, FailureReason.KV_MISSING, str(error))
        case ModelError():
            return Failed(op_id, FailureReason.WEIGHTS, str(error))
        case AdapterError():
            return Failed(op_id, FailureReason.ADAPTER, str(error))
        case NoTrees():
            return Failed(op_id, FailureReason.UNSUPPORTED, str(error))
        case _:
            _log.error(what, exc_info=error)
            return Failed(op_id, FailureReason.FAULT, repr(error))
