"""Group-relative advantages (section 3.1; Dr. GRPO), pure numpy."""

import numpy as np
from numpy.typing import NDArray


def group_advantages(
    rewards_G: NDArray[np.float64], *, normalize_by_std: bool = False
) -> NDArray[np.float64]:
    """Computes reward minus group mean over the scored members of one group.

    Args:
        rewards_G: (G,) rewards of the group, the replayed completion included; NaN
            where there is no verdict.
        normalize_by_std: divide by the standard deviation of the group (GRPO; off in
            the paper).

    Returns:
        (G,) advantages; exactly 0 where there is no verdict, and for a whole group of
        equal rewards.
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    advantages_G = np.zeros_like(rewards_G)
    scored = ~np.isnan(rewards_G)
    # Subtracting the mean of equal numbers can leave a rounding residue, which a
    # division by the equally tiny deviation would turn into a real advantage.
    if not scored.any() or np.ptp(rewards_G[scored]) == 0:
        return advantages_G
    advantages_G[scored] = rewards_G[scored] - rewards_G[scored].mean()
    if normalize_by_std:
        advantages_G /= rewards_G[scored].std()
    return advantages_G
