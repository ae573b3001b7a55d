"""A small random-weight model with two kinds of attention, sliding window and full: two KV-cache groups in vLLM.

Spread of weights as in `pykvcache_cli.tiny_model`, for the same reason. Usage: python hybrid_model.py DIR
"""

import sys
from pathlib import Path

SLIDING_WINDOW_TOKENS = 96
LAYERS = ("sliding_attention", "full_attention")


def make_hybrid_model(directory: Path) -> None:
    """Write a model to a directory; equal on every machine."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(20260930)
    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        sliding_window=SLIDING_WINDOW_TOKENS,
        layer_types=[*LAYERS, *LAYERS],
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    make_hybrid_model(Path(sys.argv[1]))
