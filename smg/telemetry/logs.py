"""Structured logs of all processes: one line per record on stderr, as text or JSON.

Text::

    2026-01-31T12:00:00.123Z INFO  smg.detok.run stream ended role=detok-0 request_id=chatcmpl-abc tokens=12

JSON has the same members: ``time``, ``level``, ``area``, ``message``, ``role``, the fields given with ``extra=`` and,
for an exception, ``error``. The filter is ``warn,smg=LEVEL``; ``SMG_LOG`` (or ``RUST_LOG``) replaces it, for
example ``SMG_LOG=warn,smg.detok=debug``. The area ``smg.access`` (one line per request) is quiet unless the level is
debug or the variable names it.

A record never holds prompts or keys: callers do not pass them, and bearer tokens and URL credentials are blotted out
here once more. Writing never blocks the event loop: a line is dropped, and counted, when nobody reads stderr.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import re
import select
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from smg.settings import ConfigError, Settings

LEVELS = {
    "off": logging.CRITICAL + 10,
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
}
ACCESS_AREA = "smg.access"
MAX_LINE_BYTES = select.PIPE_BUF
FILE_BYTES = 64 * 1024 * 1024
FILE_GENERATIONS = 4

_NAMES = {10: "DEBUG", 20: "INFO", 30: "WARN", 40: "ERROR", 50: "ERROR"}
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
_BEARER = re.compile(
    r"(?i)\b(bearer\s+|authorization['\"]?\s*[:=]\s*['\"]?(?!bearer)|x-api-key['\"]?\s*[:=]\s*['\"]?)[^\s'\",]+"
)
# Credentials before "@" in a URL; "host:port@3" (a data-parallel rank) is none.
_URL_CREDENTIALS = re.compile(r"(://)[^/\s@]+@(?!\d+(?:[^\w.:-]|$))")
_configured_areas: set[str] = set()
_dropped = 0


def redact(text: str) -> str:
    """The text without bearer tokens, API key headers and URL credentials."""
    if "://" in text and "@" in text:
        text = _URL_CREDENTIALS.sub(r"\1***@", text)
    return _BEARER.sub(r"\1***", text)


def dropped_lines() -> int:
    """Lines this process dropped because stderr could not take them."""
    return _dropped


def parse_filter(text: str) -> dict[str, int]:
    """``"warn,smg.detok=debug"`` -> ``{"": 30, "smg.detok": 10}``; unknown words are ignored, ``::`` means ``.``."""
    levels: dict[str, int] = {}
    for part in text.split(","):
        area, equals, name = part.strip().rpartition("=")
        level = LEVELS.get(name.strip().lower())
        if level is not None:
            levels[area.strip().replace("::", ".") if equals else ""] = level
    return levels


def filter_of(settings: Settings, environ: dict[str, str] | None = None) -> dict[str, int]:
    """Levels by area: from the environment, else from ``--log-level``."""
    environ = dict(os.environ) if environ is None else environ
    for variable in ("SMG_LOG", "RUST_LOG"):
        chosen = parse_filter(environ.get(variable, ""))
        if chosen:
            chosen.setdefault("", logging.WARNING)
            return chosen
    level = LEVELS[settings.log_level]
    access = level if level <= logging.DEBUG else max(level, logging.WARNING)
    return {"": max(level, logging.WARNING), "smg": level, ACCESS_AREA: access}


class LineFormatter(logging.Formatter):
    """Makes one line of a record. ``limit`` bounds its length in bytes (0 = unbounded)."""

    def __init__(self, role: str, *, as_json: bool, limit: int = 0) -> None:
        super().__init__()
        self._role = role
        self._as_json = as_json
        self._limit = limit
        self._second, self._prefix = 0, ""

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        message = self._cut(redact(record.getMessage()), self._limit // 2)
        error = redact(self.formatException(record.exc_info)) if record.exc_info else ""
        error = self._cut(error, self._limit // 4)
        level = _NAMES.get(record.levelno, record.levelname)
        if self._as_json:
            line: dict[str, Any] = {
                "time": self._time(record.created),
                "level": level.lower(),
                "area": record.name,
                "message": message,
                "role": self._role,
                **{name: self._field(value) for name, value in fields.items()},
            }
            if error:
                line["error"] = error
            return orjson.dumps(line, default=str).decode()
        words = [self._time(record.created), f"{level:<5}", record.name, message.replace("\n", "\\n")]
        words.append(f"role={self._role}")
        words += [f"{name}={_word(self._field(value))}" for name, value in fields.items()]
        return " ".join(words) + ("\n" + error if error else "")

    def _time(self, created: float) -> str:
        second = int(created)
        if second != self._second:
            self._second, self._prefix = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._prefix}.{int((created - second) * 1000):03d}Z"

    def _field(self, value: object) -> object:
        if value is None or isinstance(value, int | float):
            return value
        return self._cut(redact(str(value)), self._limit // 16)

    def _cut(self, text: str, limit: int) -> str:
        if not limit or len(text) <= limit:
            return text
        return text[: limit // 4] + " [...] " + text[-(limit * 3 // 4) :]


def _word(value: object) -> str:
    text = str(value)
    if text and not any(c in text for c in ' "=\n\r\t'):
        return text
    return orjson.dumps(text).decode()


class StderrHandler(logging.Handler):
    """Writes whole lines to a descriptor that may be a pipe nobody reads."""

    def __init__(self, fd: int = 2) -> None:
        super().__init__()
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        global _dropped
        try:
            data = self.format(record).encode("utf-8", "backslashreplace")
            if len(data) >= MAX_LINE_BYTES:
                data = data[: MAX_LINE_BYTES - 1]
            # A pipe is writable when MAX_LINE_BYTES fit, so this write neither blocks nor mixes with others' lines.
            ready = self._poll.poll(0)
            if ready and ready[0][1] & select.POLLOUT:
                os.write(self._fd, data + b"\n")
            else:
                _dropped += 1
        except OSError:
            _dropped += 1
        except Exception:
            self.handleError(record)


def setup_logging(settings: Settings, role: str) -> None:
    """Configure the logs of this process; ``role`` names it in every line and its file ("detok-0").

    May be called again in a forked child. Raises ``ConfigError`` when ``--log-dir`` cannot be used.
    """
    role = role.replace(" ", "-")
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    stderr = StderrHandler(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2)
    stderr.setFormatter(LineFormatter(role, as_json=settings.log_json, limit=MAX_LINE_BYTES))
    root.addHandler(stderr)
    if settings.log_dir:
        root.addHandler(_file_handler(settings, role))
    levels = filter_of(settings)
    for area in _configured_areas - set(levels):
        logging.getLogger(area).setLevel(logging.NOTSET)
    _configured_areas.clear()
    for area, level in levels.items():
        logging.getLogger(area or None).setLevel(level)
        _configured_areas.add(area)
    _configured_areas.discard("")
    logging.captureWarnings(True)
    logging.raiseExceptions = False


def _file_handler(settings: Settings, role: str) -> logging.Handler:
    directory = Path(settings.log_dir or ".")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            directory / f"smg-{role}.log", maxBytes=FILE_BYTES, backupCount=FILE_GENERATIONS, encoding="utf-8"
        )
    except OSError as error:
        raise ConfigError(
            f"Configuration error: Invalid value for field 'log_dir': {directory} - cannot be created: {error}"
        ) from error
    handler.setFormatter(LineFormatter(role, as_json=settings.log_json))
    return handler
