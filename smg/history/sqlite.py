"""SQLite: the embedded durable backend, and the shared store of several HTTP processes without a database."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson

from smg.flags import ConfigError
from smg.history.base import (
    ItemPage,
    StoredConversation,
    StoredItem,
    StoredResponse,
    item_in,
    storage_unavailable,
)
from smg.history.memory import Bounds
from smg.history.sqlite_thread import SqliteThread

T = TypeVar("T")

OP_SECS = 30.0
TRIM_EVERY = 64
TRIM_STEP = 32
_PAGE_PRAGMAS = ("page_count", "freelist_count", "page_size")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, scope TEXT NOT NULL, created REAL NOT NULL, status TEXT NOT NULL,
    previous TEXT, body BLOB NOT NULL, input BLOB NOT NULL, items INTEGER NOT NULL, lease REAL NOT NULL);
CREATE INDEX IF NOT EXISTS responses_age ON responses (created);
CREATE TABLE IF NOT EXISTS response_items (
    item TEXT NOT NULL, response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
    PRIMARY KEY (item, response)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS response_items_owner ON response_items (response);
CREATE TABLE IF NOT EXISTS conversations (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, scope TEXT NOT NULL, created REAL NOT NULL,
    metadata BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS items (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE, id TEXT NOT NULL, created REAL NOT NULL,
    body BLOB NOT NULL, UNIQUE (conversation, id));
CREATE INDEX IF NOT EXISTS items_id ON items (id);
"""

_COLUMNS = "r.id, r.scope, r.created, r.status, r.previous, r.body, r.input, r.lease"
_RUNNING = "status IN ('queued', 'in_progress')"
_CHAIN = f"""
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 1 FROM responses WHERE id = :id AND scope = :scope
    UNION ALL
    SELECT r.id, r.previous, c.depth + 1 FROM responses r JOIN chain c ON r.id = c.previous
    WHERE r.scope = :scope AND c.depth < :limit)
SELECT {_COLUMNS} FROM chain c JOIN responses r ON r.id = c.id ORDER BY c.depth
"""  # noqa: S608 - constants only


def _record(row: tuple[Any, ...]) -> StoredResponse:
    name, scope, created, status, previous, body, items, lease = row
    return StoredResponse(
        id=name, scope=scope, created_at=created, status=status, previous=previous, body=body, input=items, lease=lease
    )


def _put(db: sqlite3.Connection, record: StoredResponse) -> None:
    db.execute(
        "INSERT INTO responses (id, scope, created, status, previous, body, input, items, lease) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET status = excluded.status, "
        "body = excluded.body, input = excluded.input, items = excluded.items, lease = excluded.lease",
        (
            record.id, record.scope, record.created_at, record.status, record.previous, record.body, record.input,
            len(record.item_ids), record.lease,
        ),
    )  # fmt: skip
    db.execute("DELETE FROM response_items WHERE response = ?", (record.id,))
    rows = [(item, record.id) for item in dict.fromkeys(record.item_ids)]
    db.executemany("INSERT INTO response_items (item, response) VALUES (?, ?)", rows)


