"""``smg launch``: settings from the command line, checked, announced, handed to the supervisor."""

from __future__ import annotations

import logging
from typing import Any

import click

from smg.argv import FlagCommand, given_values, options_of
from smg.settings import Settings, check_settings, ignored_flags
from smg.settings_build import build_settings
from smg.telemetry.logs import setup_logging

log = logging.getLogger("smg.launch")


def settings_from_context(ctx: click.Context) -> Settings:
    """Settings of a parsed command line. Raises ``click.UsageError`` or ``ConfigError``."""
    values = given_values(ctx)
    if values.get("service_discovery") and "discovery_provider" in values:
        raise click.UsageError("argument --discovery-provider: not allowed with argument --service-discovery", ctx)
    return build_settings(values)


def run_gateway(settings: Settings) -> int:
    """Check the settings and run the gateway until it is signalled. Raises ``ConfigError``."""
    check_settings(settings)
    setup_logging(settings, "supervisor")
    announce(settings)
    from smg import supervisor
    from smg.history.factory import probe_history

    probe_history(settings)

    return supervisor.run(settings)


def announce(settings: Settings) -> None:
    """The start-up lines an operator looks for."""
    if not (settings.api_key or settings.tenant_api_keys):
        log.warning("no API key is configured: every client that reaches the port may use the gateway")
    if not (settings.api_key or settings.tenant_api_keys or settings.control_plane_api_keys):
        log.warning("the control plane is open: set --api-key or --control-plane-api-keys")
    ignored = ignored_flags(settings)
    if ignored:
        log.warning("flags without effect in this version: %s", " ".join(ignored))
    workers = len(settings.worker_urls) + len(settings.prefill) + len(settings.decode)
    log.info("mode %s, policy %s, %d worker(s) at start", settings.mode, settings.policy, workers)


def _launch(**_values: Any) -> int:
    return run_gateway(settings_from_context(click.get_current_context()))


launch_command = FlagCommand(
    "launch",
    callback=_launch,
    params=[*options_of(Settings)],
    help="Start the gateway. Workers come from --worker-urls or from the workers API.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
