"""What an engine's gRPC status means for the client, for a retry and for the worker's circuit breaker."""

from __future__ import annotations

_HTTP = {
    "UNAVAILABLE": 503, "RESOURCE_EXHAUSTED": 429, "DEADLINE_EXCEEDED": 504, "CANCELLED": 502, "UNKNOWN": 500,
    "DATA_LOSS": 500, "INTERNAL": 500, "INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 400, "OUT_OF_RANGE": 400,
    "NOT_FOUND": 404, "ALREADY_EXISTS": 409, "ABORTED": 409, "PERMISSION_DENIED": 403, "UNAUTHENTICATED": 401,
    "UNIMPLEMENTED": 501,
}  # fmt: skip
_RETRYABLE = frozenset(("UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN", "DATA_LOSS"))
_CALLER_ERRORS = frozenset(
    ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE", "NOT_FOUND", "ALREADY_EXISTS", "ABORTED",
     "PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED")
)  # fmt: skip


def http_status(code: str) -> int:
    """HTTP status of a generation that failed with this gRPC status."""
    return _HTTP.get(code, 500)


def is_retryable(code: str) -> bool:
    """Whether another attempt may succeed, as long as the engine sent nothing yet."""
    return code in _RETRYABLE


def breaker_outcome(code: str) -> str:
    """``"success"`` (the caller's own fault), ``"neutral"`` (rate limit) or ``"failure"``."""
    if code in _CALLER_ERRORS:
        return "success"
    return "neutral" if code == "RESOURCE_EXHAUSTED" else "failure"
