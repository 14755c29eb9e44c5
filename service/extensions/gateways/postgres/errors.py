"""Failures of the database. Does not import the driver, which is an optional dependency."""

from __future__ import annotations


class DatabaseFailed(Exception):
    """The database cannot be reached, or refused a statement. The message is for the operator.

    It never contains the address of the database.

    Attributes:
        is_certain: The statement had no effect. Otherwise it may have had one, or may still be running.
    """

    def __init__(self, message: str, *, is_certain: bool = True) -> None:
        super().__init__(message)
        self.is_certain = is_certain


class Conflict(DatabaseFailed):
    """A row with this key exists already."""


class DatabaseUnusable(DatabaseFailed):
    """The database belongs to another program or version. Trying again does not help."""
