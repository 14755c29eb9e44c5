"""The weight of the code: its length, the path of a Decode, and the Python calls per token: `make size`."""

from __future__ import annotations

import argparse

from benchmarks.size.calls import CountedServer, decodes, most_called
from benchmarks.size.lines import PACKAGES, PRODUCT, length, longest_file, most_methods
from benchmarks.size.way import TYPES, way_of


def _show_length() -> None:
    print(f"{'':20} {'files':>8} {'lines':>8} {'logical':>8}")
    for name, packages in [*((package, (package,)) for package in PACKAGES), ("product in all", PRODUCT)]:
        found = length(*packages)
        print(f"{name:20} {found.files:8,} {found.lines:8,} {found.logical_lines:8,}")
    print("\nlongest file: {:,} lines, {}".format(*longest_file()))
    print("most methods of a class: {}, {}".format(*most_methods()))


def _show_running(num_functions: int) -> None:
    with CountedServer() as server, decodes(server) as kinds:
        print("\nPython function calls per token")
        print(f"{'':30} {'gateway':>8} {'worker':>8}")
        functions = []
        for name, (step, tokens) in kinds.items():
            calls = server.calls_per_step(step)
            totals = {role: sum(found.values()) / tokens for role, found in calls.items()}
            print(f"{name:30} {totals['gateway']:8.1f} {totals['worker']:8.1f}")
            for role, found in calls.items() if num_functions else ():
                functions += [f"\n{name}, {role}:", *most_called(found, tokens, num_functions)]
        print(*functions, sep="\n")
        way = way_of(server.uses(kinds["unary Decode"][0]))
    print(f"a Decode goes through {len(way.files)} files:")
    for file, types in way.files.items():
        print(f"  {file:38} {', '.join(sorted({_short(name) for name in types}))}")
    print(f"and {len(way.types)} types: {', '.join(_short(name) for name in TYPES if name in way.types)}")
    print(f"and {len(way.other_types)} types around them: {', '.join(sorted(way.other_types))}")


def _short(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.size", description=__doc__)
    parser.add_argument(
        "--functions", type=int, default=0, metavar="N", help="also the N most called functions"
    )
    arguments = parser.parse_args()
    _show_length()
    _show_running(arguments.functions)


if __name__ == "__main__":
    main()
