"""``--history-backend none``: requests work, nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence

from smg.history.base import ItemPage, StoredConversation, StoredItem, StoredResponse


class NoHistory:
    """Accepts every write and holds nothing."""

    shared = False

    async def open(self) -> None:
        """There is nothing to connect to."""

    async def close(self) -> None:
        """There is nothing to close."""

    async def counts(self) -> tuple[int, int, int]:
        return (0, 0, 0)

    async def put_response(self, record: StoredResponse) -> None:
        """Forgotten at once."""

    async def replace_running(self, record: StoredResponse) -> bool:
        return True

    async def get_response(self, scope: str, response_id: str) -> StoredResponse | None:
        return None

    async def chain(self, scope: str, response_id: str, limit: int) -> list[StoredResponse]:
        return []

    async def delete_response(self, scope: str, response_id: str) -> bool:
        return False

    async def renew(self, response_ids: Sequence[str], lease: float) -> set[str]:
        return set(response_ids)

    async def find_item(self, scope: str, item_id: str) -> bytes | None:
        return None

    async def put_conversation(self, conversation: StoredConversation) -> None:
        """Forgotten at once."""

    async def get_conversation(self, scope: str, conversation_id: str) -> StoredConversation | None:
        return None

    async def delete_conversation(self, scope: str, conversation_id: str) -> bool:
        return False

    async def append_items(self, scope: str, conversation_id: str, items: Sequence[StoredItem]) -> None:
        """Forgotten at once."""

    async def list_items(
        self, conversation_id: str, *, newest_first: bool, limit: int, after: str | None = None
    ) -> ItemPage:
        return ItemPage(items=[])

    async def get_item(self, conversation_id: str, item_id: str) -> StoredItem | None:
        return None

    async def delete_item(self, conversation_id: str, item_id: str) -> None:
        """There is none."""
