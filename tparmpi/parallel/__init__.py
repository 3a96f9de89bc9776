"""Parallelism beyond one operator: gradients reduced in buckets."""

from tparmpi.parallel.gradients import reduce_gradients

__all__ = ["reduce_gradients"]
