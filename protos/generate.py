"""Generates the Python stubs of quire.v1, checks that they are fresh, or builds a descriptor image for buf.

    python protos/generate.py                writes clients/python/quire/v1
    python protos/generate.py --check        fails if that differs from what would be written; writes nothing
    python protos/generate.py --image FILE   writes a descriptor set of the protos and all they import

buf reads the image instead of the sources, because google/rpc/status.proto comes from the Python package
googleapis-common-protos, and buf would look for it on the network.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.rpc import status_pb2
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
STUBS = PROTOS.parent / "clients" / "python"
PACKAGE = Path("quire") / "v1"


def main() -> int:
    """Runs the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the stubs are stale; write nothing")
    parser.add_argument("--image", type=Path, metavar="FILE", help="write a descriptor set for buf")
    parser.add_argument("--without-comments", action="store_true", help="with --image: leave comments out")
    arguments = parser.parse_args()
    if arguments.image:
        write_image(arguments.image, comments=not arguments.without_comments)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        fresh = generate(Path(directory))
    if arguments.check:
        return report_stale(fresh)
    write_stubs(fresh)
    return 0


def generate(scratch: Path) -> dict[str, bytes]:
    """Stubs by file name. Services get client and server code too; `scratch` is an empty directory."""
    image = scratch / "image.binpb"
    write_image(image, comments=False)
    described = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes())
    with_services = [file.name for file in described.file if file.service and is_ours(file.name)]
    plugin = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
    run_protoc([f"--python_out={scratch}", f"--pyi_out={scratch}"], sources())
    run_protoc(
        [
            f"--grpc_python_out={scratch}",
            f"--plugin=protoc-gen-mypy_grpc={plugin}",
            f"--mypy_grpc_out={scratch}",
        ],
        with_services,
    )
    return {path.name: path.read_bytes() for path in sorted((scratch / PACKAGE).iterdir())}


def write_image(path: Path, *, comments: bool) -> None:
    """Writes a FileDescriptorSet with every proto of ours and what they import."""
    path.parent.mkdir(parents=True, exist_ok=True)
    options = ["--include_imports", f"--descriptor_set_out={path}"]
    run_protoc([*options, "--include_source_info"] if comments else options, sources())


def write_stubs(fresh: dict[str, bytes]) -> None:
    """Makes the committed stubs those of `fresh`, and removes what is not generated any more."""
    for name in committed().keys() - fresh.keys():
        (STUBS / PACKAGE / name).unlink()
        print(f"removed {PACKAGE / name}")
    for name, content in fresh.items():
        (STUBS / PACKAGE / name).write_bytes(content)
        print(f"wrote {PACKAGE / name}")


def report_stale(fresh: dict[str, bytes]) -> int:
    """Names every stub that is missing, stale or left over. Returns 1 if there is one."""
    present = committed()
    stale = sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))
    for name in stale:
        print(f"{PACKAGE / name} does not match the protos: run `make stubs`", file=sys.stderr)
    return 1 if stale else 0


def committed() -> dict[str, bytes]:
    """The stubs in the tree, by file name."""
    return {path.name: path.read_bytes() for path in (STUBS / PACKAGE).glob("*_pb2*.py*") if path.is_file()}


def sources() -> list[str]:
    """Our protos, relative to the import root."""
    return sorted(path.relative_to(PROTOS).as_posix() for path in (PROTOS / PACKAGE).glob("*.proto"))


def is_ours(name: str) -> bool:
    """Whether a file of the image is one of our own."""
    return name.startswith(f"{PACKAGE.as_posix()}/")


def run_protoc(options: list[str], files: list[str]) -> None:
    """Runs protoc. Raises SystemExit if it fails; it has told why."""
    # google/protobuf comes with grpcio-tools, google/rpc with googleapis-common-protos.
    well_known = Path(protoc.__file__).parent / "_proto"
    common = Path(status_pb2.__file__).parents[2]
    status = protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", f"-I{common}", *options, *files])
    if status != 0:
        raise SystemExit(status)


if __name__ == "__main__":
    sys.exit(main())
