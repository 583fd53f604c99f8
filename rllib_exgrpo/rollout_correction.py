"""Correction of what differs between the sampling engine and the learner, pure numpy.

Both run the same weights, but in other kernels and perhaps another precision, so a
token's log-prob differs a little. Let c = exp(learner's - engine's log-prob) of a fresh
token. Its term of the loss may be weighed by min(c, cap), and tokens with c outside a
range be left out. Replayed tokens keep their stored log-probs: for them the importance
ratio corrects the far larger change of the weights.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rllib_exgrpo.batching import Rows

MAX_LOG_RATIO = 20.0
"""Bound on the log of c, far from the overflow of float32."""


@dataclass(frozen=True, kw_only=True)
class RolloutCorrection:
    """How fresh rows are corrected.

    Attributes:
        level: "token" takes each token's own c; "sequence" gives all tokens of a
            completion the product of theirs.
        cap: largest weight (truncated importance sampling); None gives weight 1.
        keep_range: c outside it leaves the token, or the completion, out of the loss;
            None keeps all.
    """

    level: str = "token"
    cap: float | None = None
    keep_range: tuple[float, float] | None = None

    def weights(
        self, log_ratio: NDArray[np.float32], lengths_B: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Returns the constant factor of each token in the loss.

        Args:
            log_ratio: learner's minus engine's log-prob of all tokens, row after row.
            lengths_B: (B,) tokens of each row.
        """
        if self.level == "sequence":
            row_of_token = np.repeat(np.arange(len(lengths_B)), lengths_B)
            summed_B = np.bincount(row_of_token, log_ratio, len(lengths_B))
            log_ratio = summed_B[row_of_token].astype(np.float32)
        ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        capped = 1.0 if self.cap is None else np.minimum(ratio, self.cap)
        low, high = self.keep_range or (0.0, np.inf)
        return np.where((low <= ratio) & (ratio <= high), capped, 0).astype(np.float32)


def rebase(
    rows: Rows,
    index: NDArray[np.int64],
    learner_logp: NDArray[np.float32],
    correction: RolloutCorrection,
) -> Rows:
    """Takes the learner's log-probs as those of the policy that sampled fresh rows.

    Args:
        rows: the rows of a mini-batch.
        index: positions of the fresh rows that were scored, ascending.
        learner_logp: log-probs of their tokens under the weights that sampled them, row
            after row, in the order of `index`.
        correction: of what differs.
    """
    scored_B = np.zeros(len(rows), bool)
    scored_B[index] = True
    is_scored = np.repeat(scored_B, rows.lengths_B)
    behavior_logp, token_weights = rows.behavior_logp.copy(), rows.token_weights.copy()
    behavior_logp[is_scored] = learner_logp
    log_ratio = learner_logp - rows.engine_logp[is_scored]
    token_weights[is_scored] = correction.weights(log_ratio, rows.lengths_B[index])
    return replace(rows, behavior_logp=behavior_logp, token_weights=token_weights)
