"""Unpacking of a worker's tokenizer archive. A worker is trusted with prompts, not with the gateway's file system."""

from __future__ import annotations

import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO

MAX_ARCHIVE_BYTES = 256 * 1024 * 1024
MAX_UNPACKED_BYTES = 1024 * 1024 * 1024
MAX_FILES = 1000
COPY_BYTES = 1024 * 1024


class BundleError(Exception):
    """The archive is damaged, too big, or names files outside its directory."""


def unpack(
    archive: IO[bytes], target: Path, *, max_bytes: int = MAX_UNPACKED_BYTES, max_files: int = MAX_FILES
) -> None:
    """Write the regular files of the zip ``archive`` below ``target`` (created if need be).

    Limits count what is really written, not what the archive claims. Raises ``BundleError``.
    """
    try:
        with zipfile.ZipFile(archive) as bundle:
            members = [member for member in bundle.infolist() if not member.is_dir()]
            if not members:
                raise BundleError("the tokenizer archive is empty")
            if len(members) > max_files:
                raise BundleError(f"the tokenizer archive holds more than {max_files} files")
            left = max_bytes
            for member in members:
                path = target / safe_name(member)
                path.parent.mkdir(parents=True, exist_ok=True)
                with bundle.open(member) as source, path.open("wb") as sink:
                    left -= copy_bounded(source, sink, left)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, zlib.error) as error:
        raise BundleError(f"the tokenizer archive cannot be unpacked: {error}") from error


def safe_name(member: zipfile.ZipInfo) -> PurePosixPath:
    """The member's relative path. Raises ``BundleError`` when it leaves the directory or is no regular file."""
    name = PurePosixPath(member.filename.replace("\\", "/"))
    if name.is_absolute() or ".." in name.parts or not name.parts or ":" in name.parts[0]:
        raise BundleError(f"the tokenizer archive names a file outside its directory: {member.filename!r}")
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        raise BundleError(f"the tokenizer archive holds something that is no regular file: {member.filename!r}")
    return name


def copy_bounded(source: IO[bytes], sink: IO[bytes], limit: int) -> int:
    """Copy everything and return its size. Raises ``BundleError`` beyond ``limit`` bytes."""
    size = 0
    while block := source.read(COPY_BYTES):
        size += len(block)
        if size > limit:
            raise BundleError("the unpacked tokenizer is too big")
        sink.write(block)
    return size
