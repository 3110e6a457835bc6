"""Which backend the settings ask for."""

from __future__ import annotations

import asyncio
from pathlib import Path

from smg.history.base import History
from smg.history.memory import Bounds, MemoryHistory
from smg.history.none import NoHistory
from smg.history.sqlite import SqliteHistory
from smg.settings import ConfigError, Settings

DAY_SECS = 86400.0


def make_history(settings: Settings, run_dir: Path) -> History:
    """The backend of ``--history-backend``, not yet open.

    In-memory records must be the same for every HTTP process: with one of them they are in its memory, with several
    in a database file of the gateway's private run directory, which is removed when the gateway ends. Raises
    ``ConfigError`` for a backend that is not there."""
    backend = settings.history_backend
    if backend == "none":
        return NoHistory()
    if backend == "memory":
        bounds = Bounds(
            settings.history_memory_max_responses,
            settings.history_memory_max_items,
            float(settings.history_memory_retention_secs),
            settings.history_memory_max_bytes,
        )
        if settings.frontend_procs == 1:
            return MemoryHistory(bounds)
        return SqliteHistory(run_dir / "history" / "records.db", bounds, durable=False, shared=True)
    days = settings.history_sqlite_retention_days
    if backend == "sqlite":
        bounds = Bounds(retention=days * DAY_SECS if days > 0 else 0.0)
        return SqliteHistory(Path(settings.history_sqlite_path or ""), bounds, durable=True, shared=True)
    return _database(settings, backend)


def probe_history(settings: Settings) -> None:
    """Open the configured database once, so that one that cannot be used stops the start. Raises ``ConfigError``."""
    if settings.history_backend in ("sqlite", "postgres", "redis"):
        asyncio.run(_probe(make_history(settings, Path())))


async def _probe(history: History) -> None:
    try:
        await history.open()
    finally:
        await history.close()


def _database(settings: Settings, backend: str) -> History:
    """The drivers are imported here and nowhere else, so that only those who use them need them."""
    try:
        if backend == "postgres":
            from smg.history.postgres import PostgresHistory

            url, seconds = settings.postgres_db_url or "", float(settings.postgres_op_timeout_secs)
            return PostgresHistory(url, settings.postgres_pool_max, seconds)
        if backend == "redis":
            from smg.history.redis import RedisHistory

            url, seconds = settings.redis_url or "", float(settings.redis_op_timeout_secs)
            return RedisHistory(url, settings.redis_pool_max, settings.redis_retention_days, seconds)
    except ImportError as error:
        raise ConfigError(f"--history-backend {backend} needs the extra smg[{backend}]: {error}") from None
    raise ConfigError(f"--history-backend {backend} is not supported by this version")
