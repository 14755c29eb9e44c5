"""`quire token`: prints a new token for a tenant. Needs no server and stores nothing."""

from __future__ import annotations

import argparse
import sys

from service.auth.tokens import Role, new_token


def make_token(options: argparse.Namespace) -> int:
    """Prints the token and its line for the tokens file. Returns the exit status."""
    roles = options.roles.split(",")
    known = [role.value for role in Role]
    if unknown := [role for role in roles if role not in known]:
        print(f"quire: there is no role {unknown[0]!r}; roles are {', '.join(known)}", file=sys.stderr)
        return 2
    try:
        token, line = new_token(options.name, [Role(role) for role in roles])
    except ValueError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    print("The token, for the caller (QUIRE_TOKEN); it is not stored anywhere:", file=sys.stderr)
    print(token, flush=True)
    print("The line for section [tokens] of the file of --tokens:", file=sys.stderr)
    print(line, flush=True)
    return 0
