"""Models whose layers can be placed on different devices."""

from tparmpi.models.gpt import GPT, GPTConfig
from tparmpi.models.gpt_layout import GPTLayout
from tparmpi.models.registry import ModelKind, build, kinds

__all__ = ["GPT", "GPTConfig", "GPTLayout", "ModelKind", "build", "kinds"]
