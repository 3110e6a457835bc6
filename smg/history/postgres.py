"""PostgreSQL through asyncpg. The tables are created when they are missing; every name begins with ``smg_``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import asyncpg
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

T = TypeVar("T")
Row = Any
Work = Callable[[Any], Awaitable[T]]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS smg_responses (
    id text PRIMARY KEY, scope text NOT NULL, created double precision NOT NULL, status text NOT NULL, previous text,
    body bytea NOT NULL, input bytea NOT NULL, lease double precision NOT NULL);
CREATE INDEX IF NOT EXISTS smg_responses_age ON smg_responses (created);
CREATE TABLE IF NOT EXISTS smg_response_items (
    item text NOT NULL, response text NOT NULL REFERENCES smg_responses (id) ON DELETE CASCADE,
    PRIMARY KEY (item, response));
CREATE INDEX IF NOT EXISTS smg_response_items_owner ON smg_response_items (response);
CREATE TABLE IF NOT EXISTS smg_conversations (
    id text PRIMARY KEY, scope text NOT NULL, created double precision NOT NULL, metadata bytea NOT NULL);
CREATE TABLE IF NOT EXISTS smg_items (
    seq bigserial PRIMARY KEY, conversation text NOT NULL REFERENCES smg_conversations (id) ON DELETE CASCADE,
    id text NOT NULL, created double precision NOT NULL, body bytea NOT NULL, UNIQUE (conversation, id));
CREATE INDEX IF NOT EXISTS smg_items_id ON smg_items (id);
"""
_SCHEMA_LOCK = 0x736D675F  # two processes that create the tables at once would fail

_COLUMNS = "r.id, r.scope, r.created, r.status, r.previous, r.body, r.input, r.lease"
_RUNNING = "status IN ('queued', 'in_progress')"
_CHAIN = f"""
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 1 FROM smg_responses WHERE id = $1 AND scope = $2
    UNION ALL
    SELECT r.id, r.previous, c.depth + 1 FROM smg_responses r JOIN chain c ON r.id = c.previous
    WHERE r.scope = $2 AND c.depth < $3)
SELECT {_COLUMNS} FROM chain c JOIN smg_responses r ON r.id = c.id ORDER BY c.depth
"""  # noqa: S608 - constants only
_PUT = """
INSERT INTO smg_responses (id, scope, created, status, previous, body, input, lease)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (id) DO UPDATE SET status = excluded.status,
    body = excluded.body, input = excluded.input, lease = excluded.lease
"""


def _record(row: Row) -> StoredResponse:
    return StoredResponse(
        id=row["id"],
        scope=row["scope"],
        created_at=row["created"],
        status=row["status"],
        previous=row["previous"],
        body=row["body"],
        input=row["input"],
        lease=row["lease"],
    )


async def _put(db: Any, record: StoredResponse) -> None:
    await db.execute(
        _PUT, record.id, record.scope, record.created_at, record.status, record.previous, record.body, record.input,
        record.lease,
    )  # fmt: skip
    await db.execute("DELETE FROM smg_response_items WHERE response = $1", record.id)
    rows = [(item, record.id) for item in dict.fromkeys(map(_text, record.item_ids))]
    await db.executemany("INSERT INTO smg_response_items (item, response) VALUES ($1, $2)", rows)


def _text(value: str) -> str:
    """A text that the database can hold: it has no zero byte, so no stored id contains one either."""
    return value.replace("\0", "\ufffd")


