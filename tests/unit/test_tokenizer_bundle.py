"""A worker's tokenizer archive may not harm the gateway's file system."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from smg.engines.grpc.bundle import BundleError, unpack


def archive(members: dict[str, bytes], *, mode: int = 0o100644) -> io.BytesIO:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, content in members.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = mode << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            bundle.writestr(member, content)
    out.seek(0)
    return out


def test_files_are_unpacked(tmp_path: Path) -> None:
    unpack(archive({"tokenizer.json": b"{}", "deep/er/config.json": b"[]"}), tmp_path / "new")
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == b"{}"
    assert (tmp_path / "new" / "deep" / "er" / "config.json").read_bytes() == b"[]"


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/evil", "..\\evil", "C:evil"])
def test_names_outside_the_directory(tmp_path: Path, name: str) -> None:
    target = tmp_path / "in" / "side"
    with pytest.raises(BundleError, match="outside its directory"):
        unpack(archive({name: b"x"}), target)
    assert not list(tmp_path.rglob("*evil*"))


def test_links_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no regular file"):
        unpack(archive({"tokenizer.json": b"/etc/passwd"}, mode=0o120777), tmp_path)
    assert not list(tmp_path.iterdir())


def test_limits(tmp_path: Path) -> None:
    bomb = archive({"a": bytes(3_000_000), "b": bytes(3_000_000)})
    with pytest.raises(BundleError, match="too big"):
        unpack(bomb, tmp_path, max_bytes=5_000_000)
    with pytest.raises(BundleError, match="more than 2 files"):
        unpack(archive({"a": b"", "b": b"", "c": b""}), tmp_path, max_files=2)
    unpack(archive({"a": bytes(10), "b": bytes(10)}), tmp_path, max_bytes=20, max_files=2)


def test_damaged_archives(tmp_path: Path) -> None:
    good = archive({"a": bytes(range(256)) * 100}).getvalue()
    for data in (b"", b"not a zip", good[:-30], good[:60] + b"\x00\x00\x00" + good[63:]):
        with pytest.raises(BundleError):
            unpack(io.BytesIO(data), tmp_path)
    with pytest.raises(BundleError, match="empty"):
        unpack(archive({}), tmp_path)
