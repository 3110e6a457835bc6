"""Self-signed certificates."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def self_signed(folder: Path, name: str = "DNS:localhost") -> Path:
    """Write key.pem and cert.pem for ``name`` (a subjectAltName) into ``folder``, which is returned."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*command, "-addext", f"subjectAltName={name}", *files], check=True, capture_output=True)
    return folder
