"""`quire status`: what a server has done since its start, or the whole response as JSON."""

from __future__ import annotations

import argparse

from google.protobuf import json_format
from quire.cli.connecting import connected
from quire.cli.status_view import frame
from quire.cli.top import read, screen


def show_status(options: argparse.Namespace) -> int:
    """Prints the status of a server. Returns the exit status."""
    with connected(options) as client:
        if options.json:
            json = json_format.MessageToJson(
                client.status(),
                indent=None,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            )
            print(json, flush=True)
            return 0
        now = read(client)
        screen(is_wide=options.wide).print(frame(now, now.at_start(), options.target, wraps=True))
    return 0
