"""Finding tokenizer files and chat templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from smg.vocab.load import (
    QWEN2_BPE,
    SENTENCEPIECE,
    TIKTOKEN,
    TOKENIZER_JSON,
    TokenizerLoadError,
    find_template,
    has_tokenizer,
    load_model_dir,
)

MODEL = Path(__file__).parents[2] / "smg" / "simengine" / "model"


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def test_the_shipped_directory() -> None:
    files = load_model_dir(str(MODEL))
    assert (files.kind, files.path) == (TOKENIZER_JSON, MODEL / "tokenizer.json")
    assert files.named_token("eos_token") == "<|end|>"
    assert files.named_token("bos_token") is None
    assert files.config["model_type"] == "smg_sim" and files.has_config and files.has_tokenizer_config
    assert files.template.default is not None and files.template.origin.endswith("tokenizer_config.json")


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["tokenizer.json", "tiktoken.model", "tokenizer.model"], TOKENIZER_JSON),
        (["vocab.json", "merges.txt", "tiktoken.model"], QWEN2_BPE),
        (["tiktoken.model", "b.tiktoken", "tokenizer.model"], TIKTOKEN),
        (["b.tiktoken", "a.tiktoken"], TIKTOKEN),
        (["tokenizer.model"], SENTENCEPIECE),
    ],
)
def test_the_first_format_that_applies(tmp_path: Path, names: list[str], kind: str) -> None:
    write(tmp_path, tokenizer_config__json=json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    for name in names:
        (tmp_path / name).write_text("{}")
    assert load_model_dir(str(tmp_path)).kind == kind
    assert has_tokenizer(tmp_path)


def test_vocab_json_alone_is_no_tokenizer_of_another_class(tmp_path: Path) -> None:
    write(tmp_path, vocab__json="{}", merges__txt="", tokenizer_config__json='{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(TokenizerLoadError, match="does not contain a valid tokenizer file"):
        load_model_dir(str(tmp_path))
    assert not has_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "x.json", "tiktoken.model", "x.tiktoken", "spm.model"])
def test_file_paths_take_their_siblings(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    write(tmp_path, config__json='{"model_type": "x"}', chat_template__jinja="T")
    files = load_model_dir(str(tmp_path / name))
    assert files.path == tmp_path / name
    assert files.config == {"model_type": "x"} and files.template.default == "T"


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_text("")
    with pytest.raises(TokenizerLoadError, match="is not a tokenizer file"):
        load_model_dir(str(tmp_path / "weights.gguf"))


@pytest.mark.parametrize("name", ["/no/such/dir", "./nothing", "a/b/c", "~/nothing-here-at-all"])
def test_what_cannot_be_a_hub_id_is_not_looked_up(name: str) -> None:
    with pytest.raises(TokenizerLoadError, match="not the name of a hub repository"):
        load_model_dir(name)


def test_broken_configuration_is_named(tmp_path: Path) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    write(tmp_path, tokenizer_config__json="{")
    with pytest.raises(TokenizerLoadError, match=r"tokenizer_config\.json"):
        load_model_dir(str(tmp_path))
    write(tmp_path, tokenizer_config__json="[]")
    with pytest.raises(TokenizerLoadError, match="JSON object"):
        load_model_dir(str(tmp_path))


def test_order_of_template_sources(tmp_path: Path) -> None:
    override = tmp_path / "elsewhere.txt"
    override.write_text("override\n")
    root = tmp_path / "model"
    root.mkdir()
    config = {"chat_template": "config"}
    assert find_template(root, {}).default is None
    assert find_template(root, config).default == "config"
    write(root, b__jinja="b", a__jinja=" a\\n\n")
    assert find_template(root, config).default == " a\\n\n"  # neither trimmed nor unescaped
    write(root, chat_template__jinja="jinja")
    assert find_template(root, config).default == "jinja"
    write(root, chat_template__json='{"chat_template": "json"}')
    assert find_template(root, config).default == "json"
    write(root, chat_template__json='"plain"')
    assert find_template(root, config).default == "plain"
    assert find_template(root, config, str(override)).default == "override\n"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "rag"}]
    found = find_template(tmp_path, {"chat_template": named})
    assert (found.default, found.tool_use) == ("D", "T")
    assert find_template(tmp_path, {"chat_template": named[1:2]}).default == "T"
    assert find_template(tmp_path, {"chat_template": [{"name": "a", "template": "A"}, named[2]]}).default == "A"


@pytest.mark.parametrize("text", ["{", "[]", "{}", "3"])
def test_template_json_without_a_template(tmp_path: Path, text: str) -> None:
    write(tmp_path, chat_template__json=text)
    with pytest.raises(TokenizerLoadError):
        find_template(tmp_path, {})


def test_template_override_must_exist_and_hold_something(tmp_path: Path) -> None:
    with pytest.raises(TokenizerLoadError, match="Cannot read"):
        find_template(tmp_path, {}, str(tmp_path / "none"))
    (tmp_path / "empty").write_text("")
    with pytest.raises(TokenizerLoadError, match="is empty"):
        find_template(tmp_path, {}, str(tmp_path / "empty"))
