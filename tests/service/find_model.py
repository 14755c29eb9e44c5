"""Looks for the model of test_hub.py, in a process with the environment of a test.

It is forked from one that has imported the hub's library, which reads its environment then, and what that
imports, which takes longer.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Prints where it is, or why not."""
    for name in list(sys.modules):
        if name.startswith(("huggingface_hub", "service.cli.hub")):
            del sys.modules[name]
    from service.cli.hub import HubError, find_model

    revision = json.loads(sys.argv[1])
    try:
        print(find_model("org/model", revision))
    except HubError as error:
        print(f"quire: {error}", file=sys.stderr)
    assert not {"torch", "transformers"} & set(sys.modules)


if __name__ == "__main__":
    main()
