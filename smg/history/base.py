"""Stored responses and conversations: what is kept, and the one interface every backend implements.

A record belongs to a *scope* (the tenant whose key made it; "" without tenants) and is invisible to every other one.
A write that has returned is durable as far as the backend promises durability. Every method raises ``ApiError`` (503
``storage_unavailable``) when the backend does not answer in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from smg.api.errors import ApiError, refused

RUNNING = ("queued", "in_progress")


class StoredResponse(msgspec.Struct, kw_only=True):
    """One response. ``body`` is the JSON text of the response object, ``input`` that of the list of its own input
    items, ``item_ids`` the ids of its input and output items. ``lease`` (wall-clock seconds): until then the process
    that works on a queued or running response is known to live; 0 for finished ones."""

    id: str
    scope: str
    created_at: float
    status: str
    body: bytes
    input: bytes = b"[]"
    previous: str | None = None
    item_ids: list[str] = []
    lease: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of content."""
        return len(self.body) + len(self.input)


class StoredConversation(msgspec.Struct, kw_only=True):
    """A conversation without its items."""

    id: str
    scope: str
    created_at: float
    metadata: dict[str, object] = {}


class StoredItem(msgspec.Struct, kw_only=True):
    """One item of a conversation; ``body`` is its JSON text."""

    id: str
    body: bytes


class ItemPage(msgspec.Struct, kw_only=True):
    """A part of a conversation's items, and whether more follow."""

    items: list[StoredItem]
    has_more: bool = False


class OutputOf(msgspec.Struct):
    """The output items of a response object."""

    output: list[msgspec.Raw] = []


class IdOf(msgspec.Struct):
    """The id of an item."""

    id: str = ""


_decode_output = msgspec.json.Decoder(OutputOf).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_id = msgspec.json.Decoder(IdOf).decode


def items_of(record: StoredResponse) -> list[bytes]:
    """The JSON texts of the input and output items of a response, in order."""
    return [bytes(raw) for raw in (*_decode_items(record.input), *_decode_output(record.body).output)]


def item_in(record: StoredResponse, item_id: str) -> bytes | None:
    """The JSON text of one item of a response."""
    return next((body for body in items_of(record) if _decode_id(body).id == item_id), None)


def storage_unavailable(what: str) -> ApiError:
    """The refusal of a request whose storage call failed or took too long."""
    return refused("storage_unavailable", f"History storage is unavailable: {what}", status=503)


class History(Protocol):
    """A backend."""

    @property
    def shared(self) -> bool:
        """Whether other processes may change the records (a cancellation can arrive through the storage)."""

    async def open(self) -> None:
        """Connect. Raises ``ConfigError`` when the backend cannot be used at all."""

    async def close(self) -> None:
        """Finish pending writes and disconnect."""

    async def counts(self) -> tuple[int, int, int]:
        """How many responses, conversations and conversation items are kept; (0, 0, 0) where that is not known."""

    # Responses

    async def put_response(self, record: StoredResponse) -> None:
        """Add or replace a response."""

    async def replace_running(self, record: StoredResponse) -> bool:
        """Replace a response that is queued or in progress; False, and nothing changed, if it no longer is."""

    async def get_response(self, scope: str, response_id: str) -> StoredResponse | None:
        """One response."""

    async def chain(self, scope: str, response_id: str, limit: int) -> list[StoredResponse]:
        """A response and those it continues, newest first, at most ``limit``; it ends where one is missing."""

    async def delete_response(self, scope: str, response_id: str) -> bool:
        """Whether there was such a response."""

    async def renew(self, response_ids: Sequence[str], lease: float) -> set[str]:
        """Extend the leases of queued or running responses; the ids that still are."""

    async def find_item(self, scope: str, item_id: str) -> bytes | None:
        """The JSON text of an item, whichever response or conversation holds it."""

    # Conversations

    async def put_conversation(self, conversation: StoredConversation) -> None:
        """Add a conversation or replace its metadata."""

    async def get_conversation(self, scope: str, conversation_id: str) -> StoredConversation | None:
        """One conversation."""

    async def delete_conversation(self, scope: str, conversation_id: str) -> bool:
        """Delete it with its items; whether there was one."""

    async def append_items(self, scope: str, conversation_id: str, items: Sequence[StoredItem]) -> None:
        """Add items at the end; an id that the conversation already holds is left alone."""

    async def list_items(
        self, conversation_id: str, *, newest_first: bool, limit: int, after: str | None = None
    ) -> ItemPage:
        """A page of items behind the item ``after``; from the start when that is unknown."""

    async def get_item(self, conversation_id: str, item_id: str) -> StoredItem | None:
        """One item of a conversation."""

    async def delete_item(self, conversation_id: str, item_id: str) -> None:
        """Remove an item; nothing happens if there is none."""
