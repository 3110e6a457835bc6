"""Path segments, query parameters and list objects of the stored-record routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote

from smg.api.errors import refused
from smg.frontend.http import Request

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000
MAX_FIELDS = 64


def segment(request: Request, index: int) -> str:
    """A segment of the request's path; ``/v1/responses/x`` has "x" at 3."""
    return unquote(request.path.split("/")[index])


def query_of(request: Request) -> dict[str, str]:
    """The query parameters; of repeated ones the last counts. Raises ``ApiError``."""
    try:
        pairs = parse_qsl(
            request.scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_FIELDS
        )
    except ValueError:
        raise refused("invalid_request", "Too many query parameters") from None
    return dict(pairs)


def integer(query: Mapping[str, str], name: str, default: int, *, least: int) -> int:
    """An integer parameter. Raises ``ApiError`` when it is none, or below ``least``."""
    text = query.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise refused("invalid_value", f"{name}: expected an integer of at least {least}", param=name)
    return value


@dataclass(frozen=True, slots=True)
class Page:
    """``limit``, ``order`` and ``after`` of a list request. A limit of 0 is the default, a large one is cut."""

    limit: int
    newest_first: bool
    after: str | None

    @classmethod
    def of(cls, request: Request) -> Page:
        """Raises ``ApiError``."""
        query = query_of(request)
        limit = integer(query, "limit", DEFAULT_LIMIT, least=0)
        return cls(min(limit, MAX_LIMIT) or DEFAULT_LIMIT, query.get("order") != "asc", query.get("after") or None)


def listing(data: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A list object."""
    return {
        "object": "list",
        "data": list(data),
        "has_more": has_more,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
