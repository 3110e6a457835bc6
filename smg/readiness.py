"""The readiness rule, the same on the API port and on the probe port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
