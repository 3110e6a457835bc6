"""Worker selection policies, one file each."""

from smg.router.policies.base import Policy, RouteFacts
from smg.router.policies.factory import make_policy

__all__ = ["Policy", "RouteFacts", "make_policy"]
