"""From a micro-batch and its scores to the loss, and from a mini-batch to gradients."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rllib_exgrpo.batching import MiniBatch, PaddedRows, pad
from rllib_exgrpo.loss_metrics import UpdateTotals, token_totals
from rllib_exgrpo.losses import entropy_loss, mixed_policy_loss
from rllib_exgrpo.policy import TokenScores
from rllib_exgrpo.training_engine import TrainingEngine


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What the learner minimises.

    Attributes:
        clip_eps: clip range of fresh tokens; None for no clipping.
        shaping_beta: beta of the shaping of replayed tokens; None for none.
        replay_importance_ratio: whether replayed tokens are weighed by their ratio.
        entropy_coeff: weight of the entropy bonus.
        aggregation: see `denominator`.
        max_completion_tokens: the constant of two of the aggregations.
    """

    clip_eps: float | tuple[float, float] | None
    shaping_beta: float | None
    replay_importance_ratio: bool
    entropy_coeff: float
    aggregation: str
    max_completion_tokens: int

    def denominator(self, rows: PaddedRows, mini_batch: MiniBatch) -> float | Tensor:
        """Returns what the sum over each completion's tokens is divided by.

        - "completion_mean": `max_completion_tokens` times the number of completions.
        - "completion_sum": `max_completion_tokens`.
        - "token_mean": the number of tokens of the mini-batch.
        - "sequence_mean": the completion's own number of tokens times the number of
          completions; (B,).

        The numbers hold for the whole mini-batch, over all learners, and count exactly
        the tokens that the loss sums.
        """
        match self.aggregation:
            case "completion_mean":
                return float(mini_batch.num_completions * self.max_completion_tokens)
            case "completion_sum":
                return float(self.max_completion_tokens)
            case "token_mean":
                return float(mini_batch.num_tokens)
            case "sequence_mean":
                lengths = rows.loss_mask.sum(1).clamp(min=1)
                return lengths * mini_batch.num_completions
        raise ValueError(f"There is no aggregation {self.aggregation!r}.")

    def loss(
        self, rows: PaddedRows, scores: TokenScores, mini_batch: MiniBatch
    ) -> tuple[Tensor, UpdateTotals]:
        """Computes a micro-batch's share of the loss of its mini-batch.

        Args:
            rows: the micro-batch.
            scores: (B, T) log-probs and entropies of its completion tokens.
            mini_batch: with the counts for the denominators.

        Returns:
            A scalar, which summed over micro-batches and learners is the loss, and the
            sums that the metrics need.
        """
        behavior_logp = rows.behavior_logp
        if not self.replay_importance_ratio:
            # The ratio of a replayed token is then its probability, as if the policy
            # that sampled it had been certain.
            behavior_logp = behavior_logp.masked_fill(rows.replay_mask[:, None], 0.0)
        output = mixed_policy_loss(
            scores.logp,
            behavior_logp,
            rows.advantages,
            rows.loss_mask,
            rows.replay_mask,
            clip_eps=self.clip_eps,
            shaping_beta=self.shaping_beta,
            denominator=self.denominator(rows, mini_batch),
            token_weights=rows.token_weights,
        )
        bonus = entropy_loss(
            scores.entropy, rows.loss_mask, denominator=mini_batch.num_tokens
        )
        totals = token_totals(
            output,
            current_logp=scores.logp.detach(),
            entropy=scores.entropy.detach(),
            rows=rows,
            shaping_beta=self.shaping_beta,
        )
        return output.loss + self.entropy_coeff * bonus, totals


def score_tokens(engine: TrainingEngine, rows: PaddedRows) -> TokenScores:
    """Returns (B, T) log-probs and entropies of the completion tokens."""
    scores = engine.forward(rows.input_ids, rows.attention_mask, rows.prediction_mask)
    return TokenScores(rows.dense(scores.logp), rows.dense(scores.entropy))


def accumulate_gradients(
    engine: TrainingEngine,
    mini_batch: MiniBatch,
    compute_loss: Callable[[PaddedRows, TokenScores], Tensor],
    device: torch.device,
) -> None:
    """Adds up the gradients of a learner's share of a mini-batch.

    Args:
        engine: holds the gradients.
        mini_batch: the share.
        compute_loss: turns a micro-batch and its scores into its share of the loss.
        device: where the engine computes.
    """
    last = len(mini_batch.micro_batches) - 1
    for index, micro_batch in enumerate(mini_batch.micro_batches):
        rows = pad(micro_batch).to(device)
        loss = compute_loss(rows, score_tokens(engine, rows))
        engine.backward(loss, is_last=index == last)
