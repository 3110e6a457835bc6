"""Deployment files name flags, environment variables, ports and series that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from smg.settings import Settings, flags
from smg.telemetry.cells import Cell, HistogramCell
from smg.telemetry.metrics import (
    DetokMetrics,
    FrontendMetrics,
    PoolMetrics,
    ProcessMetrics,
    ProxyMetrics,
    SessionMetrics,
    SupervisorMetrics,
)  # fmt: skip
from smg.telemetry.router_metrics import RouterMetrics
from smg.telemetry.series import Counters, Gauges, Histograms

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "smg"
DASHBOARD = DEPLOY / "grafana" / "smg.json"
RULES = DEPLOY / "prometheus" / "rules.yaml"


def series_names(source: Any) -> set[str]:
    """Names of all families that an object or its members hold, as they are exposed."""
    found: set[str] = set()
    for member in vars(source).values():
        for each in member.values() if isinstance(member, dict) else [member]:
            if isinstance(each, Histograms | HistogramCell):
                found |= {f"{each.name}_{suffix}" for suffix in ("bucket", "sum", "count")}
            elif isinstance(each, Counters | Gauges | Cell):
                found.add(each.name)
            elif type(each).__module__.startswith("smg.telemetry") and hasattr(each, "__dict__"):
                found |= series_names(each)
    return found


@pytest.fixture(scope="module")
def known() -> set[str]:
    groups = [
        FrontendMetrics(), SessionMetrics(), PoolMetrics(), DetokMetrics(), ProxyMetrics(), ProcessMetrics("detok"),
        SupervisorMetrics(["detok"]), RouterMetrics(),
    ]  # fmt: skip
    names = set().union(*(series_names(each) for each in groups))
    assert len(names) > 80
    return names


def options() -> set[str]:
    names: set[str] = set()
    for field, flag in flags().items():
        names |= {flag.option or "--" + field.replace("_", "-"), *flag.aliases}
    return names


def test_every_series_is_named_like_the_project(known: set[str]) -> None:
    assert [name for name in known if not name.startswith("smg_")] == []


def test_rules_use_known_series(known: set[str]) -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    used = {name for rule in rules for name in re.findall(r"\bsmg[_:][a-z0-9_:]+", rule["expr"])}
    assert len(used) > 8
    assert used - known - recorded == set()
    assert all(rule["annotations"]["summary"] for rule in rules if "alert" in rule)


def test_dashboard_uses_known_series(known: set[str]) -> None:
    board = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    used = {name for text in expressions for name in re.findall(r"\bsmg_[a-z0-9_]+", text)}
    assert len(used) > 20
    assert used - known == set()
    identities = [panel["id"] for panel in board["panels"]]
    assert len(identities) == len(set(identities))


@pytest.mark.parametrize(
    "path", [CHART / "templates" / "deployment.yaml", DEPLOY / "compose.yaml"], ids=lambda p: p.name
)
def test_flags_exist(path: Path) -> None:
    of_other_commands = {"--model-name", "--step-ms", "--profile", "--build"}
    used = set(re.findall(r"(?:^|[\s\"'\[])(--[a-z][a-z0-9-]+)", path.read_text(), re.MULTILINE))
    assert len(used) > 3
    assert used - options() - of_other_commands == set()


def test_ports_agree_with_the_defaults() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    defaults = Settings()
    assert (values["apiPort"], values["metricsPort"]) == (defaults.port, defaults.prometheus_port)
    assert f"EXPOSE {defaults.port} {defaults.prometheus_port}" in (DEPLOY / "Dockerfile").read_text()
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == [f"gateway:{defaults.prometheus_port}"]


def test_environment_variables_of_keys_exist() -> None:
    known_variables = {flag.env for flag in flags().values() if flag.env}
    for path in (CHART / "values.yaml", DEPLOY / "compose.yaml"):
        used = set(re.findall(r"\bSMG_[A-Z_]+", path.read_text()))
        assert used
        assert used - known_variables == set()


def test_the_pod_may_live_as_long_as_its_requests() -> None:
    text = (CHART / "templates" / "deployment.yaml").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert "terminationGracePeriodSeconds: {{ add .Values.shutdownGracePeriodSecs 15 }}" in text
    assert values["drainDelaySecs"] < values["shutdownGracePeriodSecs"]
    assert Settings().shutdown_grace_period_secs == values["shutdownGracePeriodSecs"]


def test_compose_starts_the_engine_and_the_gateway() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert services["engine"]["command"][0] == "sim-engine"
    assert "grpc://engine:31000" in services["gateway"]["command"]
