"""Layout algebra: placements, chunks, routes, rules, choices. No MPI, no arrays."""

from tparmpi.sharding.choice import Candidate, Choice, Operand, Traits, choose
from tparmpi.sharding.chunks import (
    block,
    chunk,
    chunk_sizes,
    elements,
    smallest_chunk,
)
from tparmpi.sharding.moves import End, Move, Span, chunks_over, find_moves
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
    written_change,
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
    "End",
    "Layout",
    "Move",
    "Operand",
    "Partial",
    "Placement",
    "Replicate",
    "Route",
    "Rule",
    "Shard",
    "Span",
    "Step",
    "Traits",
    "bind",
    "block",
    "choose",
    "chunk",
    "chunk_sizes",
    "chunks_over",
    "elements",
    "find_moves",
    "find_route",
    "replicated",
    "sharding_axes",
    "smallest_chunk",
    "written_change",
]
