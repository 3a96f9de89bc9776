"""Layout algebra: placements, chunks, routes, rules, choices. No MPI, no arrays."""

from tparmpi.sharding.choice import Candidate, Choice, Operand, Traits, choose
from tparmpi.sharding.chunks import (
    block,
    chunk,
    chunk_sizes,
    elements,
    smallest_chunk,
)
from tparmpi.sharding.placements import (
    PARTIAL,
    REPLICATE,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    replicated,
    sharding_axes,
)
from tparmpi.sharding.routes import Route, Step, find_route
from tparmpi.sharding.rules import COMBINE, FREE, WHOLE, Rule, bind

__all__ = [
    "COMBINE",
    "FREE",
    "PARTIAL",
    "REPLICATE",
    "WHOLE",
    "Candidate",
    "Choice",
    "Layout",
    "Operand",
    "Partial",
    "Placement",
    "Replicate",
    "Route",
    "Rule",
    "Shard",
    "Step",
    "Traits",
    "bind",
    "block",
    "choose",
    "chunk",
    "chunk_sizes",
    "elements",
    "find_route",
    "replicated",
    "sharding_axes",
    "smallest_chunk",
]
