"""Stands in for what would be downloaded: a small Llama, a tokenizer of letters, sentences."""

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
SENTENCES = [
    f"the {size} {animal} {verb} the {place}"
    for size in ("old", "small", "grey", "young")
    for animal, verb in (("cat", "saw"), ("horse", "left"), ("bird", "found"))
    for place in ("house", "sea", "old tree", "hill")
]


def llama(**sizes: Any) -> Any:
    """A Llama with the same random weights at each call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | sizes)))


def letters() -> Any:
    """A tokenizer with a token for each letter."""
    known = {letter: number + 2 for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    made = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, **known}))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>", padding_side="left")
