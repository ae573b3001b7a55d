"""A small random-weight Llama with a byte tokenizer, made locally: nothing is downloaded.

Facts: with the usual spread of initial weights (0.02) greedy output hardly depends on the KV cache, so a corrupted
cache would go unseen; with 0.2 the logits have clear winners that depend on every layer's KV. Needs transformers,
tokenizers and torch, which vLLM brings. Usage: python -m pykvcache_cli.tiny_model DIR
"""

import sys
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
"""Their positions are their token ids."""
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}


def make_tiny_model(directory: Path) -> None:
    """Write model, tokenizer and configuration to a directory; equal on every machine."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(20260930)
    config = LlamaConfig(
        **SIZES,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    _byte_tokenizer().save_pretrained(directory)
    for file in directory.iterdir():
        file.chmod(0o644)  # safetensors writes 0600; a server of another user must be able to read it


def _byte_tokenizer() -> Any:
    """Return a tokenizer with one token per byte, so that prompts have as many tokens as characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[0],
        bos_token=SPECIAL_TOKENS[1],
        eos_token=SPECIAL_TOKENS[2],
        chat_template=CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    make_tiny_model(Path(sys.argv[1]))
