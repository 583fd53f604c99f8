"""Log-probs and entropies of given tokens from hidden states, a chunk at a time.

Shapes: N counted tokens, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

LOGITS_PER_CHUNK = 2**26
"""Logits that exist at once: 256 MiB of float32, 440 tokens at a vocabulary of 152,000;
enough of them keep a GPU's matrix units busy."""


class TokenScorer(nn.Module):
    """Scores tokens under the output head, without ever holding all logits.

    It shares the head's weight, which stays one parameter. It is a module of its own so
    that ZeRO-3 gathers that weight once in each pass, however many chunks there are:
    learners with unequal numbers of chunks make the same collective calls.

    Args:
        head: the output embeddings of a causal LM.
        temperature: the logits are divided by it.
        logits_per_chunk: bounds the logits that exist at once.
    """

    def __init__(
        self,
        head: Any,
        *,
        temperature: float = 1.0,
        logits_per_chunk: int = LOGITS_PER_CHUNK,
    ) -> None:
        super().__init__()
        self.weight = head.weight
        self.bias = getattr(head, "bias", None)
        self.temperature = temperature
        self.logits_per_chunk = logits_per_chunk

    def forward(self, hidden_N: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (N,) float32 log-probs of the targets and entropies, in nats.

        Args:
            hidden_N: (N, H) hidden states.
            targets_N: (N,) int64 tokens to score.
        """
        tokens_per_chunk = max(self.logits_per_chunk // len(self.weight), 1)
        return _ChunkedScores.apply(
            hidden_N,
            self.weight,
            self.bias,
            targets_N,
            self.temperature,
            tokens_per_chunk,
        )


class _ChunkedScores(torch.autograd.Function):
    """Computes the logits of a chunk in the forward pass, and again in the backward.

    A single chunk is kept instead. The gradients are written out because autograd would
    make a new gradient of the whole weight for each chunk, and several copies of the
    logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_N: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        tokens_per_chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logp_N = hidden_N.new_empty(len(hidden_N), dtype=torch.float32)
        entropy_N = torch.empty_like(logp_N)
        for part in _chunks(len(hidden_N), tokens_per_chunk):
            log_probs = _log_probs(hidden_N[part], weight, bias, temperature)
            logp_N[part] = log_probs.gather(1, targets_N[part, None])[:, 0]
            entropy_N[part] = -log_probs.exp().mul_(log_probs).sum(-1)
        kept = log_probs if 0 < len(hidden_N) <= tokens_per_chunk else None
        ctx.save_for_backward(hidden_N, weight, bias, targets_N, entropy_N, kept)
        ctx.temperature, ctx.tokens_per_chunk = temperature, tokens_per_chunk
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logp_N: Tensor, by_entropy_N: Tensor) -> tuple[Any, ...]:
        hidden_N, weight, bias, targets_N, entropy_N, kept = ctx.saved_tensors
        by_hidden, by_weight, by_bias = (
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip(
                (hidden_N, weight, bias), ctx.needs_input_grad[:3], strict=True
            )
        )
        for part in _chunks(len(hidden_N), ctx.tokens_per_chunk):
            log_probs = kept
            if log_probs is None:
                log_probs = _log_probs(hidden_N[part], weight, bias, ctx.temperature)
            by_logits = _gradient_of_logits(
                log_probs,
                targets_N[part, None],
                entropy_N[part, None],
                by_logp_N[part, None] / ctx.temperature,
                by_entropy_N[part, None] / ctx.temperature,
            ).to(weight.dtype)
            if by_hidden is not None:
                torch.mm(by_logits, weight, out=by_hidden[part])
            if by_weight is not None:
                by_weight.addmm_(by_logits.T, hidden_N[part])
            if by_bias is not None:
                by_bias += by_logits.sum(0)
        return by_hidden, by_weight, by_bias, None, None, None


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))


def _log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> Tensor:
    logits = linear(hidden, weight, bias).float()
    if temperature != 1:
        logits /= temperature
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


def _gradient_of_logits(
    log_probs: Tensor,
    targets: Tensor,
    entropy: Tensor,
    by_logp: Tensor,
    by_entropy: Tensor,
) -> Tensor:
    """Computes the gradient in place of `log_probs`, (N, V); the others are (N, 1).

    With z the logits, p the probabilities, t the target and E the entropy:
    d log p_t / d z_v = [v = t] - p_v, and d E / d z_v = -p_v (log p_v + E).
    """
    probs = log_probs.exp()
    gradient = log_probs.mul_(-by_entropy).sub_(by_entropy * entropy + by_logp)
    return gradient.mul_(probs).scatter_add_(1, targets, by_logp)
