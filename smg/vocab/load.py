"""Find the files of a tokenizer: in a directory, behind a file path, or in a hub repository."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOKENIZER_FILES = "tokenizer.json, tiktoken.model, *.tiktoken, or vocab.json with merges.txt"
"""What a model directory must hold at least one of, as error messages name it (SentencePiece's ``tokenizer.model`` is
taken too, after these)."""

TOKENIZER_JSON, QWEN2_BPE, TIKTOKEN, SENTENCEPIECE = "tokenizer_json", "qwen2_bpe", "tiktoken", "sentencepiece"

_QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_HUB_PATTERNS = [
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tiktoken.model",
    "*.tiktoken",
    "added_tokens.json",
    "*.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "encoding/*.py",
]
_MAX_JSON_BYTES = 1 << 28


class TokenizerLoadError(Exception):
    """The tokenizer or its chat template cannot be loaded. The text is fit for an operator and for a 503 answer."""


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """The Jinja source of a model's chat template. ``tool_use`` is the variant for requests with tools, where the model
    names one; ``origin`` is the file it came from ("" = the model has no template)."""

    default: str | None = None
    tool_use: str | None = None
    origin: str = ""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The tokenizer files of one model.

    ``kind`` tells how ``path`` (the main file) is read: "tokenizer_json", "qwen2_bpe" (``vocab.json``, with
    ``merges.txt`` beside it), "tiktoken" or "sentencepiece". ``source`` is the path or hub id as the operator wrote it.
    Configurations that are missing are empty; ``has_tokenizer_config`` tells an empty one from a missing one."""

    source: str
    root: Path
    kind: str
    path: Path
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    has_tokenizer_config: bool = False
    has_config: bool = False
    template: TemplateSource = TemplateSource()

    def named_token(self, name: str) -> str | None:
        """The text of a named special token (``bos_token``, ``eos_token``, ``unk_token``, ``pad_token`` ...) of
        ``tokenizer_config.json``: a string or an object with ``content``."""
        value = self.tokenizer_config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) and value else None


