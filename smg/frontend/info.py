"""Routes that a frontend answers from what the router has broadcast: health, readiness, models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from smg import __version__
from smg.api.errors import refused
from smg.frontend.http import Request
from smg.messages import ModelInfo
from smg.readiness import readiness

if TYPE_CHECKING:
    from smg.frontend.process import FrontendProcess


def model_object(model: ModelInfo) -> dict[str, Any]:
    """One entry of the models list."""
    return {"id": model.id, "object": "model", "created": 0, "owned_by": "self_hosted"}


class InfoRoutes:
    """Handlers without a body; every one answers at once."""

    def __init__(self, process: FrontendProcess) -> None:
        self.process = process

    def public(self) -> dict[str, Callable[[Request], Awaitable[None]]]:
        """GET routes by path."""
        return {
            "/health": self.health,
            "/liveness": self.health,
            "/readiness": self.readiness,
            "/health_generate": self.health_generate,
            "/v1/models": self.models,
            "/get_model_info": self.model_info,
            "/get_server_info": self.server_info,
        }

    async def health(self, request: Request) -> None:
        await request.respond_text(200, "OK")

    async def readiness(self, request: Request) -> None:
        process = self.process
        waiting_for = process.sessions.tool_host.waiting_for
        status, body = readiness(process.models, draining=process.draining, waiting_for=waiting_for)
        await request.respond_json(status, body)

    async def health_generate(self, request: Request) -> None:
        await request.respond_text(501, "Health generate not implemented")

    async def models(self, request: Request) -> None:
        models = self.process.models.models
        if not models:
            raise refused("no_models_available", "No models available", status=503)
        await request.respond_json(200, {"object": "list", "data": [model_object(model) for model in models]})

    async def model(self, request: Request) -> None:
        name = request.path.removeprefix("/v1/models/")
        canonical = self.process.settings.model_aliases.get(name, name)
        for model in self.process.models.models:
            if canonical == model.id or canonical in model.aliases:
                await request.respond_json(200, model_object(model))
                return
        raise refused("model_not_found", f"Model '{name}' not found", status=404)

    async def model_info(self, request: Request) -> None:
        models = self.process.models.models
        if not models:
            raise refused("no_workers", "No workers available", status=503)
        sources = {source.name: source.path for source in self.process.models.tokenizers}
        first = models[0]
        await request.respond_json(
            200,
            {
                "model_path": first.id,
                "tokenizer_path": sources.get(first.tokenizer, first.tokenizer),
                "is_generation": True,
                "context_length": first.context_length or None,
                "vocab_size": first.vocab_size or None,
                "architectures": first.architectures,
                "model_type": first.model_type or None,
                "preferred_sampling_params": first.default_sampling or None,
            },
        )

    async def server_info(self, request: Request) -> None:
        table, settings = self.process.models, self.process.settings
        await request.respond_json(
            200,
            {
                "version": __version__,
                "policy": settings.policy,
                "frontend_procs": settings.frontend_procs,
                "tokenizer_procs": settings.tokenizer_procs,
                "detok_procs": settings.detok_procs,
                "models": [model.id for model in table.models],
                "workers_total": table.workers_total,
                "workers_ready": table.workers_ready,
            },
        )
