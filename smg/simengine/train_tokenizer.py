"""Train the tokenizer that the embedded engine ships with: ``python -m smg.simengine.train_tokenizer``.

The training text is the project's own: ``training_text/`` (prose, code, a paragraph in each of many languages, common
words) and JSON generated here. The result in ``model/`` is a complete model directory without weights: a byte-level
BPE vocabulary (every byte is a token, so any text can be encoded), added tokens for turns, thinking and tool calls, the
chat template of ``chat_template.jinja``, and the two configuration files that a gateway reads. Training is
deterministic.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

HERE = Path(__file__).parent
MODEL_DIR = HERE / "model"
BASE_VOCABULARY = 6000
MODEL_VOCABULARY = 6016  # what config.json says: rounded up, as real models pad their embedding matrix
CONTEXT_LENGTH = 131072

PAD, TURN, END = "<|endoftext|>", "<|turn|>", "<|end|>"
SPECIAL_TOKENS = (PAD, TURN, END)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Words with their leading space, single digits, runs of punctuation, white space: the usual split of byte-level BPE.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _json_value(rng: random.Random, words: list[str], depth: int) -> Any:
    kind = rng.randrange(8 if depth else 5)
    if kind == 0:
        return rng.randrange(100000)
    if kind == 1:
        return rng.choice([True, False, None])
    if kind == 2:
        return round(rng.uniform(-100, 100), 2)
    if kind <= 4:
        return " ".join(rng.choices(words, k=rng.randrange(1, 6)))
    if kind == 5:
        return [_json_value(rng, words, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(words): _json_value(rng, words, depth - 1) for _ in range(rng.randrange(1, 4))}


def _schema(rng: random.Random, words: list[str]) -> dict[str, Any]:
    names = rng.sample(words, k=rng.randrange(1, 4))
    types = ["string", "integer", "number", "boolean", "array", "object"]
    return {
        "type": "function",
        "function": {
            "name": "_".join(rng.sample(words, k=2)),
            "description": " ".join(rng.choices(words, k=6)).capitalize() + ".",
            "parameters": {
                "type": "object",
                "properties": {
                    name: {"type": rng.choice(types), "description": f"The {name}", "enum": rng.sample(words, k=2)}
                    for name in names
                },
                "required": names,
                "additionalProperties": False,
            },
        },
    }


def generated_text(words: list[str], seed: int = 20240517) -> Iterator[str]:
    """JSON as it occurs in tool lists, tool calls and structured answers, and plain strings of common words."""
    rng = random.Random(seed)
    plain = [word for word in words if word.isascii() and word.isalpha() and word.islower()]
    for index in range(300):
        call = {"name": "_".join(rng.sample(plain, k=2)), "arguments": {rng.choice(plain): _json_value(rng, plain, 2)}}
        yield json.dumps(call, indent=2 if index % 5 == 0 else None)
        yield json.dumps(_schema(rng, plain))
    for role in ("system", "user", "assistant", "tool"):
        yield from [f"{role}\n"] * 50
    for _ in range(4):
        shuffled = rng.sample(words, k=len(words))
        yield " ".join(shuffled)
        yield ", ".join(word.capitalize() for word in shuffled[:400])
        yield "_".join(shuffled[:400])


def training_texts() -> Iterator[str]:
    """The whole training text. Prose counts several times: it is what the engine writes most."""
    folder = HERE / "training_text"
    words = (folder / "words.txt").read_text(encoding="utf-8").split()
    for name, times in (("prose", 3), ("languages", 2), ("code", 2)):
        text = (folder / f"{name}.txt").read_text(encoding="utf-8")
        for _ in range(times):
            yield from text.splitlines(keepends=True)
    yield from generated_text(words)


def train(vocabulary: int = BASE_VOCABULARY) -> Tokenizer:
    """A fresh tokenizer with ``vocabulary`` entries and the added tokens behind them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_model(tokenizer: Tokenizer, target: Path) -> None:
    """Write the model directory: tokenizer.json, tokenizer_config.json, config.json, generation_config.json."""
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(target / "tokenizer.json"), pretty=False)
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in SPECIAL_TOKENS + MARKERS
    }
    _write_json(
        target / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "added_tokens_decoder": added,
            "bos_token": None,
            "chat_template": (HERE / "chat_template.jinja").read_text(encoding="utf-8"),
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "model_max_length": CONTEXT_LENGTH,
            "pad_token": PAD,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": None,
        },
    )
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    _write_json(
        target / "config.json",
        {
            "architectures": ["SmgSimForCausalLM"],
            "eos_token_id": end,
            "max_position_embeddings": CONTEXT_LENGTH,
            "model_type": "smg_sim",
            "pad_token_id": pad,
            "vocab_size": MODEL_VOCABULARY,
        },
    )
    _write_json(
        target / "generation_config.json",
        {"eos_token_id": [end, pad], "pad_token_id": pad, "temperature": 0.7, "top_k": 40, "top_p": 0.95},
    )


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), default=MODEL_DIR, show_default=True)
def main(output: Path) -> None:
    """Train and write."""
    tokenizer = train()
    write_model(tokenizer, output)
    click.echo(f"{output}: {tokenizer.get_vocab_size(with_added_tokens=True)} tokens")


if __name__ == "__main__":
    main()
