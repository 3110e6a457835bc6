"""Write a small Qwen3 model with random weights: ``make_model.py TOKENIZER_DIR OUT_DIR``. Needs torch, transformers."""

import os
import shutil
import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

END_OF_TURN, END_OF_TEXT = 151645, 151643


def main(source: str, target: str) -> None:
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_theta=1e6,
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TURN,
        # With the usual 0.02 the logits are nearly flat and greedy decoding depends on rounding.
        initializer_range=0.5,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id = [END_OF_TURN, END_OF_TEXT], END_OF_TEXT
    generation.do_sample, generation.temperature, generation.top_p, generation.top_k = True, 0.6, 0.95, 20
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(source, name), target)


if __name__ == "__main__":
    main(*sys.argv[1:3])
