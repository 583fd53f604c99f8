"""Which buckets to replay from: a bucket holds the prompts solved k times out of G."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def bucket_probabilities(
    group_size: int,
    mu: float = 0.5,
    sigma: float | None = None,
    occupied: ArrayLike | None = None,
) -> NDArray[np.float64]:
    """Returns the probability of drawing each bucket: Normal(k / G; mu, sigma).

    Args:
        group_size: G, the number of completions of a group; at least 2.
        mu: pass rate that is drawn most often.
        sigma: standard deviation in pass-rate units; None means 1 / G.
        occupied: (G-1,) bool, True where bucket k = 1..G-1 holds a prompt; None
            means all.

    Returns:
        (G-1,) probabilities for k = 1..G-1, summing to one over the occupied
        buckets. All zero where no bucket is occupied.

    Raises:
        ValueError: if a knob is out of range or `occupied` has another shape.
    """
    sigma = _checked_sigma(group_size, mu, sigma)
    mask = np.ones(group_size - 1, bool) if occupied is None else np.asarray(occupied)
    if mask.shape != (group_size - 1,):
        raise ValueError(
            f"`occupied` has shape {mask.shape}, but a group size of {group_size} has "
            f"{group_size - 1} buckets (k = 1..{group_size - 1}): give one flag each."
        )
    distance = np.abs((np.arange(1, group_size) / group_size - mu) / sigma)
    nearest = distance[mask.astype(bool)].min(initial=np.inf)
    weights = np.zeros(group_size - 1)
    # Relative to the nearest occupied bucket, so that not all weights underflow.
    with np.errstate(over="ignore"):
        exponent = (nearest - distance) * (nearest / 2 + distance / 2)
    np.exp(exponent, out=weights, where=mask.astype(bool))
    return weights / max(weights.sum(), 1.0)


def draw_bucket_counts(
    rng: np.random.Generator,
    num_draws: int,
    sizes: ArrayLike,
    mu: float = 0.5,
    sigma: float | None = None,
) -> NDArray[np.int64]:
    """Draws how many prompts to take from each bucket.

    One multinomial draw over the occupied buckets. A count above its bucket's size is
    clipped, and the excess is drawn again over the buckets that still have room, by
    the same weights.

    Args:
        rng: the generator to draw from.
        num_draws: prompts to draw in all.
        sizes: (G-1,) prompts held by bucket k = 1..G-1.
        mu: see `bucket_probabilities`.
        sigma: see `bucket_probabilities`.

    Returns:
        (G-1,) counts, none above its bucket's size, summing to `num_draws` or to all
        the prompts there are, whichever is less.
    """
    room = np.array(sizes, dtype=np.int64)
    counts = np.zeros_like(room)
    excess = min(num_draws, int(room.sum()))
    while excess > 0:
        weights = bucket_probabilities(len(room) + 1, mu, sigma, room > 0)
        drawn = np.minimum(rng.multinomial(excess, weights), room)
        counts += drawn
        room -= drawn
        excess -= int(drawn.sum())
    return counts


def spread_buckets(spreads: ArrayLike, group_size: int) -> NDArray[np.int64]:
    """Returns the buckets of a step's groups by their reward spread (section 5.3).

    Spreads are scaled so that the step's smallest is 0 and its largest 1; a group with
    the scaled spread s belongs to bucket round(s G). The last bucket is G-1: bucket G
    is for prompts that are solved.

    Args:
        spreads: (N,) standard deviation of each group's rewards.
        group_size: G.
    """
    spreads = np.asarray(spreads, np.float64)
    lowest, highest = spreads.min(initial=np.inf), spreads.max(initial=-np.inf)
    # Rewards lie in [0, 1]: what is below 1e-6 is rounding.
    scaled = (spreads - lowest) / max(highest - lowest, 1e-6)
    return np.minimum(np.rint(scaled * group_size), group_size - 1).astype(np.int64)


def _checked_sigma(group_size: int, mu: float, sigma: float | None) -> float:
    """Returns sigma with its default, once all three knobs are in range."""
    if group_size < 2:
        raise ValueError(
            f"`group_size` is {group_size}, but a bucket needs a group that is neither "
            "all right nor all wrong: use 2 or more."
        )
    if not np.isfinite(mu):
        raise ValueError(f"`mu` is {mu}: use a finite pass rate, such as 0.5.")
    sigma = 1 / group_size if sigma is None else float(sigma)
    if not (np.isfinite(sigma) and sigma > 0):
        raise ValueError(
            f"`sigma` is {sigma}, but the spread of the draw over pass rates must be "
            "positive and finite: use a value above 0, or None for 1 / group size."
        )
    return sigma
