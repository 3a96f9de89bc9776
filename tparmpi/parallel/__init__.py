"""Parallelism beyond one operator: gradients reduced in buckets, and explained."""

from tparmpi.parallel.explanation import Explanation, LayerReport, explain
from tparmpi.parallel.gradients import reduce_gradients

__all__ = ["Explanation", "LayerReport", "explain", "reduce_gradients"]
