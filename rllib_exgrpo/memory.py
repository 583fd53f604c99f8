"""How much memory a run needs, by formulas: an estimate to within a factor of two.

With N parameters of b bytes, L layers of width h, V words, and T tokens in a
micro-batch:

- training state: b N weights, b N gradients, and the optimiser. Plain PyTorch keeps two
  moments, 2 b N. DeepSpeed keeps two moments and a master copy in float32, 12 N. ZeRO
  divides the optimiser (stage 1 on), the gradients (2 on) and the weights (3) by the
  number of learners.
- activations: 17 b T h L, the usual count for a transformer whose attention keeps no
  matrix; with gradient checkpointing b T h L, and one layer's 17 b T h.
- logits: 4 C V three times over (logits, their exponentials, gradients), for the C
  tokens that are scored at a time.
- engine on a CPU: b N weights, once more while new ones are loaded, and the key-value
  cache.
- buffer: 8 bytes a token, a token id and a log-prob.
"""

from dataclasses import dataclass

TOKENS_PER_CHUNK = 2048
"""C above; the default of `LanguagePolicy`."""

PROCESS_BYTES = 2**30
"""What a process with torch and vLLM takes before any model."""


@dataclass(frozen=True)
class ModelSize:
    """The numbers of a model that memory depends on.

    Attributes:
        parameters: N.
        layers: L.
        width: h.
        words: V, the size of the vocabulary.
        bytes_per_weight: b.
    """

    parameters: int
    layers: int
    width: int
    words: int
    bytes_per_weight: int

    @classmethod
    def of(
        cls, name_or_path: str, dtype: str, *, trust_remote_code: bool = False
    ) -> "ModelSize":
        """Reads the numbers from a model's configuration, without its weights."""
        import torch
        from transformers import AutoModelForCausalLM

        from rllib_exgrpo.policy import load_model_config

        config = load_model_config(name_or_path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            )
        text = config.get_text_config()
        return cls(
            model.num_parameters(),
            text.num_hidden_layers,
            text.hidden_size,
            text.vocab_size,
            getattr(torch, dtype).itemsize,
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
    weights = gradients = float(size.bytes_per_weight * size.parameters)
    if zero_stage is None:
        return weights + gradients + 2 * weights
    optimiser = 12.0 * size.parameters
    shares = [num_learners if zero_stage >= stage else 1 for stage in (3, 2, 1)]
    return weights / shares[0] + gradients / shares[1] + optimiser / shares[2]


def cpu_engine_bytes(size: ModelSize, kv_cache_bytes: int) -> float:
    """Estimates the memory of one engine on a CPU, in bytes."""
    return 2 * size.bytes_per_weight * size.parameters + kv_cache_bytes


def buffer_bytes(num_prompts: int, completions: int, tokens: int) -> float:
    """Returns the memory of a buffer of so many prompts, completions and tokens."""
    return 8.0 * num_prompts * completions * tokens


def checkpoint_bytes(size: ModelSize) -> float:
    """Estimates the size of a checkpoint, without the buffer: weights and optimiser."""
    return (size.bytes_per_weight + 12.0) * size.parameters
