"""Makes the policy that the settings name."""

from __future__ import annotations

from smg.router.policies.base import Policy
from smg.router.policies.round_robin import RoundRobin
from smg.settings import Settings
from smg.telemetry.router_metrics import RouterMetrics


def make_policy(settings: Settings, metrics: RouterMetrics) -> Policy:
    """A fresh policy for one model."""
    return RoundRobin()
