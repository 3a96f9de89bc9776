"""Where operators are found by name, so that tensors need not import them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

registry: dict[str, Any] = {}
"""Every operator's record by name."""

methods: dict[str, Callable[..., Any]] = {}
"""What `Tensor` offers as methods: operators of one operand, and what `method` adds."""


def method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Offer `function`, whose first argument is a tensor, as a method of `Tensor`."""
    methods[function.__name__] = function
    return function