def load_model_dir(path_or_hub_id: str, chat_template: str = "") -> ModelFiles:
    """The files behind a local directory, a local file, or (only when no such path exists) a hub repository.

    ``chat_template`` names a template file that replaces the model's own. Raises ``TokenizerLoadError``.
    """
    path = Path(path_or_hub_id).expanduser()
    if not path.exists():
        path = _download(path_or_hub_id)
    root = path if path.is_dir() else path.parent
    tokenizer_config = _read_json(root / "tokenizer_config.json")
    kind, main = _find_in_directory(path, tokenizer_config) if path.is_dir() else _classify_file(path)
    config = _read_json(root / "config.json")
    return ModelFiles(
        source=path_or_hub_id,
        root=root,
        kind=kind,
        path=main,
        tokenizer_config=tokenizer_config or {},
        config=config or {},
        generation_config=_read_json(root / "generation_config.json") or {},
        has_tokenizer_config=tokenizer_config is not None,
        has_config=config is not None,
        template=find_template(root, tokenizer_config or {}, chat_template),
    )


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds a tokenizer that can be loaded."""
    try:
        _find_in_directory(directory, _read_json(directory / "tokenizer_config.json"))
    except TokenizerLoadError:
        return False
    return True


def find_template(root: Path, tokenizer_config: dict[str, Any], override: str = "") -> TemplateSource:
    """The chat template of a model directory: ``override`` file, ``chat_template.json``, ``chat_template.jinja``,
    another ``*.jinja`` (first by name), ``chat_template`` of ``tokenizer_config.json``, in this order. A list of named
    templates gives its entries ``default`` and ``tool_use``.

    Raises ``TokenizerLoadError`` when the file to use cannot be read or holds no template.
    """
    if override:
        return _template_file(Path(override).expanduser())
    candidates = [root / "chat_template.json", root / "chat_template.jinja", *sorted(root.glob("*.jinja"))]
    for candidate in candidates:
        if candidate.is_file():
            return _template_file(candidate)
    return _config_template(tokenizer_config.get("chat_template"), str(root / "tokenizer_config.json"))


def _template_file(path: Path) -> TemplateSource:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerLoadError(f"Cannot read chat template '{path}': {error}") from None
    if not text:
        raise TokenizerLoadError(f"Chat template '{path}' is empty")
    if path.suffix != ".json":
        return TemplateSource(text, origin=str(path))
    try:
        value = json.loads(text)
    except ValueError as error:
        raise TokenizerLoadError(f"Chat template '{path}' is not valid JSON: {error}") from None
    source = _config_template(value.get("chat_template") if isinstance(value, dict) else value, str(path))
    if source.default is None:
        raise TokenizerLoadError(f"Chat template '{path}' holds neither a string nor an object with 'chat_template'")
    return source


def _config_template(value: Any, origin: str) -> TemplateSource:
    """A template string, or a list of ``{"name", "template"}``."""
    if isinstance(value, str):
        return TemplateSource(value, origin=origin)
    named: dict[str, str] = {}
    if isinstance(value, dict):
        named = {name: text for name, text in value.items() if isinstance(text, str)}
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                named[str(entry.get("name"))] = entry["template"]
    default = named.get("default")
    if default is None and len(named) == 1:
        default = next(iter(named.values()))
    if default is None and "tool_use" not in named:
        return TemplateSource()
    return TemplateSource(default, named.get("tool_use"), origin)


def _find_in_directory(root: Path, tokenizer_config: dict[str, Any] | None) -> tuple[str, Path]:
    if (root / "tokenizer.json").is_file():
        return TOKENIZER_JSON, root / "tokenizer.json"
    tokenizer_class = (tokenizer_config or {}).get("tokenizer_class")
    if (root / "vocab.json").is_file() and (root / "merges.txt").is_file() and tokenizer_class in _QWEN2_CLASSES:
        return QWEN2_BPE, root / "vocab.json"
    for ranks in (root / "tiktoken.model", *sorted(root.glob("*.tiktoken"))):
        if ranks.is_file():
            return TIKTOKEN, ranks
    if (root / "tokenizer.model").is_file():
        return SENTENCEPIECE, root / "tokenizer.model"
    raise TokenizerLoadError(f"Directory '{root}' does not contain a valid tokenizer file ({TOKENIZER_FILES})")


def _classify_file(path: Path) -> tuple[str, Path]:
    if path.suffix == ".json":
        return TOKENIZER_JSON, path
    if path.name == "tiktoken.model" or path.suffix == ".tiktoken":
        return TIKTOKEN, path
    if path.suffix == ".model":
        return SENTENCEPIECE, path
    raise TokenizerLoadError(f"File '{path}' is not a tokenizer file ({TOKENIZER_FILES})")


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, None when there is no such file."""
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise TokenizerLoadError(f"File '{path}' is too large")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerLoadError(f"Cannot read '{path}': {error}") from None
    if not isinstance(value, dict):
        raise TokenizerLoadError(f"File '{path}' does not hold a JSON object")
    return value


def _download(name: str) -> Path:
    """Tokenizer files of a hub repository; ``HF_TOKEN`` opens private ones."""
    if os.sep + os.sep in name or name.startswith((os.sep, ".", "~")) or name.count("/") > 1:
        raise TokenizerLoadError(f"'{name}' does not exist and is not the name of a hub repository")
    import huggingface_hub  # a slow import that local paths never need
    from huggingface_hub import errors as hub_errors

    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=_HUB_PATTERNS, token=os.environ.get("HF_TOKEN") or None
        )
    except hub_errors.RepositoryNotFoundError:
        raise TokenizerLoadError(
            f"'{name}' is neither a local path nor a hub repository that can be read (set HF_TOKEN for private ones)"
        ) from None
    except (hub_errors.HfHubHTTPError, hub_errors.HFValidationError, OSError, RuntimeError) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TokenizerLoadError(f"Download of '{name}' failed: {detail}") from None
    return Path(folder)