class SqliteHistory:
    """``path``: the database file. ``bounds``: what is kept. ``durable``: survive the machine, not only the process.
    ``shared``: other processes work on the same file."""

    def __init__(self, path: Path, bounds: Bounds, *, durable: bool, shared: bool) -> None:
        self.shared = shared
        self._path = path
        self._bounds = bounds
        self._thread = SqliteThread(str(path), _SCHEMA, durable=durable)
        self._writes = 0

    async def open(self) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.touch(mode=0o600)
            await self._thread.open()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"history database {self._path}: {error}") from None

    async def close(self) -> None:
        await self._thread.close()

    async def _run(self, operation: Callable[[sqlite3.Connection], T], *, write: bool = False) -> T:
        try:
            async with asyncio.timeout(OP_SECS):
                return await self._thread.run(operation, write=write)
        except TimeoutError:
            raise storage_unavailable(f"no answer within {OP_SECS:g} s") from None
        except sqlite3.Error as error:
            raise storage_unavailable(str(error)) from None

    async def _write(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        self._writes += 1
        trim = self._writes % TRIM_EVERY == 0
        bounds, now = self._bounds, time.time()

        def write(db: sqlite3.Connection) -> T:
            result = operation(db)
            if trim:
                _trim(db, bounds, now)
            return result

        return await self._run(write, write=True)

    async def counts(self) -> tuple[int, int, int]:
        def count(db: sqlite3.Connection) -> tuple[int, int, int]:
            row = db.execute(
                "SELECT (SELECT count(*) FROM responses), (SELECT count(*) FROM conversations), "
                "(SELECT count(*) FROM items) + (SELECT coalesce(sum(items), 0) FROM responses)"
            ).fetchone()
            return row[0], row[1], row[2]

        return await self._run(count)

    # Responses -----------------------------------------------------------------------------------

    async def put_response(self, record: StoredResponse) -> None:
        await self._write(lambda db: _put(db, record))

    async def replace_running(self, record: StoredResponse) -> bool:
        def replace(db: sqlite3.Connection) -> bool:
            query = f"SELECT 1 FROM responses WHERE id = ? AND {_RUNNING}"  # noqa: S608
            if db.execute(query, (record.id,)).fetchone() is None:
                return False
            _put(db, record)
            return True

        return await self._write(replace)

    async def get_response(self, scope: str, response_id: str) -> StoredResponse | None:
        found = await self.chain(scope, response_id, 1)
        return found[0] if found else None

    async def chain(self, scope: str, response_id: str, limit: int) -> list[StoredResponse]:
        values = {"id": response_id, "scope": scope, "limit": limit}
        rows = await self._run(lambda db: db.execute(_CHAIN, values).fetchall())
        return [_record(row) for row in rows]

    async def delete_response(self, scope: str, response_id: str) -> bool:
        query = "DELETE FROM responses WHERE id = ? AND scope = ?"
        return await self._write(lambda db: db.execute(query, (response_id, scope)).rowcount > 0)

    async def renew(self, response_ids: Sequence[str], lease: float) -> set[str]:
        query = f"UPDATE responses SET lease = ? WHERE id = ? AND {_RUNNING}"  # noqa: S608

        def extend(db: sqlite3.Connection) -> set[str]:
            return {name for name in response_ids if db.execute(query, (lease, name)).rowcount}

        return await self._write(extend)

    async def find_item(self, scope: str, item_id: str) -> bytes | None:
        def find(db: sqlite3.Connection) -> bytes | None:
            row = db.execute(
                "SELECT i.body FROM items i JOIN conversations c ON c.id = i.conversation "
                "WHERE i.id = ? AND c.scope = ?",
                (item_id, scope),
            ).fetchone()
            if row is not None:
                body: bytes = row[0]
                return body
            row = db.execute(
                f"SELECT {_COLUMNS} FROM response_items i JOIN responses r ON r.id = i.response "  # noqa: S608
                "WHERE i.item = ? AND r.scope = ? LIMIT 1",
                (item_id, scope),
            ).fetchone()
            return item_in(_record(row), item_id) if row is not None else None

        return await self._run(find)

    # Conversations -------------------------------------------------------------------------------

    async def put_conversation(self, conversation: StoredConversation) -> None:
        values = (conversation.id, conversation.scope, conversation.created_at, orjson.dumps(conversation.metadata))
        query = (
            "INSERT INTO conversations (id, scope, created, metadata) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET metadata = excluded.metadata"
        )
        await self._write(lambda db: db.execute(query, values))

    async def get_conversation(self, scope: str, conversation_id: str) -> StoredConversation | None:
        query = "SELECT id, scope, created, metadata FROM conversations WHERE id = ? AND scope = ?"
        row = await self._run(lambda db: db.execute(query, (conversation_id, scope)).fetchone())
        if row is None:
            return None
        return StoredConversation(id=row[0], scope=row[1], created_at=row[2], metadata=orjson.loads(row[3]))

    async def delete_conversation(self, scope: str, conversation_id: str) -> bool:
        query = "DELETE FROM conversations WHERE id = ? AND scope = ?"
        return await self._write(lambda db: db.execute(query, (conversation_id, scope)).rowcount > 0)

    async def append_items(self, scope: str, conversation_id: str, items: Sequence[StoredItem]) -> None:
        now = time.time()
        rows = [(conversation_id, item.id, now, item.body) for item in items]

        def append(db: sqlite3.Connection) -> None:
            known = db.execute("SELECT 1 FROM conversations WHERE id = ? AND scope = ?", (conversation_id, scope))
            if known.fetchone() is not None:
                query = "INSERT OR IGNORE INTO items (conversation, id, created, body) VALUES (?, ?, ?, ?)"
                db.executemany(query, rows)

        await self._write(append)

    async def list_items(
        self, conversation_id: str, *, newest_first: bool, limit: int, after: str | None = None
    ) -> ItemPage:
        order, compare = ("DESC", "<") if newest_first else ("ASC", ">")

        def page(db: sqlite3.Connection) -> list[tuple[str, bytes]]:
            start = db.execute("SELECT seq FROM items WHERE conversation = ? AND id = ?", (conversation_id, after))
            row = start.fetchone()
            bound = f"AND seq {compare} {int(row[0])}" if row is not None else ""
            query = f"SELECT id, body FROM items WHERE conversation = ? {bound} ORDER BY seq {order} LIMIT ?"  # noqa: S608
            return db.execute(query, (conversation_id, limit + 1)).fetchall()

        rows = await self._run(page)
        items = [StoredItem(id=name, body=body) for name, body in rows[:limit]]
        return ItemPage(items=items, has_more=len(rows) > limit)

    async def get_item(self, conversation_id: str, item_id: str) -> StoredItem | None:
        query = "SELECT id, body FROM items WHERE conversation = ? AND id = ?"
        row = await self._run(lambda db: db.execute(query, (conversation_id, item_id)).fetchone())
        return StoredItem(id=row[0], body=row[1]) if row is not None else None

    async def delete_item(self, conversation_id: str, item_id: str) -> None:
        query = "DELETE FROM items WHERE conversation = ? AND id = ?"
        await self._write(lambda db: db.execute(query, (conversation_id, item_id)))


def _trim(db: sqlite3.Connection, bounds: Bounds, now: float) -> None:
    """Delete what is over the bounds, oldest first."""
    if bounds.retention:
        oldest = (now - bounds.retention,)
        db.execute("DELETE FROM responses WHERE created < ?", oldest)
        db.execute("DELETE FROM items WHERE created < ?", oldest)
        db.execute(
            "DELETE FROM conversations WHERE created < ? AND NOT EXISTS "
            "(SELECT 1 FROM items WHERE conversation = conversations.id)",
            oldest,
        )
    if bounds.responses:
        for table in ("responses", "conversations"):
            _keep_newest(db, table, bounds.responses)
    if bounds.items:
        while _count(db) > bounds.items and _drop_oldest(db):
            pass
    if bounds.size:
        while _used_bytes(db) > bounds.size and _drop_oldest(db):
            pass


def _keep_newest(db: sqlite3.Connection, table: str, keep: int) -> None:
    query = f"DELETE FROM {table} WHERE seq <= (SELECT seq FROM {table} ORDER BY seq DESC LIMIT 1 OFFSET ?)"  # noqa: S608
    db.execute(query, (keep,))


def _count(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT (SELECT count(*) FROM items) + (SELECT coalesce(sum(items), 0) FROM responses)").fetchone()
    return int(row[0])


def _used_bytes(db: sqlite3.Connection) -> int:
    pages, free, size = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in _PAGE_PRAGMAS)
    return int((pages - free) * size)


def _drop_oldest(db: sqlite3.Connection) -> bool:
    """Delete the oldest few responses or items, whichever are older; False when there is nothing left."""
    response = db.execute("SELECT created FROM responses ORDER BY seq LIMIT 1").fetchone()
    item = db.execute("SELECT created FROM items ORDER BY seq LIMIT 1").fetchone()
    if response is None and item is None:
        return False
    table = "responses" if response is not None and (item is None or response[0] <= item[0]) else "items"
    query = f"DELETE FROM {table} WHERE seq IN (SELECT seq FROM {table} ORDER BY seq LIMIT {TRIM_STEP})"  # noqa: S608
    db.execute(query)
    return True
