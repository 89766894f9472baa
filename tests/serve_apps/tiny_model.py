"""A tiny Llama with random weights and a byte-level tokenizer, made from sizes in a second."""

from __future__ import annotations

from pathlib import Path

VOCAB_SIZE = 300


def make_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges: every byte is a token, so any text has a known length."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0, **{symbol: index + 1 for index, symbol in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(directory)


def make_model(directory: Path, *, seed: int = 0) -> Path:
    """A Llama of 4 heads and 2 layers in `directory`, in the Hugging Face format."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=0,
        bos_token_id=None,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    make_tokenizer(directory)
    return directory
