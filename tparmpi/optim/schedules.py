"""Learning rates as pure functions of the step.

Steps count from 0. In the warm-up the rate rises linearly, from ``lr / warmup`` at step
0 to `lr` at the last warm-up step.
"""

from __future__ import annotations

from math import cos, pi

FLOOR = 0.1
"""What is left of the peak at the end of a cosine."""


def warmup_cosine(step: int, *, lr: float, warmup: int, steps: int) -> float:
    """Return the rate at `step`: warm-up, then a half cosine down to a tenth of `lr`.

    Loshchilov and Hutter, "SGDR" (2017).

    Parameters
    ----------
    lr
        The peak.
    warmup, steps
        Steps of the warm-up and in all; after the last the rate stays.
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + cos(pi * done)))


def warmup_constant(step: int, *, lr: float, warmup: int, steps: int) -> float:
    """Return the rate at `step`: warm-up, then `lr`, whatever `steps` is.

    Parameters as in `warmup_cosine`.
    """
    return lr * min((step + 1) / max(warmup, 1), 1.0)
