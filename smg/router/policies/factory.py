"""Makes the policy that the settings, or a model's worker, name."""

from __future__ import annotations

import random

from smg.router.policies.base import Policy
from smg.router.policies.bucket import Bucket
from smg.router.policies.cache_aware import CacheAware
from smg.router.policies.consistent_hashing import ConsistentHashing
from smg.router.policies.least_load import LeastLoad
from smg.router.policies.manual import Manual
from smg.router.policies.override import StickyOverride
from smg.router.policies.passthrough import Passthrough
from smg.router.policies.power_of_two import PowerOfTwo
from smg.router.policies.prefix_hash import PrefixHash
from smg.router.policies.random import Random
from smg.router.policies.round_robin import RoundRobin
from smg.router.policies.score import LoadScore
from smg.router.policies.sticky import Assigner, StickyKeys
from smg.settings import Settings
from smg.telemetry.router_metrics import RouterMetrics

# Policies that pin keys themselves; sticky sessions add nothing to them.
KEYED = frozenset(("manual", "consistent_hashing"))


def make_policy(
    settings: Settings,
    metrics: RouterMetrics,
    model: str = "",
    name: str = "",
    rng: random.Random | None = None,
) -> Policy:
    """A fresh policy for one model: ``name`` if given, else ``--policy``, under sticky sessions if those are on.

    Raises ``ValueError`` for a name that is no policy.
    """
    name = name or settings.policy
    rng = rng or random.Random()
    policy = _bare(name, settings, metrics, model, rng)
    if not settings.routing_key_override or name in KEYED:
        return policy
    mode = settings.assignment_mode or "delegate"
    assign = None if mode == "delegate" else Assigner(mode, rng)
    return StickyOverride(policy, _keys(settings, metrics), assign, metrics.policies)


def _keys(settings: Settings, metrics: RouterMetrics) -> StickyKeys:
    return StickyKeys(float(settings.max_idle_secs), metrics)


def _bare(name: str, settings: Settings, metrics: RouterMetrics, model: str, rng: random.Random) -> Policy:
    score = LoadScore(settings, rng)
    match name:
        case "round_robin":
            return RoundRobin()
        case "random":
            return Random(rng)
        case "passthrough":
            return Passthrough()
        case "power_of_two":
            return PowerOfTwo(score, settings.power_of_two_load_metric, rng)
        case "least_load":
            return LeastLoad(score, settings.least_load_max_waiting_requests)
        case "cache_aware":
            return CacheAware(settings, score, metrics.policies, model)
        case "prefix_hash":
            return PrefixHash(settings, score, metrics.policies)
        case "consistent_hashing":
            return ConsistentHashing(rng, metrics.policies)
        case "manual":
            assign = Assigner(settings.assignment_mode or "random", rng)
            return Manual(_keys(settings, metrics), assign, rng, metrics.policies)
        case "bucket":
            return Bucket(settings, score)
    raise ValueError(f"unknown worker selection policy '{name}'")
