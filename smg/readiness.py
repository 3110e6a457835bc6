"""The readiness rule, the same on the API port and on the probe port, and the refusal of models nobody serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg.api.errors import ApiError, refused
from smg.messages import ModelTable


def readiness(table: ModelTable, *, draining: bool, waiting_for: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
    """Status and body of the readiness probe: ready while at least one worker is, and not draining. ``waiting_for``:
    MCP servers without which the process is not to be used."""
    if draining:
        return 503, {"status": "not ready", "reason": "draining"}
    if waiting_for:
        return 503, {"status": "not ready", "reason": f"required MCP servers: {', '.join(waiting_for)}"}
    if table.workers_ready == 0:
        return 503, {"status": "not ready", "reason": "insufficient healthy workers"}
    return 200, {"status": "ready", "healthy_workers": table.workers_ready, "total_workers": table.workers_total}


def unserved(table: ModelTable, name: str) -> ApiError:
    """The refusal of a model that is not in the table. While no engine has told its model yet, it may be one of those:
    the client is asked to come back (503), not told that there is no such model (404)."""
    if table.workers_total and not table.models:
        text = f"No worker is ready yet for model '{name}'"
        return ApiError(503, "no_available_workers", text, gateway=True, headers=(("retry-after", "1"),))
    return refused("model_not_found", f"No worker available for model '{name}'", status=404)
