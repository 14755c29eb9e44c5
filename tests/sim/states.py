"""Checks each change of an operation's state against the tables of `service/caches/states.py`."""

from __future__ import annotations

import sys
from typing import Any, cast

from service.caches import entries, queues
from service.caches.states import ENDED, MOVED_BY, NEXT, WAITING, State

# The changes that happened so far.
SEEN: set[tuple[State, State]] = set()
_state: Any = entries.Operation.state  # type: ignore[misc]  # the descriptor of a slot


class CheckedOperation(entries.Operation):
    """Asserts that its state changes along the table, by the module that it names."""

    @property
    def state(self) -> State:
        return cast(State, _state.__get__(self))

    @state.setter
    def state(self, after: State) -> None:
        try:
            before = self.state
        except AttributeError:
            # It is made.
            assert after is WAITING
        else:
            module = sys._getframe(1).f_globals["__name__"].rpartition(".")[2]
            assert after in NEXT[before], f"from {before} to {after}"
            assert module == MOVED_BY[after], f"{module} moves one to {after}"
            SEEN.add((before, after))
        _state.__set__(self, after)


def check_state(operation: entries.Operation) -> None:
    """Asserts that the other fields of an operation agree with its state."""
    state = operation.state
    assert state is not ENDED, "it is in no table any more"
    assert not operation.turns_left or state is WAITING
    assert (operation.need is not None) is (state is State.PARKED)
    assert (operation.records is not None) is (state is State.COMMITTING)
    assert bool(operation.op_id) is (state in (State.REPLAYING, State.COMPUTING))
    assert (operation.first_segment is not None) is (state is State.REPLAYING)


# Every machine of the simulator makes these.
vars(queues)["Operation"] = CheckedOperation
