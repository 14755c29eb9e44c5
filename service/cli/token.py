"""`quire token`: a new token for a tenant. Needs no server; nothing is written anywhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from service.doors.tokens import Role, new_token


def make_token(tenant: str, roles: Sequence[str]) -> int:
    """Prints the token, and on standard error what to do with the line after it. Returns the exit status."""
    known = [role.value for role in Role]
    if unknown := next((role for role in roles if role not in known), None):
        print(f"quire: there is no role {unknown!r}; roles are {', '.join(known)}", file=sys.stderr)
        return 2
    try:
        token, line = new_token(tenant, [Role(role) for role in roles])
    except ValueError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    print("The token, for the caller (QUIRE_TOKEN); it is nowhere else:", file=sys.stderr)
    print(token, flush=True)
    print("Its line below [tokens] in the file of --tokens:", file=sys.stderr)
    print(line, flush=True)
    return 0
