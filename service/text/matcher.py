"""What a constraint is to those who draw tokens under it."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Protocol


class Matcher(Protocol):
    """A constraint on one sample, token by token."""

    def take(self, token_id: int) -> None:
        """The token was chosen. Costs nothing. Raises ValueError if the last mask does not have it."""

    @property
    def is_complete(self) -> bool:
        """Nothing may follow. Found out by `allowed`: False after a token until that was asked."""

    @property
    def threads(self) -> Executor:
        """Where `allowed` is to be asked, so that nobody else's threads wait for it."""

    def allowed(self) -> bytes:
        """Which tokens may follow, as TokenMask.packed. May take a while, in any thread.

        Raises:
            QuireError: The constraint cannot be kept any further.
        """
