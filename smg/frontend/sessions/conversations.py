"""HTTP routes of ``/v1/conversations``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from smg.api.decode import BodyDecoder
from smg.api.errors import refused
from smg.api.responses_items import check_items, parse_items
from smg.frontend.http import Request
from smg.frontend.sessions.items import Item, fresh, stored_item
from smg.frontend.sessions.manager import Sessions
from smg.frontend.sessions.paging import Page, listing, segment
from smg.history.base import StoredConversation, StoredItem

if TYPE_CHECKING:
    from smg.frontend.app import App, Handler

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_NEW_ITEMS = 20
FULL_TYPES = ("message", "reasoning", "mcp_list_tools", "mcp_call", "function_call", "function_call_output")


class _NewItems(msgspec.Struct):
    items: list[dict[str, Any]]


_decode_any = BodyDecoder[Any](object, style="extractor").decode
_decode_items = BodyDecoder(_NewItems, style="extractor").decode


def _invalid(message: str, param: str) -> Exception:
    return refused("invalid_request", message, param=param)


def _checked_metadata(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise _invalid("metadata must be an object", "metadata")
    for key, member in value.items():
        if len(key) > MAX_METADATA_KEY:
            raise _invalid(f"a metadata key is longer than {MAX_METADATA_KEY} characters", "metadata")
        if isinstance(member, str) and len(member) > MAX_METADATA_VALUE:
            raise _invalid(f"the value of '{key}' is longer than {MAX_METADATA_VALUE} characters", "metadata")
    return value


def _bounded(metadata: dict[str, Any]) -> dict[str, Any]:
    if len(metadata) > MAX_METADATA:
        raise _invalid(f"metadata has {len(metadata)} keys, at most {MAX_METADATA} are allowed", "metadata")
    return metadata


def conversation_object(conversation: StoredConversation) -> dict[str, Any]:
    """A conversation as clients see it."""
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created_at),
        "metadata": conversation.metadata,
    }


class ConversationRoutes:
    """The handlers; ``table`` says which paths and methods they serve."""

    def __init__(self, app: App, sessions: Sessions) -> None:
        self.app = app
        self.sessions = sessions
        self.history = sessions.history

    def table(self) -> list[tuple[str, str, Handler]]:
        """(method, path template, handler)."""
        one, items = "/v1/conversations/{id}", "/v1/conversations/{id}/items"
        return [
            ("POST", "/v1/conversations", self.create),
            ("GET", one, self.get),
            ("POST", one, self.update),
            ("DELETE", one, self.delete),
            ("GET", items, self.list_items),
            ("POST", items, self.add_items),
            ("GET", f"{items}/{{item_id}}", self.get_item),
            ("DELETE", f"{items}/{{item_id}}", self.delete_item),
        ]

    def _scope(self, request: Request) -> str:
        return self.app.auth.tenant(request.headers.get("authorization"))

    async def _conversation(self, request: Request) -> StoredConversation:
        name = segment(request, 3)
        found = await self.history.get_conversation(self._scope(request), name)
        if found is None:
            raise refused("not_found", f"Conversation '{name}' not found", status=404)
        return found

    # Conversations -------------------------------------------------------------------------------

    async def create(self, request: Request) -> None:
        """A new conversation; first items may be in the body."""
        raw = await self.app.read_body(request)
        body = _decode_any(raw, request.headers) if raw else {}
        fields = body if type(body) is dict else {}
        metadata = fields.get("metadata")
        conversation = StoredConversation(
            id=fresh("conv_"),
            scope=self._scope(request),
            created_at=time.time(),
            metadata=_bounded(_checked_metadata(metadata)) if metadata is not None else {},
        )
        given = fields.get("items") or []
        if type(given) is not list or not all(type(item) is dict for item in given):
            raise _invalid("items must be a list of objects", "items")
        items, _ = await self._new_items(conversation, given)
        await self.history.put_conversation(conversation)
        if items:
            await self._append(conversation, items)
        await request.respond_json(200, conversation_object(conversation))

    async def get(self, request: Request) -> None:
        await request.respond_json(200, conversation_object(await self._conversation(request)))

    async def update(self, request: Request) -> None:
        """Merge metadata; null removes a key."""
        conversation = await self._conversation(request)
        body = _decode_any(await self.app.read_body(request), request.headers)
        changes = body.get("metadata") if type(body) is dict else None
        if changes is not None:
            merged = {**conversation.metadata, **_checked_metadata(changes)}
            conversation.metadata = _bounded({key: value for key, value in merged.items() if value is not None})
            await self.history.put_conversation(conversation)
        await request.respond_json(200, conversation_object(conversation))

    async def delete(self, request: Request) -> None:
        conversation = await self._conversation(request)
        await self.history.delete_conversation(conversation.scope, conversation.id)
        shown = {"id": conversation.id, "object": "conversation.deleted", "deleted": True}
        await request.respond_json(200, shown)

    # Items ---------------------------------------------------------------------------------------

    async def list_items(self, request: Request) -> None:
        """A page of items, newest first unless the query says otherwise."""
        conversation = await self._conversation(request)
        page = Page.of(request)
        found = await self.history.list_items(
            conversation.id, newest_first=page.newest_first, limit=page.limit, after=page.after
        )
        data = [orjson.loads(item.body) for item in found.items]
        await request.respond_json(200, listing(data, has_more=found.has_more))

    async def add_items(self, request: Request) -> None:
        """Append items; the answer lists them as stored."""
        conversation = await self._conversation(request)
        given = _decode_items(await self.app.read_body(request), request.headers).items
        if len(given) > MAX_NEW_ITEMS:
            raise _invalid(f"Cannot add more than {MAX_NEW_ITEMS} items at a time", "items")
        items, warnings = await self._new_items(conversation, given)
        await self._append(conversation, items)
        answer = listing(items, has_more=False)
        if warnings:
            answer["warnings"] = warnings
        await request.respond_json(200, answer)

    async def _new_items(
        self, conversation: StoredConversation, given: list[dict[str, Any]]
    ) -> tuple[list[Item], list[str]]:
        check_items(parse_items(given))
        items: list[Item] = []
        warnings: list[str] = []
        for value in given:
            item = stored_item(value)
            kind = item["type"]
            if kind == "item_reference":
                [item] = await self.sessions.resolve_references([item], conversation.scope, [])
            elif kind not in FULL_TYPES:
                warnings.append(f"Items of type '{kind}' are stored, but not shown to models")
            items.append(item)
        return items, warnings

    async def _append(self, conversation: StoredConversation, items: list[Item]) -> None:
        stored = [StoredItem(id=item["id"], body=orjson.dumps(item)) for item in items]
        await self.history.append_items(conversation.scope, conversation.id, stored)

    async def get_item(self, request: Request) -> None:
        conversation = await self._conversation(request)
        name = segment(request, 5)
        item = await self.history.get_item(conversation.id, name)
        if item is None:
            raise refused("not_found", f"Item '{name}' not found in this conversation", status=404)
        await request.respond(200, [("content-type", "application/json")], item.body)

    async def delete_item(self, request: Request) -> None:
        """Remove an item, if there is one; the conversation is the answer."""
        conversation = await self._conversation(request)
        await self.history.delete_item(conversation.id, segment(request, 5))
        await request.respond_json(200, conversation_object(conversation))
