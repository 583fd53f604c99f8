"""How much memory a run needs, by formulas: an estimate to within a factor of two.

With N parameters of b bytes, n of them trained, L layers of width h, V words, and T
tokens in a micro-batch:

- training state: b (N - n) frozen weights. Plain PyTorch trains in float32: weights,
  gradients and two moments, 16 n. DeepSpeed has b n weights, b n gradients, 12 n for
  the moments and a master copy in float32. ZeRO divides these last (stage 1 on), the
  gradients (2 on) and the weights (3) by the number of learners.
- activations: 17 b T h L, the usual count for a transformer whose attention keeps no
  matrix; with gradient checkpointing b T h L, and one layer's 17 b T h.
- logits: 4 C V three times over (logits, their exponentials, gradients), for the C
  tokens that are scored at a time.
- engine on a CPU: b N weights, once more while new ones are loaded, and the key-value
  cache.
- buffer: 8 bytes a token, a token id and a log-prob.
"""

from dataclasses import dataclass
from typing import Any

TOKENS_PER_CHUNK = 2048
"""C above; the default of `LanguagePolicy`."""

PROCESS_BYTES = 2**30
"""What a process with torch and vLLM takes before any model."""


@dataclass(frozen=True)
class ModelSize:
    """The numbers of a model that memory depends on.

    Attributes:
        parameters: N.
        trained: n; the others are frozen.
        layers: L.
        width: h.
        words: V, the size of the vocabulary.
        bytes_per_weight: b.
    """

    parameters: int
    trained: int
    layers: int
    width: int
    words: int
    bytes_per_weight: int

    @classmethod
    def of(cls, model: Any) -> "ModelSize":
        """Reads the numbers from a Hugging Face model, which may be without weights."""
        text = model.config.get_text_config()
        return cls(
            parameters=model.num_parameters(),
            trained=model.num_parameters(only_trainable=True),
            layers=text.num_hidden_layers,
            width=text.hidden_size,
            words=text.vocab_size,
            bytes_per_weight=model.dtype.itemsize,
        )


def learner_bytes(
    size: ModelSize,
    *,
    num_learners: int,
    zero_stage: int | None,
    micro_batch_tokens: int,
    gradient_checkpointing: bool,
) -> float:
    """Estimates the memory of one learner.

    Args:
        size: of the model.
        num_learners: that share it; 0 counts as 1.
        zero_stage: None for plain PyTorch.
        micro_batch_tokens: T, prompt and completion.
        gradient_checkpointing: layers are computed again in the backward pass.

    Returns:
        Bytes.
    """
    state = _training_state_bytes(size, max(num_learners, 1), zero_stage)
    layer = 17 * size.bytes_per_weight * micro_batch_tokens * size.width
    activations = (
        layer * (size.layers / 17 + 1)
        if gradient_checkpointing
        else layer * size.layers
    )
    logits = 3 * 4 * min(TOKENS_PER_CHUNK, micro_batch_tokens) * size.words
    return state + activations + logits


def _training_state_bytes(
    size: ModelSize, num_learners: int, zero_stage: int | None
) -> float:
    frozen = float(size.bytes_per_weight * (size.parameters - size.trained))
    if zero_stage is None:
        return frozen + 16 * size.trained
    parts = {
        3: size.bytes_per_weight * size.trained,  # weights
        2: size.bytes_per_weight * size.trained,  # gradients
        1: 12 * size.trained,  # moments and master copy
    }
    return frozen + sum(
        part / (num_learners if zero_stage >= stage else 1)
        for stage, part in parts.items()
    )


def cpu_engine_bytes(size: ModelSize, kv_cache_bytes: int) -> float:
    """Estimates the memory of one engine on a CPU, in bytes."""
    return 2 * size.bytes_per_weight * size.parameters + kv_cache_bytes


def buffer_bytes(num_prompts: int, completions: int, tokens: int) -> float:
    """Returns the memory of a buffer of so many prompts, completions and tokens."""
    return 8.0 * num_prompts * completions * tokens


def checkpoint_bytes(size: ModelSize) -> float:
    """Estimates the size of a checkpoint, without the buffer: weights and optimiser."""
    return size.bytes_per_weight * size.parameters + 12.0 * size.trained
