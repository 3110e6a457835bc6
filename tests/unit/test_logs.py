"""Structured logs: formats, filters, redaction, files, and a stderr that nobody reads."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from smg.flags import ConfigError
from smg.settings import Settings
from smg.telemetry.logs import (
    ACCESS_AREA,
    MAX_LINE_BYTES,
    LineFormatter,
    StderrHandler,
    dropped_lines,
    filter_of,
    parse_filter,
    redact,
    setup_logging,
)


@pytest.fixture
def clean_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, raising = root.handlers[:], root.level, logging.raiseExceptions
    yield
    for handler in root.handlers[:]:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.raiseExceptions = raising
    logging.captureWarnings(False)
    for area in ("smg", ACCESS_AREA, "smg.detok"):
        logging.getLogger(area).setLevel(logging.NOTSET)


def record(message: str, *args: object, level: int = logging.INFO, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("smg.detok.run", level, __file__, 1, message, args, None)
    made.created = 1769860800.125
    vars(made).update(extra)
    return made


def test_text_line() -> None:
    line = LineFormatter("detok-0", as_json=False).format(record("ended %d", 3, request_id="req-1", note="a b", n=None))
    assert line == (
        '2026-01-31T12:00:00.125Z INFO  smg.detok.run ended 3 role=detok-0 request_id=req-1 note="a b" n=None'
    )


def test_a_text_message_stays_one_line() -> None:
    assert "\n" not in LineFormatter("r", as_json=False).format(record("one\ntwo", field="x\ny"))


def test_json_line() -> None:
    line = json.loads(LineFormatter("detok-0", as_json=True).format(record("ended", tokens=12, request_id="req-1")))
    assert line == {
        "time": "2026-01-31T12:00:00.125Z",
        "level": "info",
        "area": "smg.detok.run",
        "message": "ended",
        "role": "detok-0",
        "tokens": 12,
        "request_id": "req-1",
    }


def test_exceptions_are_a_member_of_the_line() -> None:
    made = record("failed", level=logging.ERROR)
    try:
        raise ValueError("Bearer abcdef")
    except ValueError as error:
        made.exc_info = (ValueError, error, error.__traceback__)
    line = json.loads(LineFormatter("r", as_json=True).format(made))
    assert "ValueError" in line["error"]
    assert "abcdef" not in line["error"]


def test_long_lines_stay_readable_json() -> None:
    made = record("x" * 20000, field="y" * 20000)
    text = LineFormatter("r", as_json=True, limit=MAX_LINE_BYTES).format(made)
    assert len(text) < MAX_LINE_BYTES
    assert json.loads(text)["role"] == "r"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgres://user:pw@db/x failed", "postgres://***@db/x failed"),
        ("grpc://tok@host:1", "grpc://***@host:1"),
        ("worker grpc://host:30000@3 ready", "worker grpc://host:30000@3 ready"),
        ("mail a@b.org", "mail a@b.org"),
        ("Authorization: Bearer sk-123, next", "Authorization: Bearer ***, next"),
        ("authorization=sk-123", "authorization=***"),
        ("{'x-api-key': 'sk-1'}", "{'x-api-key': '***'}"),
        ("the bearer sk-1 came", "the bearer *** came"),
    ],
)
def test_redaction(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_filters() -> None:
    assert parse_filter("warn,smg.detok=debug") == {"": logging.WARNING, "smg.detok": logging.DEBUG}
    assert parse_filter("smg::router=info, nonsense, x=loud") == {"smg.router": logging.INFO}
    by_level = filter_of(Settings(log_level="info"), {})
    assert by_level == {"": logging.WARNING, "smg": logging.INFO, ACCESS_AREA: logging.WARNING}
    assert filter_of(Settings(log_level="debug"), {})[ACCESS_AREA] == logging.DEBUG
    assert filter_of(Settings(log_level="error"), {})[""] == logging.ERROR
    replaced = filter_of(Settings(log_level="debug"), {"SMG_LOG": "smg.detok=error", "RUST_LOG": "debug"})
    assert replaced == {"": logging.WARNING, "smg.detok": logging.ERROR}
    assert filter_of(Settings(), {"RUST_LOG": "warn,smg=debug"}) == {"": logging.WARNING, "smg": logging.DEBUG}


@pytest.mark.usefixtures("clean_logging")
def test_setup_writes_files_and_can_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUST_LOG", raising=False)
    monkeypatch.setenv("SMG_LOG", "warn,smg.detok=debug")
    settings = Settings(log_dir=str(tmp_path / "logs"), log_json=True)
    setup_logging(settings, "supervisor")
    setup_logging(settings, "detok 0")
    logging.getLogger("smg.detok.run").debug("seen", extra={"request_id": "r1"})
    logging.getLogger("smg.router").info("not seen")
    for handler in logging.getLogger().handlers:
        handler.flush()
    lines = (tmp_path / "logs" / "smg-detok-0.log").read_text().splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["seen"]
    assert len(logging.getLogger().handlers) == 2
    monkeypatch.delenv("SMG_LOG")
    setup_logging(Settings(), "detok 0")
    assert logging.getLogger("smg.detok").level == logging.NOTSET


@pytest.mark.usefixtures("clean_logging")
def test_an_unusable_log_dir_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="'log_dir'"):
        setup_logging(Settings(log_dir=str(tmp_path / "file" / "logs")), "supervisor")


def test_a_full_pipe_drops_lines_and_counts_them() -> None:
    reader, writer = os.pipe()
    try:
        handler = StderrHandler(writer)
        handler.setFormatter(LineFormatter("r", as_json=False))
        before = dropped_lines()
        for _ in range(2000):
            handler.emit(record("x" * 500))
        assert 0 < dropped_lines() - before < 2000
        text = os.read(reader, 1 << 20).decode()
        assert text.endswith("\n")
        assert all(line.endswith("role=r") for line in text.splitlines())
    finally:
        os.close(reader)
        os.close(writer)


def test_a_closed_stderr_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    handler = StderrHandler(writer)
    handler.setFormatter(LineFormatter("r", as_json=False))
    before = dropped_lines()
    handler.emit(record("lost"))
    os.close(writer)
    assert dropped_lines() == before + 1
