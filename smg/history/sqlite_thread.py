"""One SQLite connection in a thread of its own, with group commit.

Operations are plain functions of the connection; each is atomic (a savepoint). Everything that waits when the thread
comes round is committed together, so that many small writes share one synchronisation of the disk, and no caller
hears of success before its write is on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], Any]
_Job = tuple[Operation, asyncio.Future[Any], asyncio.AbstractEventLoop, bool]

MAX_BATCH = 256
BUSY_SECS = 30.0


class SqliteThread:
    """See the module's text. ``durable`` synchronises the disk with every commit; without it the data survives the
    death of the process, not that of the machine."""

    def __init__(self, path: str, schema: str, *, durable: bool) -> None:
        self._path = path
        self._schema = schema
        self._durable = durable
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def open(self) -> None:
        """Open the file and create what is missing. Raises ``sqlite3.Error``."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(opened, loop), name="history", daemon=True)
        self._thread.start()
        await opened

    async def close(self) -> None:
        """Finish what is queued and close the file."""
        if self._thread is not None:
            self._jobs.put(None)
            thread, self._thread = self._thread, None
            await asyncio.get_running_loop().run_in_executor(None, thread.join)

    async def run(self, operation: Callable[[sqlite3.Connection], T], *, write: bool) -> T:
        """The result of ``operation``, after its changes (``write``) are committed. Raises ``sqlite3.Error``."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._jobs.put((operation, done, loop, write))
        return await done

    # In the thread -------------------------------------------------------------------------------

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=BUSY_SECS, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'OFF'}")
        db.execute("PRAGMA foreign_keys=ON")
        db.executescript(self._schema)
        return db

    def _run(self, opened: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
        try:
            db = self._connect()
        except sqlite3.Error as error:
            _tell(loop, [(opened, None, error)])
            return
        _tell(loop, [(opened, None, None)])
        with contextlib.closing(db):
            while self._round(db):
                pass

    def _round(self, db: sqlite3.Connection) -> bool:
        """One batch; False at the end."""
        first = self._jobs.get()
        if first is None:
            return False
        batch, last = [first], False
        while len(batch) < MAX_BATCH:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                last = True
                break
            batch.append(job)
        self._commit(db, batch)
        return not last

    def _commit(self, db: sqlite3.Connection, batch: list[_Job]) -> None:
        results: list[tuple[asyncio.Future[Any], Any, Exception | None]] = []
        try:
            db.execute("BEGIN IMMEDIATE" if any(job[3] for job in batch) else "BEGIN")
            results = [(done, *_attempt(db, operation)) for operation, done, _loop, _write in batch]
            db.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            results = [(done, None, error) for _operation, done, _loop, _write in batch]
        _tell(batch[0][2], results)


def _attempt(db: sqlite3.Connection, operation: Operation) -> tuple[Any, Exception | None]:
    """Run one operation; a failing one leaves no trace."""
    db.execute("SAVEPOINT one")
    try:
        result, error = operation(db), None
    except Exception as problem:
        result, error = None, problem
        db.execute("ROLLBACK TO one")
    db.execute("RELEASE one")
    return result, error


def _tell(loop: asyncio.AbstractEventLoop, results: list[tuple[asyncio.Future[Any], Any, Exception | None]]) -> None:
    def resolve() -> None:
        for done, value, error in results:
            if done.done():
                continue
            if error is None:
                done.set_result(value)
            else:
                done.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
        loop.call_soon_threadsafe(resolve)
