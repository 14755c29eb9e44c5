"""What can go wrong with the database. The driver, which is an extra, is not needed here."""

from __future__ import annotations


class DatabaseFailed(Exception):
    """The database cannot be reached, or refused a statement. The message is for the operator.

    It never has the address of the database, which may contain a password.
    """


class DatabaseUnusable(DatabaseFailed):
    """The database is of another program or version. Trying again does not help."""
