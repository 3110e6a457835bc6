"""Native prompt encoders: for checkpoints whose prompt format is a program instead of a Jinja template."""

from smg.models.renderers.select import create_renderer, select_renderer

__all__ = ["create_renderer", "select_renderer"]
