"""Which renderer a checkpoint gets, decided by the ``config.json`` beside its tokenizer files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smg.models.prompt import Renderer
from smg.models.renderers.deepseek_v4 import REVISION_0731_MARK, DeepSeekV4Renderer
from smg.models.renderers.deepseek_v32 import DeepSeekV32Renderer
from smg.models.renderers.deepseek_v41 import DeepSeekV41Renderer, published_efforts
from smg.models.renderers.kimi_k3 import KimiK3Renderer

JINJA = "jinja"
KIMI_K25 = "kimi_k25"

# In order of preference: architecture, model type ("" = the type alone does not select), renderer.
_HUGGINGFACE = (
    ("DeepseekV32ForCausalLM", "", "deepseek_v32"),
    ("DeepseekV4ForCausalLM", "", "deepseek_v4"),
    ("DeepseekV41ForCausalLM", "deepseek_v41", "deepseek_v41"),
)
_TIKTOKEN = (
    ("KimiK3ForConditionalGeneration", "kimi_k3", "kimi_k3"),
    ("KimiK25ForConditionalGeneration", "kimi_k25", KIMI_K25),
)
_MAX_ENCODER_BYTES = 1 << 20


def select_renderer(config_json: Mapping[str, Any] | None, model_dir: Path | None, model_path_text: str) -> str:
    """The name of the renderer: "deepseek_v32", "deepseek_v4", "deepseek_v4_0731", "deepseek_v41", "kimi_k3",
    "kimi_k25" or "jinja".

    ``config_json`` is the decoded ``config.json``, None when it is missing or unreadable. DeepSeek encoders belong to
    directories with a ``tokenizer.json``, Kimi encoders to tiktoken ones; with no ``model_dir`` both are tried. The
    path as the operator wrote it tells the revisions of V4 apart when the checkpoint ships no encoder file.
    """
    if not isinstance(config_json, Mapping):
        return JINJA
    architectures = config_json.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    rules = _rules(model_dir)
    for architecture, _, renderer in rules:
        if architecture in names:
            return _with_revision(renderer, model_dir, model_path_text)
    for _, model_type, renderer in rules:
        if model_type and config_json.get("model_type") == model_type:
            return renderer
    return JINJA


def create_renderer(name: str, model_dir: Path | None = None) -> Renderer | None:
    """The renderer called ``name``, None for those that render with the checkpoint's Jinja template ("jinja",
    "kimi_k25").

    Raises ``KeyError`` for an unknown name.
    """
    if name in (JINJA, KIMI_K25):
        return None
    if name == "deepseek_v41" and model_dir is not None:
        return DeepSeekV41Renderer(published_efforts(model_dir))
    return _RENDERERS[name]


_RENDERERS: dict[str, Renderer] = {
    "deepseek_v32": DeepSeekV32Renderer(),
    "deepseek_v4": DeepSeekV4Renderer("original"),
    "deepseek_v4_0731": DeepSeekV4Renderer("0731"),
    "deepseek_v41": DeepSeekV41Renderer(),
    "kimi_k3": KimiK3Renderer(),
}


def _rules(model_dir: Path | None) -> tuple[tuple[str, str, str], ...]:
    if model_dir is None:
        return _HUGGINGFACE + _TIKTOKEN
    if (model_dir / "tokenizer.json").exists():
        return _HUGGINGFACE
    if (model_dir / "tiktoken.model").exists() or any(model_dir.glob("*.tiktoken")):
        return _TIKTOKEN
    return ()


def _with_revision(renderer: str, model_dir: Path | None, model_path_text: str) -> str:
    if renderer != "deepseek_v4":
        return renderer
    encoder = _encoder_text(model_dir)
    refreshed = "0731" in model_path_text if encoder is None else REVISION_0731_MARK in encoder
    return "deepseek_v4_0731" if refreshed else renderer


def _encoder_text(model_dir: Path | None) -> str | None:
    """The checkpoint's own V4 encoder, None when it ships none."""
    if model_dir is None:
        return None
    try:
        with (model_dir / "encoding" / "encoding_dsv4.py").open("rb") as file:
            return file.read(_MAX_ENCODER_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
