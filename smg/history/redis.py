"""Redis through its official client. All keys begin with ``smg:``; every record expires by itself.

``smg:r:ID``  hash of a response; ``smg:c:ID``  JSON of a conversation; ``smg:c:ID:order``  sorted set of its item ids;
``smg:c:ID:items``  hash of their bodies; ``smg:i:ITEM``  set of the keys of the response or conversation that holds
an item; ``smg:seq``  the counter that orders items.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import orjson
import redis.asyncio as client
from redis.exceptions import RedisError

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

DAY_SECS = 86400
# Replace a response only while it is queued or running. KEYS[1]: the response; ARGV: field, value, ...
_REPLACE = """
local status = redis.call('HGET', KEYS[1], 'status')
if status ~= 'queued' and status ~= 'in_progress' then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV))
return 1
"""
_RENEW = """
local status = redis.call('HGET', KEYS[1], 'status')
if status ~= 'queued' and status ~= 'in_progress' then return 0 end
redis.call('HSET', KEYS[1], 'lease', ARGV[1])
return 1
"""


def _fields(record: StoredResponse) -> dict[str, Any]:
    return {
        "scope": record.scope, "created": repr(record.created_at), "status": record.status, "body": record.body,
        "input": record.input, "previous": record.previous or "", "lease": repr(record.lease),
        "items": orjson.dumps(record.item_ids),
    }  # fmt: skip


def _record(name: str, fields: dict[bytes, bytes]) -> StoredResponse:
    return StoredResponse(
        id=name,
        scope=fields[b"scope"].decode(),
        created_at=float(fields[b"created"]),
        status=fields[b"status"].decode(),
        body=fields[b"body"],
        input=fields[b"input"],
        previous=fields[b"previous"].decode() or None,
        item_ids=orjson.loads(fields[b"items"]),
        lease=float(fields[b"lease"]),
    )


class RedisHistory:
    """``url``: connection URL; ``most``: connections at once; ``days``: life of a record, -1 = for ever; ``seconds``:
    bound on one call."""

    shared = True

    def __init__(self, url: str, most: int, days: int, seconds: float) -> None:
        self._url = url
        self._most = most
        self._seconds = seconds
        self._life = days * DAY_SECS if days > 0 else 0
        self._db: Any = None

    async def open(self) -> None:
        try:
            pool = client.BlockingConnectionPool.from_url(self._url, max_connections=self._most, timeout=self._seconds)
            self._db = client.Redis(connection_pool=pool)
            async with asyncio.timeout(self._seconds):
                await self._db.ping()
        except ValueError as error:
            raise ConfigError(f"Invalid Redis connection URL: {error}") from None
        except (OSError, TimeoutError, RedisError) as error:
            raise ConfigError(f"Redis history: {error or 'no answer in time'}") from None

    async def close(self) -> None:
        if self._db is not None:
            await self._db.aclose(close_connection_pool=True)

    async def _run(self, work: Callable[[Any], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._seconds):
                return await work(self._db)
        except TimeoutError:
            raise storage_unavailable(f"no answer within {self._seconds:g} s") from None
        except (OSError, RedisError) as error:
            raise storage_unavailable(type(error).__name__) from None

    def _expire(self, pipe: Any, *keys: str) -> None:
        if self._life:
            for key in keys:
                pipe.expire(key, self._life)

    async def counts(self) -> tuple[int, int, int]:
        """Not known: counting keys is dear."""
        return (0, 0, 0)

    # Responses -----------------------------------------------------------------------------------

    def _index(self, pipe: Any, holder: str, item_ids: Sequence[str]) -> None:
        for item in item_ids:
            key = f"smg:i:{item}"
            pipe.sadd(key, holder)
            self._expire(pipe, key)

    async def put_response(self, record: StoredResponse) -> None:
        async def put(db: Any) -> None:
            async with db.pipeline(transaction=True) as pipe:
                key = f"smg:r:{record.id}"
                pipe.hset(key, mapping=_fields(record))
                self._expire(pipe, key)
                self._index(pipe, f"r:{record.id}", record.item_ids)
                await pipe.execute()

        await self._run(put)

    async def replace_running(self, record: StoredResponse) -> bool:
        arguments = [part for pair in _fields(record).items() for part in pair]

        async def replace(db: Any) -> bool:
            if not await db.eval(_REPLACE, 1, f"smg:r:{record.id}", *arguments):
                return False
            async with db.pipeline(transaction=True) as pipe:
                self._index(pipe, f"r:{record.id}", record.item_ids)
                await pipe.execute()
            return True

        return await self._run(replace)

    async def get_response(self, scope: str, response_id: str) -> StoredResponse | None:
        fields = await self._run(lambda db: db.hgetall(f"smg:r:{response_id}"))
        if not fields:
            return None
        record = _record(response_id, fields)
        return record if record.scope == scope else None

    async def chain(self, scope: str, response_id: str, limit: int) -> list[StoredResponse]:
        found: list[StoredResponse] = []
        name: str | None = response_id
        while name is not None and len(found) < limit:
            record = await self.get_response(scope, name)
            if record is None:
                break
            found.append(record)
            name = record.previous
        return found

    async def delete_response(self, scope: str, response_id: str) -> bool:
        record = await self.get_response(scope, response_id)
        if record is None:
            return False

        async def delete(db: Any) -> bool:
            async with db.pipeline(transaction=True) as pipe:
                pipe.delete(f"smg:r:{response_id}")
                for item in record.item_ids:
                    pipe.srem(f"smg:i:{item}", f"r:{response_id}")
                return bool((await pipe.execute())[0])

        return await self._run(delete)

    async def renew(self, response_ids: Sequence[str], lease: float) -> set[str]:
        async def extend(db: Any) -> list[int]:
            async with db.pipeline(transaction=False) as pipe:
                for name in response_ids:
                    pipe.eval(_RENEW, 1, f"smg:r:{name}", repr(lease))
                answers: list[int] = await pipe.execute()
                return answers

        answers = await self._run(extend)
        return {name for name, answer in zip(response_ids, answers, strict=True) if answer}

    async def find_item(self, scope: str, item_id: str) -> bytes | None:
        holders = await self._run(lambda db: db.smembers(f"smg:i:{item_id}"))
        for holder in holders:
            kind, _, name = holder.decode().partition(":")
            body: bytes | None = None
            if kind == "r":
                record = await self.get_response(scope, name)
                body = item_in(record, item_id) if record is not None else None
            elif await self.get_conversation(scope, name) is not None:
                item = await self.get_item(name, item_id)
                body = item.body if item is not None else None
            if body is not None:
                return body
        return None

    # Conversations -------------------------------------------------------------------------------

    async def put_conversation(self, conversation: StoredConversation) -> None:
        text = orjson.dumps([conversation.scope, conversation.created_at, conversation.metadata])
        await self._run(lambda db: db.set(f"smg:c:{conversation.id}", text, ex=self._life or None))

    async def get_conversation(self, scope: str, conversation_id: str) -> StoredConversation | None:
        text = await self._run(lambda db: db.get(f"smg:c:{conversation_id}"))
        if text is None:
            return None
        owner, created, metadata = orjson.loads(text)
        if owner != scope:
            return None
        return StoredConversation(id=conversation_id, scope=scope, created_at=created, metadata=metadata)

    async def delete_conversation(self, scope: str, conversation_id: str) -> bool:
        if await self.get_conversation(scope, conversation_id) is None:
            return False
        key = f"smg:c:{conversation_id}"
        deleted = await self._run(lambda db: db.delete(key, f"{key}:order", f"{key}:items"))
        return bool(deleted)

    async def append_items(self, scope: str, conversation_id: str, items: Sequence[StoredItem]) -> None:
        if not items or await self.get_conversation(scope, conversation_id) is None:
            return
        key = f"smg:c:{conversation_id}"

        async def append(db: Any) -> None:
            last = await db.incrby("smg:seq", len(items))
            async with db.pipeline(transaction=True) as pipe:
                for place, item in enumerate(items, last - len(items) + 1):
                    pipe.zadd(f"{key}:order", {item.id: place}, nx=True)
                    pipe.hsetnx(f"{key}:items", item.id, item.body)
                self._index(pipe, f"c:{conversation_id}", [item.id for item in items])
                self._expire(pipe, key, f"{key}:order", f"{key}:items")
                await pipe.execute()

        await self._run(append)

    async def list_items(
        self, conversation_id: str, *, newest_first: bool, limit: int, after: str | None = None
    ) -> ItemPage:
        key = f"smg:c:{conversation_id}"

        async def page(db: Any) -> tuple[list[bytes], list[bytes | None]]:
            rank = db.zrevrank if newest_first else db.zrank
            start = await rank(f"{key}:order", after) if after is not None else None
            first = 0 if start is None else start + 1
            names = await db.zrange(f"{key}:order", first, first + limit, desc=newest_first)
            return names, await db.hmget(f"{key}:items", names) if names else []

        names, bodies = await self._run(page)
        items = [StoredItem(id=name.decode(), body=body) for name, body in zip(names, bodies, strict=True) if body]
        return ItemPage(items=items[:limit], has_more=len(names) > limit)

    async def get_item(self, conversation_id: str, item_id: str) -> StoredItem | None:
        body = await self._run(lambda db: db.hget(f"smg:c:{conversation_id}:items", item_id))
        return StoredItem(id=item_id, body=body) if body is not None else None

    async def delete_item(self, conversation_id: str, item_id: str) -> None:
        key = f"smg:c:{conversation_id}"

        async def delete(db: Any) -> None:
            async with db.pipeline(transaction=True) as pipe:
                pipe.zrem(f"{key}:order", item_id)
                pipe.hdel(f"{key}:items", item_id)
                pipe.srem(f"smg:i:{item_id}", f"c:{conversation_id}")
                await pipe.execute()

        await self._run(delete)
