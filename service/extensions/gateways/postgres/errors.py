"""What can go wrong with the database. The driver, which is an extra, is not needed here."""

from __future__ import annotations


class DatabaseFailed(Exception):
    """The database cannot be reached, or refused a statement. The message is for the operator.

    It never has the address of the database.

    Attributes:
        is_certain: The statement has done nothing. Otherwise it may have, or may still be running.
    """

    def __init__(self, message: str, *, is_certain: bool = True) -> None:
        super().__init__(message)
        self.is_certain = is_certain


class Conflict(DatabaseFailed):
    """There is a row with this key already."""


class DatabaseUnusable(DatabaseFailed):
    """The database is of another program or version. Trying again does not help."""
