"""Renderers: parser events and token counts in, the bytes of one API out. One file per API; no I/O."""

from smg.detok.render.base import Renderer
from smg.detok.render.factory import make_renderer

__all__ = ["Renderer", "make_renderer"]
