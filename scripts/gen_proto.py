"""Generate ``smg/engines/grpc/pb/*_pb2.py`` from ``proto/*.proto`` (needs the ``dev`` extra: grpcio-tools).

``python scripts/gen_proto.py`` writes the modules, ``--check`` only says whether the ones in the tree are current.

protoc's own Python output is not used for two reasons: it refuses to load on a protobuf runtime older than protoc,
and it registers the messages in the process-wide descriptor pool, where they would collide with an engine's own copy of
the same package. The modules written here hold the compiled descriptor and work with every runtime the project allows.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "proto"
TARGET = ROOT / "smg" / "engines" / "grpc" / "pb"
BYTES_PER_LINE = 24


def compile_files() -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """The descriptor of every file in ``proto/``, by file name, without comments and positions."""
    names = sorted(path.name for path in SOURCE.glob("*.proto"))
    include = Path(protoc.__file__).parent / "_proto"
    with tempfile.NamedTemporaryFile(suffix=".bin") as out:
        command = ["protoc", f"-I{SOURCE}", f"-I{include}", f"--descriptor_set_out={out.name}", *names]
        if protoc.main(command) != 0:
            raise SystemExit("protoc failed")
        files = descriptor_pb2.FileDescriptorSet.FromString(Path(out.name).read_bytes())
    return {file.name: file for file in files.file}


def module_name(proto: str) -> str:
    return proto.removesuffix(".proto") + "_pb2"


def module_text(file: descriptor_pb2.FileDescriptorProto) -> Iterator[str]:
    yield f'"""Messages of ``proto/{file.name}``. Written by ``scripts/gen_proto.py``; do not edit."""'
    yield ""
    yield "from typing import Any"
    yield ""
    yield "from smg.engines.grpc.pb import pool"
    for dependency in file.dependency:
        if (SOURCE / dependency).exists():
            yield f"from smg.engines.grpc.pb import {module_name(dependency)} as _{module_name(dependency)}"
    yield ""
    data = file.SerializeToString(deterministic=True)
    yield "pool.add("
    for start in range(0, len(data), BYTES_PER_LINE):
        yield f"    {data[start : start + BYTES_PER_LINE]!r}"
    yield ")"
    yield ""
    for message in file.message_type:
        yield f'{message.name}: Any = pool.message_class("{file.package}.{message.name}")'
    for service in file.service:
        yield ""
        yield f'SERVICE = "{file.package}.{service.name}"'


def main() -> None:
    check = "--check" in sys.argv[1:]
    stale = []
    for name, file in compile_files().items():
        path = TARGET / (module_name(name) + ".py")
        text = "\n".join(module_text(file)) + "\n"
        if path.exists() and path.read_text() == text:
            continue
        stale.append(path.name)
        if not check:
            path.write_text(text)
    if check and stale:
        raise SystemExit(f"not generated from the current proto files: {', '.join(stale)}")


if __name__ == "__main__":
    main()
