"""Learning rate schedules in RLlib's form, which interpolates linearly between points.

A constant is a number. A linear warm-up is two points, after which the rate stays:
`lr=[[0, 0.0], [10_000, 1e-6]]`. Time counts completions sampled in training, of which a
step samples about `prompts_per_step` times `group_size`.
"""

import math


def cosine_schedule(
    peak: float,
    total: int,
    *,
    warmup: int = 0,
    final: float = 0.0,
    num_points: int = 64,
) -> list[tuple[int, float]]:
    """Rises linearly to a peak, then falls along half a cosine.

    Args:
        peak: largest learning rate.
        total: completions at the end of the fall; the rate stays at `final` after it.
        warmup: completions of the rise; 0 starts at the peak.
        final: learning rate at the end.
        num_points: points on the fall; with 64 the error is below 0.1 % of the peak.

    Returns:
        (completions, learning rate) points, for `training(lr=...)`.

    Raises:
        ValueError: if the warm-up is longer than the whole or there are too few points.
    """
    if not 0 <= warmup < total or not 1 <= num_points <= total - warmup:
        raise ValueError(
            f"`cosine_schedule` has `warmup`={warmup}, `total`={total} and "
            f"`num_points`={num_points}: the warm-up must end before the total, with a "
            "completion or more for each point."
        )
    start = [(0, 0.0)] if warmup else []
    return start + [
        (
            warmup + round((total - warmup) * i / num_points),
            final + (peak - final) * (1 + math.cos(math.pi * i / num_points)) / 2,
        )
        for i in range(num_points + 1)
    ]
