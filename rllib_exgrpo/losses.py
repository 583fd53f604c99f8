"""The mixed-policy GRPO loss of ExGRPO (section 4.2, equation 4), pure torch.

Shapes: B rows (completions), T completion tokens. Masks are True where a token counts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound on an unshaped log importance ratio: exp(20) is 4.9e8, far beyond any useful
ratio and far from the overflow of float32. A token at the bound has no gradient."""


@dataclass(frozen=True)
class LossOutput:
    """What `mixed_policy_loss` returns.

    Attributes:
        loss: scalar, the masked sum over tokens, each row's divided by its denominator.
        ratio: (B, T) detached importance ratio exp(current - behavior), bounded by
            exp(MAX_LOG_RATIO); 1 where the mask is False.
        weight: (B, T) detached factor of the advantage: the ratio times `token_weights`
            for a fresh token, f(ratio) for a replayed one; 0 where the mask is False.
        clipped: (B, T) bool, True where clipping or the bound on the ratio removed the
            gradient of a counted token.
    """

    loss: Tensor
    ratio: Tensor
    weight: Tensor
    clipped: Tensor


def shape_ratio(log_ratio: Tensor, beta: float) -> Tensor:
    """Computes f(w) = w / (w + beta) from log w, without overflow for any finite input.

    Policy shaping of the replayed tokens (section 4.2): f is bounded by 1, so a token
    that became likely cannot dominate, and its gradient is largest at w = beta.

    Args:
        log_ratio: log w, any shape.
        beta: the paper's beta, above 0.

    Returns:
        f(w), same shape, in [0, 1].
    """
    return torch.sigmoid(log_ratio - math.log(beta))


def mixed_policy_loss(
    current_logp: Tensor,
    behavior_logp: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    replay_mask: Tensor,
    *,
    clip_eps: float | tuple[float, float] | None,
    shaping_beta: float | None,
    denominator: float | Tensor,
    token_weights: Tensor | None = None,
) -> LossOutput:
    """Computes the policy loss over fresh and replayed tokens.

    With A the row's advantage and w = exp(current_logp - behavior_logp), a fresh token
    costs max(-A w, -A clip(w, 1 - eps, 1 + eps_high)), or -A w without clipping; a
    replayed token costs -A f(w), or -A w without shaping.

    Args:
        current_logp: (B, T) log-probs under the policy being trained.
        behavior_logp: (B, T) log-probs under the policy that sampled the tokens.
        advantages: (B,) advantage of each completion.
        loss_mask: (B, T) bool, True where a token counts. Other tokens get a gradient
            of exactly 0, whatever their values.
        replay_mask: (B,) or (B, T) bool, True for replayed completions.
        clip_eps: eps, or (eps, eps_high); None removes clipping.
        shaping_beta: beta of f; None removes shaping.
        denominator: what the masked sum of a row is divided by, one for all rows or
            (B,). It is computed once for a whole mini-batch, over all learners, so that
            the gradient does not depend on how the rows are cut.
        token_weights: (B, T) constant factors of the fresh tokens' objective; None
            means 1.

    Returns:
        The loss (entropy not included) and per-token diagnostics.
    """
    replay_mask = replay_mask if replay_mask.dim() == 2 else replay_mask[:, None]
    advantages_BT = advantages[:, None]
    log_ratio = torch.where(loss_mask, current_logp - behavior_logp, 0.0)
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = bounded.exp()

    fresh = advantages_BT * ratio
    clipped = bounded.detach() != log_ratio.detach()
    if clip_eps is not None:
        low, high = clip_eps if isinstance(clip_eps, tuple) else (clip_eps, clip_eps)
        limited = advantages_BT * ratio.clamp(1 - low, 1 + high)
        clipped = clipped | (limited < fresh).detach()
        fresh = torch.minimum(fresh, limited)

    weight = ratio
    if token_weights is not None:
        weight, fresh = weight * token_weights, fresh * token_weights
    replayed = advantages_BT * ratio
    if shaping_beta is not None:
        shaped = shape_ratio(log_ratio, shaping_beta)
        weight = torch.where(replay_mask, shaped, weight)
        replayed = advantages_BT * shaped
        clipped = clipped & ~replay_mask
    objective = torch.where(replay_mask, replayed, fresh)
    sums_B = torch.where(loss_mask, objective, 0.0).sum(1)
    return LossOutput(
        loss=-(sums_B / denominator).sum(),
        ratio=ratio.detach(),
        weight=torch.where(loss_mask, weight, 0.0).detach(),
        clipped=clipped & loss_mask,
    )


def entropy_loss(entropy: Tensor, loss_mask: Tensor, *, denominator: float) -> Tensor:
    """Computes minus the mean token entropy; adding it to a loss rewards entropy.

    Args:
        entropy: (B, T) full-vocabulary entropy at each token, in nats.
        loss_mask: (B, T) bool, True where a token counts.
        denominator: number of counted tokens of the whole mini-batch.

    Returns:
        Scalar: minus the masked sum divided by the denominator.
    """
    return -torch.where(loss_mask, entropy, 0.0).sum() / denominator
