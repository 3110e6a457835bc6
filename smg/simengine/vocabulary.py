"""The model directory of the embedded engine: its tokenizer and the facts that a worker reports."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

SHIPPED_MODEL = Path(__file__).parent / "model"
DEFAULT_CONTEXT = 32768
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
BUNDLE_SUFFIXES = frozenset((".json", ".jinja", ".model", ".tiktoken"))
BUNDLE_NAMES = frozenset(("merges.txt",))


class ModelError(Exception):
    """The model directory cannot be used."""


@dataclass(slots=True)
class Vocabulary:
    """A tokenizer and what its model directory says. ``eos_ids[0]`` is the token that ends a reply."""

    path: Path
    tokenizer: Any
    size: int
    eos_ids: list[int]
    special_ids: frozenset[int]
    context_length: int = DEFAULT_CONTEXT
    architectures: list[str] = field(default_factory=list)
    model_type: str = ""
    pad_id: int = 0
    bos_id: int = 0
    default_sampling: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a model directory. Raises ``ModelError``."""
        source = path / "tokenizer.json"
        if not source.is_file():
            raise ModelError(f"no tokenizer.json in {path}")
        try:
            tokenizer = Tokenizer.from_file(str(source))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{source} cannot be read: {error}") from error
        config = _read(path / "config.json")
        generation = _read(path / "generation_config.json")
        added = tokenizer.get_added_tokens_decoder()
        return cls(
            path=path,
            tokenizer=tokenizer,
            size=max(int(config.get("vocab_size") or 0), tokenizer.get_vocab_size(with_added_tokens=True)),
            eos_ids=_eos_ids(path, tokenizer, config, generation),
            special_ids=frozenset(token for token, entry in added.items() if entry.special),
            context_length=int(config.get("max_position_embeddings") or DEFAULT_CONTEXT),
            architectures=[str(name) for name in config.get("architectures") or []],
            model_type=str(config.get("model_type") or ""),
            pad_id=_first_id(config.get("pad_token_id")) or 0,
            bos_id=_first_id(config.get("bos_token_id")) or 0,
            default_sampling={key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None},
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, markers recognised, nothing added."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of ``ids``."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def bundle(self) -> bytes:
        """A zip of the tokenizer's files, as the GetTokenizer call streams it."""
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(self.path.iterdir()):
                if file.is_file() and (file.suffix in BUNDLE_SUFFIXES or file.name in BUNDLE_NAMES):
                    archive.write(file, file.name)
        return out.getvalue()


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _first_id(value: Any) -> int | None:
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, int) else None


def _eos_ids(path: Path, tokenizer: Any, config: dict[str, Any], generation: dict[str, Any]) -> list[int]:
    """EOS ids, the one that ends a turn first: the tokenizer's own, then those of the configuration files."""
    ids: list[int] = []
    token = _read(path / "tokenizer_config.json").get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    found = tokenizer.token_to_id(name) if isinstance(name, str) else None
    for value in (found, generation.get("eos_token_id"), config.get("eos_token_id")):
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, int) and entry not in ids:
                ids.append(entry)
    if not ids:
        raise ModelError(f"{path} names no EOS token")
    return ids
