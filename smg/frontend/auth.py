"""Who may call what: the data-plane key, tenant keys, control-plane keys.

======================  ==================================  =====================================
configured              serving routes                      admin routes
======================  ==================================  =====================================
nothing                 open                                open
``--api-key K``         K                                   K
``+ --tenant-api-key``  K or a tenant key                   K only
only tenant keys        a tenant key                        always 401
control-plane keys      unchanged                           admin key: all; user key: reads only
======================  ==================================  =====================================

Keys are compared by digest, so neither their length nor their prefix shows in the timing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from smg.settings import Settings

OPEN, SERVING, ADMIN = "open", "serving", "admin"


@dataclass(frozen=True, slots=True)
class Denied:
    """Why a request is refused. ``control_plane`` failures are plain text, the others use the API's envelope."""

    status: int
    message: str
    challenge: str = ""
    control_plane: bool = False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Authenticator:
    """Checks the Authorization header of a request against the configured keys."""

    def __init__(self, settings: Settings) -> None:
        self._shared = _digest(settings.api_key) if settings.api_key else None
        self._tenants = {_digest(key): tenant for tenant, key in settings.tenant_api_keys}
        self._control = {_digest(entry.key): entry.role for entry in settings.control_plane_api_keys}

    def check(self, group: str, method: str, authorization: str | None) -> Denied | None:
        """None if the request may pass. ``group`` is OPEN, SERVING or ADMIN."""
        if group == ADMIN and self._control:
            return self._check_control(method, authorization)
        if group == OPEN or (self._shared is None and not self._tenants):
            return None
        token = _bearer(authorization)
        if token is not None:
            digest = _digest(token)
            if digest == self._shared or (group == SERVING and digest in self._tenants):
                return None
        challenge = 'Bearer realm="data-plane"' + (', error="invalid_token"' if token is not None else "")
        return Denied(401, "Incorrect or missing API key", challenge)

    def tenant(self, authorization: str | None) -> str:
        """Whose records a request may see: the tenant of its key, "" for the shared key and for an open gateway."""
        token = _bearer(authorization) if self._tenants else None
        return self._tenants.get(_digest(token), "") if token is not None else ""

    def _check_control(self, method: str, authorization: str | None) -> Denied | None:
        token = _bearer(authorization)
        if token is None:
            return Denied(401, "Missing or invalid Authorization header", control_plane=True)
        role = self._control.get(_digest(token))
        if role is None:
            return Denied(401, "Invalid authentication token", control_plane=True)
        if role != "admin" and method not in ("GET", "HEAD"):
            return Denied(403, "Admin role required for this control plane operation", control_plane=True)
        return None


def _bearer(authorization: str | None) -> str | None:
    if authorization is None:
        return None
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and token else None
