"""Models that `offload train` trains and the tests use."""

from offload.models.gpt import GPT, PRESETS, GPTConfig

__all__ = ["GPT", "PRESETS", "GPTConfig"]
