"""The language model as a policy: log-probs and entropies of completion tokens.

Shapes: B rows, L tokens of prompt and completion, N counted tokens, V vocabulary.
"""

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

TINY_MODEL = "tiny-arithmetic"
"""Name of the embedded model, accepted wherever a model path or hub name is."""


def resolve_model(name_or_path: str) -> str:
    """Returns what `from_pretrained` takes: the embedded model's folder, or the name.

    The embedded model is named, not given by its path, because every node of a cluster
    has its own copy of the package.

    Raises:
        ValueError: if the name looks like a path but no such folder exists.
    """
    if name_or_path == TINY_MODEL:
        return str(Path(__file__).parent / "tiny_model" / "weights")
    looks_like_path = name_or_path.startswith((".", "/", "~")) or (
        name_or_path.count("/") > 1
    )
    path = Path(name_or_path).expanduser()
    if looks_like_path and not path.is_dir():
        raise ValueError(
            f"`model_name_or_path`={name_or_path!r}: there is no such folder. Give the "
            "folder of a Hugging Face causal language model (config.json, safetensors, "
            f"tokenizer), a hub name such as 'Qwen/Qwen2.5-Math-7B', or {TINY_MODEL!r}."
        )
    return str(path) if path.is_dir() else name_or_path


def load_tokenizer(name_or_path: str, *, trust_remote_code: bool = False) -> Any:
    """Loads the model's tokenizer.

    Raises:
        ValueError: if there is none at that name, with the hub's own reason.
    """
    from transformers import AutoTokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return AutoTokenizer.from_pretrained(
            resolve_model(name_or_path), trust_remote_code=trust_remote_code
        )
    except OSError as error:
        raise ValueError(
            f"`model_name_or_path`={name_or_path!r} cannot be loaded: "
            f"{str(error).splitlines()[0]} Give an existing folder, or a hub name that "
            f"this machine can reach, or {TINY_MODEL!r}."
        ) from error


def tokenizer_hash(tokenizer: Any) -> str:
    """Returns a hash of what token ids mean: equal vocabularies have equal hashes."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def load_model_config(name_or_path: str, *, trust_remote_code: bool = False) -> Any:
    """Loads the model's Hugging Face configuration."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(
        resolve_model(name_or_path), trust_remote_code=trust_remote_code
    )


def stop_token_ids(name_or_path: str, tokenizer: Any) -> list[int]:
    """Collects every end token the model declares; many declare more than one."""
    from transformers import GenerationConfig

    ids = {tokenizer.eos_token_id}
    try:
        declared = GenerationConfig.from_pretrained(resolve_model(name_or_path))
    except OSError:  # the file is optional
        declared = None
    if declared is not None and declared.eos_token_id is not None:
        eos = declared.eos_token_id
        ids.update(eos if isinstance(eos, list) else [eos])
    return sorted(int(i) for i in ids if i is not None)


class TokenScores(NamedTuple):
    """Per counted token, in row order: (N,) float32 log-prob and entropy in nats."""

    logp: Tensor
    entropy: Tensor


class LanguagePolicy(nn.Module):
    """A Hugging Face causal LM that scores given completions.

    Logits exist only for completion tokens and only for `tokens_per_chunk` of them at a
    time; the backward pass computes them again. Memory therefore does not grow with
    tokens times vocabulary.

    Args:
        model: the causal LM; its weights stay in `model`, under their own names.
        temperature: of sampling; the logits are divided by it, as in the engine.
        tokens_per_chunk: completion tokens whose logits exist at once.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        tokens_per_chunk: int = 2048,
    ) -> None:
        super().__init__()
        self.model: Any = model  # any Hugging Face architecture
        self.temperature = temperature
        self.tokens_per_chunk = tokens_per_chunk

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        dtype: str = "float32",
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
        gradient_checkpointing: bool = False,
        **kwargs: Any,
    ) -> "LanguagePolicy":
        """Loads weights and switches dropout off, as sampling has none.

        Args:
            name_or_path: folder, hub name, or the embedded model's name.
            dtype: of the weights, a torch dtype's name.
            attn_implementation: of transformers.
            trust_remote_code: run code that comes with the model.
            gradient_checkpointing: recompute layers in the backward pass.
            kwargs: for the constructor.
        """
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            resolve_model(name_or_path),
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        model.config.use_cache = False
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        policy = cls(model, **kwargs)
        policy.check_head()
        return policy

    @torch.no_grad()
    def check_head(self) -> None:
        """Verifies that hidden states times output embeddings are the model's logits.

        Raises:
            ValueError: for architectures that transform their logits further (soft
                caps, scales), for which the chunked head would be wrong.
        """
        device = next(self.model.parameters()).device
        probe = torch.arange(2, 6, device=device)[None]
        expected = self.model(input_ids=probe).logits
        actual = self._embeddings(self._base(input_ids=probe).last_hidden_state)
        if not torch.allclose(expected, actual, rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"`model_name_or_path`: {type(self.model).__name__} changes its logits "
                "after the output embeddings, which the learner does not support. Use "
                "an architecture without logit soft caps or scales (Qwen, Llama, ...)."
            )

    @property
    def _base(self) -> Any:
        return self.model.base_model

    @property
    def _embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        prediction_mask: Tensor,
        with_entropy: bool = True,
    ) -> TokenScores:
        """Scores the tokens that follow the marked positions.

        Args:
            input_ids: (B, L) int64.
            attention_mask: (B, L) bool.
            prediction_mask: (B, L - 1) bool, True where the next token is scored.
            with_entropy: whether the entropy is wanted; else it is zeros.

        Returns:
            (N,) values in row order, N the number of marked positions.
        """
        hidden = self._base(
            input_ids=input_ids, attention_mask=attention_mask.long()
        ).last_hidden_state
        hidden_N = hidden[:, :-1][prediction_mask]
        targets_N = input_ids[:, 1:][prediction_mask]
        parts = [
            checkpoint(self._score_chunk, h, t, with_entropy, use_reentrant=False)
            for h, t in zip(
                hidden_N.split(self.tokens_per_chunk),
                targets_N.split(self.tokens_per_chunk),
                strict=True,
            )
        ]
        return TokenScores(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def _score_chunk(
        self, hidden: Tensor, targets: Tensor, with_entropy: bool
    ) -> TokenScores:
        logits = self._embeddings(hidden).float() / self.temperature
        logp = -cross_entropy(logits, targets, reduction="none")
        if not with_entropy:
            return TokenScores(logp, torch.zeros_like(logp))
        log_probs = logits.log_softmax(-1)
        return TokenScores(logp, -(log_probs.exp() * log_probs).sum(-1))
