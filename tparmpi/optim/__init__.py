"""Optimizers, clipping and learning-rate schedules."""

from tparmpi.optim import schedules
from tparmpi.optim.adamw import AdamW
from tparmpi.optim.clipping import clip_norm
from tparmpi.optim.optimizer import Optimizer
from tparmpi.optim.sgd import SGD

__all__ = ["SGD", "AdamW", "Optimizer", "clip_norm", "schedules"]
