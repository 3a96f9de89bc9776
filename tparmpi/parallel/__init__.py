"""Parallelism beyond one operator: layers on several places, gradients in buckets."""

from tparmpi.parallel.explanation import Explanation, LayerReport, explain
from tparmpi.parallel.gradients import reduce_gradients
from tparmpi.parallel.layers import (
    DistributedLayer,
    LayerParallelism,
    LayerSequence,
    into_layers,
)
from tparmpi.parallel.model import DistributedLayeredModel
from tparmpi.parallel.pipeline import Pipeline
from tparmpi.parallel.placement import LayerPlacement, Stage
from tparmpi.parallel.schedules import SCHEDULES

__all__ = [
    "SCHEDULES",
    "DistributedLayer",
    "DistributedLayeredModel",
    "Explanation",
    "LayerParallelism",
    "LayerPlacement",
    "LayerReport",
    "LayerSequence",
    "Pipeline",
    "Stage",
    "explain",
    "into_layers",
    "reduce_gradients",
]
