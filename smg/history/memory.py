"""The default backend of a gateway with one HTTP process: dictionaries with bounds, oldest out first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from smg.history.base import (
    RUNNING,
    ItemPage,
    StoredConversation,
    StoredItem,
    StoredResponse,
    item_in,
)


@dataclass(frozen=True)
class Bounds:
    """Limits of what is kept; 0 = no limit. ``responses`` bounds the conversations too, ``items`` the items of
    responses and conversations together, ``retention`` is in seconds, ``size`` in bytes of content."""

    responses: int = 0
    items: int = 0
    retention: float = 0.0
    size: int = 0


def exact(content: bytes) -> bytes:
    """A copy that occupies no more than its length. Bytes that a JSON encoder made may sit in a buffer of several
    kilobytes for as long as they live."""
    return bytes(memoryview(content))


@dataclass(slots=True)
class _Conversation:
    head: StoredConversation
    items: dict[str, StoredItem] = field(default_factory=dict)


class MemoryHistory:
    """Everything in this process. Dictionaries keep insertion order, which is the order of age."""

    shared = False

    def __init__(self, bounds: Bounds, clock: Callable[[], float] = time.time) -> None:
        self._bounds = bounds
        self._clock = clock
        self._responses: dict[str, StoredResponse] = {}
        self._conversations: dict[str, _Conversation] = {}
        self._log: dict[tuple[str, str], float] = {}  # (conversation, item) -> time it was added
        self._holders: dict[str, list[tuple[str, str]]] = {}  # item id -> ("r" or "c", id of its holder)
        self._response_items = 0
        self._size = 0

    async def open(self) -> None:
        """There is nothing to connect to."""

    async def close(self) -> None:
        """There is nothing to close."""

    async def counts(self) -> tuple[int, int, int]:
        return len(self._responses), len(self._conversations), self._response_items + len(self._log)

    @property
    def size(self) -> int:
        """Bytes of content held."""
        return self._size

    # Responses -----------------------------------------------------------------------------------

    async def put_response(self, record: StoredResponse) -> None:
        self._drop_response(record.id)
        record.body, record.input = exact(record.body), exact(record.input)
        self._responses[record.id] = record
        self._response_items += len(record.item_ids)
        self._size += record.size
        for item_id in record.item_ids:
            self._holders.setdefault(item_id, []).append(("r", record.id))
        self._evict()

    async def replace_running(self, record: StoredResponse) -> bool:
        current = self._responses.get(record.id)
        if current is None or current.status not in RUNNING:
            return False
        await self.put_response(record)
        return True

    async def get_response(self, scope: str, response_id: str) -> StoredResponse | None:
        self._expire()
        record = self._responses.get(response_id)
        return record if record is not None and record.scope == scope else None

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
        if await self.get_response(scope, response_id) is None:
            return False
        self._drop_response(response_id)
        return True

    async def renew(self, response_ids: Sequence[str], lease: float) -> set[str]:
        running = {name for name in response_ids if name in self._responses and self._responses[name].status in RUNNING}
        for name in running:
            self._responses[name].lease = lease
        return running

    async def find_item(self, scope: str, item_id: str) -> bytes | None:
        for kind, holder in self._holders.get(item_id, ()):
            if kind == "r":
                record = self._responses[holder]
                if record.scope == scope:
                    return item_in(record, item_id)
            elif self._conversations[holder].head.scope == scope:
                return self._conversations[holder].items[item_id].body
        return None

    def _drop_response(self, response_id: str) -> None:
        record = self._responses.pop(response_id, None)
        if record is None:
            return
        self._response_items -= len(record.item_ids)
        self._size -= record.size
        for item_id in record.item_ids:
            self._forget_holder(item_id, ("r", response_id))

    def _forget_holder(self, item_id: str, holder: tuple[str, str]) -> None:
        holders = self._holders.get(item_id)
        if holders is not None and holder in holders:
            holders.remove(holder)
            if not holders:
                del self._holders[item_id]

    # Conversations -------------------------------------------------------------------------------

    async def put_conversation(self, conversation: StoredConversation) -> None:
        entry = self._conversations.get(conversation.id)
        if entry is None:
            self._conversations[conversation.id] = _Conversation(conversation)
        else:
            entry.head = conversation
        self._evict()

    async def get_conversation(self, scope: str, conversation_id: str) -> StoredConversation | None:
        self._expire()
        entry = self._conversations.get(conversation_id)
        return entry.head if entry is not None and entry.head.scope == scope else None

    async def delete_conversation(self, scope: str, conversation_id: str) -> bool:
        if await self.get_conversation(scope, conversation_id) is None:
            return False
        self._drop_conversation(conversation_id)
        return True

    async def append_items(self, scope: str, conversation_id: str, items: Sequence[StoredItem]) -> None:
        entry = self._conversations.get(conversation_id)
        if entry is None or entry.head.scope != scope:
            return
        now = self._clock()
        for item in items:
            if item.id not in entry.items:
                item.body = exact(item.body)
                entry.items[item.id] = item
                self._log[conversation_id, item.id] = now
                self._size += len(item.body)
                self._holders.setdefault(item.id, []).append(("c", conversation_id))
        self._evict()

    async def list_items(
        self, conversation_id: str, *, newest_first: bool, limit: int, after: str | None = None
    ) -> ItemPage:
        entry = self._conversations.get(conversation_id)
        if entry is None:
            return ItemPage(items=[])
        items = iter(reversed(entry.items.values()) if newest_first else entry.items.values())
        if after is not None and after in entry.items:
            for item in items:
                if item.id == after:
                    break
        page = list(islice(items, limit + 1))
        return ItemPage(items=page[:limit], has_more=len(page) > limit)

    async def get_item(self, conversation_id: str, item_id: str) -> StoredItem | None:
        entry = self._conversations.get(conversation_id)
        return entry.items.get(item_id) if entry is not None else None

    async def delete_item(self, conversation_id: str, item_id: str) -> None:
        entry = self._conversations.get(conversation_id)
        item = entry.items.pop(item_id, None) if entry is not None else None
        if item is not None:
            self._size -= len(item.body)
            self._log.pop((conversation_id, item_id), None)
            self._forget_holder(item_id, ("c", conversation_id))

    def _drop_conversation(self, conversation_id: str) -> None:
        entry = self._conversations.pop(conversation_id)
        for item in entry.items.values():
            self._size -= len(item.body)
            self._log.pop((conversation_id, item.id), None)
            self._forget_holder(item.id, ("c", conversation_id))

    # Bounds --------------------------------------------------------------------------------------

    def _evict(self) -> None:
        bounds = self._bounds
        while bounds.responses and len(self._responses) > bounds.responses:
            self._drop_response(next(iter(self._responses)))
        while bounds.responses and len(self._conversations) > bounds.responses:
            self._drop_conversation(next(iter(self._conversations)))
        while self._too_much():
            self._drop_oldest()
        self._expire()

    def _too_much(self) -> bool:
        bounds = self._bounds
        count = self._response_items + len(self._log)
        if not self._responses and not self._log:
            return False
        return bool((bounds.items and count > bounds.items) or (bounds.size and self._size > bounds.size))

    def _drop_oldest(self) -> None:
        response = next(iter(self._responses.values()), None)
        key, added = next(iter(self._log.items()), (("", ""), 0.0))
        if response is not None and (not key[0] or response.created_at <= added):
            self._drop_response(response.id)
        else:
            self._drop_item(key)

    def _drop_item(self, key: tuple[str, str]) -> None:
        self._log.pop(key)
        item = self._conversations[key[0]].items.pop(key[1])
        self._size -= len(item.body)
        self._forget_holder(key[1], ("c", key[0]))

    def _expire(self) -> None:
        if not self._bounds.retention:
            return
        oldest = self._clock() - self._bounds.retention
        while self._responses and next(iter(self._responses.values())).created_at < oldest:
            self._drop_response(next(iter(self._responses)))
        while self._log and next(iter(self._log.values())) < oldest:
            self._drop_item(next(iter(self._log)))
        while self._conversations:
            first = next(iter(self._conversations.values()))
            if first.items or first.head.created_at >= oldest:
                break
            self._drop_conversation(first.head.id)
