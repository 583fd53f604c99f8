"""What an update did, as sums that add up over micro-batches and learners."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllib_exgrpo.batching import PaddedRows
from rllib_exgrpo.losses import LossOutput

SATURATED_WEIGHT = 0.9
"""A replayed token is saturated when f(w) = w / (w + beta) exceeds this, that is, when
w > 9 beta: its gradient has fallen below 36 % of the largest possible."""


@dataclass
class UpdateTotals:
    """Sums and the maximum over counted tokens; `add` merges another micro-batch.

    Attributes:
        sums: by name.
        logp_diff_max: largest |current - engine's log-prob| of a fresh token.
        replayed_rows: (R, 3) of each replayed row its counted tokens, the sum of their
            importance ratios, and how many of them are saturated.
    """

    sums: dict[str, float] = field(default_factory=dict)
    logp_diff_max: float = 0.0
    replayed_rows: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 3)))

    def add(self, other: "UpdateTotals") -> None:
        """Merges the totals of other rows into these."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.logp_diff_max = max(self.logp_diff_max, other.logp_diff_max)
        rows = [self.replayed_rows, other.replayed_rows]
        self.replayed_rows = np.concatenate(rows)


def token_totals(
    output: LossOutput,
    *,
    current_logp: Tensor,
    entropy: Tensor,
    rows: PaddedRows,
    shaping_beta: float | None,
) -> UpdateTotals:
    """Sums what `summarize` needs over the counted tokens of a micro-batch.

    Args:
        output: of `mixed_policy_loss`.
        current_logp: (B, T) detached log-probs under the policy being trained.
        entropy: (B, T) detached token entropies.
        rows: the micro-batch.
        shaping_beta: as given to the loss; None means unshaped.
    """
    replayed = rows.loss_mask & rows.replay_mask[:, None]
    fresh = rows.loss_mask & ~rows.replay_mask[:, None]
    left_out = rows.token_mask & rows.scored[:, None] & ~rows.loss_mask
    compared = fresh | left_out
    # d(weight)/d(logp): w for a bare ratio, f (1 - f) for a shaped one.
    slope = output.weight
    if shaping_beta is not None:
        slope = torch.where(replayed, slope * (1 - slope), slope)
    pull = (rows.advantages[:, None].abs() * slope).masked_fill(output.clipped, 0.0)
    ratio_replayed = output.ratio[replayed]
    rollout_diff = (current_logp - rows.engine_logp)[compared].abs()
    saturated = replayed & (output.weight > SATURATED_WEIGHT)
    per_row = (replayed, output.ratio * replayed, saturated)
    sums = {
        "policy_loss": output.loss.detach(),
        "tokens": rows.loss_mask.sum(),
        "entropy": entropy[rows.loss_mask].sum(),
        "fresh/tokens": fresh.sum(),
        "fresh/left_out": left_out.sum(),
        "fresh/token_weights": rows.token_weights[fresh].sum(),
        "fresh/ratio": output.ratio[fresh].sum(),
        "fresh/compared": compared.sum(),
        "fresh/logp_diff": rollout_diff.sum(),
        "fresh/clipped": output.clipped.sum(),
        "fresh/pull": pull[fresh].sum(),
        "replayed/tokens": replayed.sum(),
        "replayed/ratio": ratio_replayed.sum(),
        "replayed/ratio_squared": ratio_replayed.square().sum(),
        "replayed/saturated": saturated.sum(),
        "replayed/pull": pull[replayed].sum(),
    }
    return UpdateTotals(
        {name: float(value) for name, value in sums.items()},
        float(rollout_diff.max()) if rollout_diff.numel() else 0.0,
        _sums_of_rows(per_row, rows.replay_mask),
    )


def _sums_of_rows(values_BT: Sequence[Tensor], chosen_B: Tensor) -> NDArray[np.float64]:
    """Returns (R, len(values_BT)) sums over the tokens of the chosen rows."""
    sums = [values.sum(1)[chosen_B].double() for values in values_BT]
    return torch.stack(sums, 1).cpu().numpy()


def summarize(totals: Mapping[str, float], num_updates: int) -> dict[str, float]:
    """Turns sums over a whole step into the metrics of the learner.

    Args:
        totals: sums over all micro-batches, updates and learners of the step.
        num_updates: optimiser updates of the step.

    Returns:
        Metric name to value; NaN where no token of that kind took part.
    """

    def mean(name: str, over: str) -> float:
        return totals[name] / totals[over] if totals[over] else float("nan")

    ratio_sum, squares = totals["replayed/ratio"], totals["replayed/ratio_squared"]
    pull = totals["fresh/pull"] + totals["replayed/pull"]
    replayed = totals["replayed/tokens"]
    nan = float("nan")
    return {
        "policy_loss": totals["policy_loss"] / num_updates,
        "entropy": mean("entropy", "tokens"),
        "num_tokens_trained": totals["tokens"],
        "importance_ratio_fresh_mean": mean("fresh/ratio", "fresh/tokens"),
        "clip_fraction": mean("fresh/clipped", "fresh/tokens"),
        "rollout_correction_mean": mean("fresh/token_weights", "fresh/tokens"),
        "num_tokens_left_out": totals["fresh/left_out"],
        "importance_ratio_replayed_mean": mean("replayed/ratio", "replayed/tokens"),
        "replayed_saturated_fraction": mean("replayed/saturated", "replayed/tokens"),
        "replayed_effective_sample_fraction": (
            ratio_sum**2 / squares / replayed if squares else nan
        ),
        "replayed_token_fraction": mean("replayed/tokens", "tokens"),
        "replayed_gradient_fraction": totals["replayed/pull"] / pull if pull else nan,
    }