class PostgresHistory:
    """``url``: connection URL; ``most``: connections at once; ``seconds``: bound on one call."""

    shared = True

    def __init__(self, url: str, most: int, seconds: float) -> None:
        self._url = url
        self._most = most
        self._seconds = seconds
        self._pool: Any = None

    async def open(self) -> None:
        try:
            async with asyncio.timeout(self._seconds * 2):
                self._pool = await asyncpg.create_pool(
                    self._url, min_size=1, max_size=self._most, command_timeout=self._seconds
                )
                async with self._pool.acquire() as db, db.transaction():
                    await db.execute("SELECT pg_advisory_xact_lock($1)", _SCHEMA_LOCK)
                    await db.execute(_SCHEMA)
        except ValueError as error:
            raise ConfigError(f"Invalid PostgreSQL connection URL: {error}") from None
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise ConfigError(f"PostgreSQL history: {error or 'no answer in time'}") from None

    async def close(self) -> None:
        if self._pool is not None:
            try:
                async with asyncio.timeout(self._seconds):
                    await self._pool.close()
            except TimeoutError:
                self._pool.terminate()

    async def _run(self, work: Work[T]) -> T:
        """The result of one transaction."""
        try:
            async with asyncio.timeout(self._seconds), self._pool.acquire() as db, db.transaction():
                return await work(db)
        except TimeoutError:
            raise storage_unavailable(f"no answer within {self._seconds:g} s") from None
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise storage_unavailable(type(error).__name__) from None

    async def counts(self) -> tuple[int, int, int]:
        """Not known: counting large tables is dear."""
        return (0, 0, 0)

    # Responses -----------------------------------------------------------------------------------

    async def put_response(self, record: StoredResponse) -> None:
        await self._run(lambda db: _put(db, record))

    async def replace_running(self, record: StoredResponse) -> bool:
        async def replace(db: Any) -> bool:
            query = f"SELECT 1 FROM smg_responses WHERE id = $1 AND {_RUNNING} FOR UPDATE"  # noqa: S608
            if await db.fetchrow(query, record.id) is None:
                return False
            await _put(db, record)
            return True

        return await self._run(replace)

    async def get_response(self, scope: str, response_id: str) -> StoredResponse | None:
        found = await self.chain(scope, response_id, 1)
        return found[0] if found else None

    async def chain(self, scope: str, response_id: str, limit: int) -> list[StoredResponse]:
        rows = await self._run(lambda db: db.fetch(_CHAIN, _text(response_id), scope, limit))
        return [_record(row) for row in rows]

    async def delete_response(self, scope: str, response_id: str) -> bool:
        query = "DELETE FROM smg_responses WHERE id = $1 AND scope = $2 RETURNING 1"
        return await self._run(lambda db: db.fetchrow(query, _text(response_id), scope)) is not None

    async def renew(self, response_ids: Sequence[str], lease: float) -> set[str]:
        query = f"UPDATE smg_responses SET lease = $1 WHERE id = ANY($2) AND {_RUNNING} RETURNING id"  # noqa: S608
        rows = await self._run(lambda db: db.fetch(query, lease, list(response_ids)))
        return {row["id"] for row in rows}

    async def find_item(self, scope: str, item_id: str) -> bytes | None:
        name = _text(item_id)

        async def find(db: Any) -> bytes | None:
            row = await db.fetchrow(
                "SELECT i.body FROM smg_items i JOIN smg_conversations c ON c.id = i.conversation "
                "WHERE i.id = $1 AND c.scope = $2",
                name,
                scope,
            )
            if row is not None:
                return bytes(row["body"])
            row = await db.fetchrow(
                f"SELECT {_COLUMNS} FROM smg_response_items i JOIN smg_responses r ON r.id = i.response "  # noqa: S608
                "WHERE i.item = $1 AND r.scope = $2 LIMIT 1",
                name,
                scope,
            )
            return item_in(_record(row), item_id) if row is not None else None

        return await self._run(find)

    # Conversations -------------------------------------------------------------------------------

    async def put_conversation(self, conversation: StoredConversation) -> None:
        metadata = orjson.dumps(conversation.metadata)
        query = (
            "INSERT INTO smg_conversations (id, scope, created, metadata) VALUES ($1, $2, $3, $4) "
            "ON CONFLICT (id) DO UPDATE SET metadata = excluded.metadata"
        )
        values = (conversation.id, conversation.scope, conversation.created_at, metadata)
        await self._run(lambda db: db.execute(query, *values))

    async def get_conversation(self, scope: str, conversation_id: str) -> StoredConversation | None:
        query = "SELECT id, scope, created, metadata FROM smg_conversations WHERE id = $1 AND scope = $2"
        row = await self._run(lambda db: db.fetchrow(query, _text(conversation_id), scope))
        if row is None:
            return None
        return StoredConversation(
            id=row["id"], scope=row["scope"], created_at=row["created"], metadata=orjson.loads(row["metadata"])
        )

    async def delete_conversation(self, scope: str, conversation_id: str) -> bool:
        query = "DELETE FROM smg_conversations WHERE id = $1 AND scope = $2 RETURNING 1"
        return await self._run(lambda db: db.fetchrow(query, _text(conversation_id), scope)) is not None

    async def append_items(self, scope: str, conversation_id: str, items: Sequence[StoredItem]) -> None:
        now = time.time()
        rows = [(conversation_id, _text(item.id), now, item.body) for item in items]

        async def append(db: Any) -> None:
            # The lock keeps the items of one call together: their order is that of their sequence numbers.
            query = "SELECT 1 FROM smg_conversations WHERE id = $1 AND scope = $2 FOR UPDATE"
            if await db.fetchrow(query, _text(conversation_id), scope) is not None:
                await db.executemany(
                    "INSERT INTO smg_items (conversation, id, created, body) VALUES ($1, $2, $3, $4) "
                    "ON CONFLICT DO NOTHING",
                    rows,
                )

        await self._run(append)

    async def list_items(
        self, conversation_id: str, *, newest_first: bool, limit: int, after: str | None = None
    ) -> ItemPage:
        order, compare = ("DESC", "<") if newest_first else ("ASC", ">")
        name = _text(conversation_id)

        async def page(db: Any) -> list[Row]:
            start = await db.fetchval(
                "SELECT seq FROM smg_items WHERE conversation = $1 AND id = $2", name, _text(after or "")
            )
            bound = f"AND seq {compare} $3" if start is not None else ""
            query = f"SELECT id, body FROM smg_items WHERE conversation = $1 {bound} ORDER BY seq {order} LIMIT $2"  # noqa: S608
            rows: list[Row] = await db.fetch(query, name, limit + 1, *(() if start is None else (start,)))
            return rows

        rows = await self._run(page)
        items = [StoredItem(id=row["id"], body=row["body"]) for row in rows[:limit]]
        return ItemPage(items=items, has_more=len(rows) > limit)

    async def get_item(self, conversation_id: str, item_id: str) -> StoredItem | None:
        query = "SELECT id, body FROM smg_items WHERE conversation = $1 AND id = $2"
        row = await self._run(lambda db: db.fetchrow(query, _text(conversation_id), _text(item_id)))
        return StoredItem(id=row["id"], body=row["body"]) if row is not None else None

    async def delete_item(self, conversation_id: str, item_id: str) -> None:
        query = "DELETE FROM smg_items WHERE conversation = $1 AND id = $2"
        await self._run(lambda db: db.execute(query, _text(conversation_id), _text(item_id)))
