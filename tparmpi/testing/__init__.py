"""What users' tests and our own share: reference layouts and gradient checks."""

from tparmpi.testing.gradient import check_gradient, numerical_gradient
from tparmpi.testing.layouts import all_layouts, laid_out

__all__ = ["all_layouts", "check_gradient", "laid_out", "numerical_gradient"]
