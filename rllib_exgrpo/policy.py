"""The language model as a policy: log-probs and entropies of completion tokens.

Shapes: B rows, L tokens of prompt and completion, N counted tokens, V vocabulary.
"""

import json
import os
from collections.abc import Mapping
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rllib_exgrpo.lora import add_adapters
from rllib_exgrpo.token_scorer import LOGITS_PER_CHUNK, TokenScorer

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


def check_model_folder(name_or_path: str) -> None:
    """Checks that a folder holds a model; hub names are left to the hub.

    Raises:
        ValueError: naming what is missing, with what the folder has.
    """
    folder = Path(resolve_model(name_or_path))
    if not folder.is_dir():
        return
    there = sorted(path.name for path in folder.iterdir())
    missing = [
        part
        for part, pattern in (
            ("config.json", "config.json"),
            ("weights (*.safetensors)", "*.safetensors"),
            ("a tokenizer (tokenizer*.json, or its own files)", "*token*"),
        )
        if not any(fnmatch(name, pattern) for name in there)
    ]
    if missing:
        raise ValueError(
            f"`model_name_or_path`={name_or_path!r} is no model: the folder has no "
            f"{' and no '.join(missing)}. It holds {', '.join(there[:8]) or 'nothing'}"
            f"{', ...' if len(there) > 8 else ''}. Give the folder that "
            "`save_pretrained` of model and tokenizer wrote."
        )


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


def load_model_config(
    name_or_path: str,
    *,
    trust_remote_code: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> Any:
    """Loads the model's Hugging Face configuration.

    Args:
        name_or_path: as for `resolve_model`.
        trust_remote_code: run code that comes with the model.
        overrides: values that replace those of the model's config.json.
    """
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(
        resolve_model(name_or_path),
        trust_remote_code=trust_remote_code,
        **(overrides or {}),
    )


def check_model_length(
    model_config: Any, max_prompt_tokens: int, max_completion_tokens: int
) -> None:
    """Checks that the longest sequence fits the positions a model was made for.

    Raises:
        ValueError: if it does not, with the three numbers and the ways out.
    """
    positions = getattr(model_config, "max_position_embeddings", None)
    longest = max_prompt_tokens + max_completion_tokens
    if positions is not None and longest > positions:
        raise ValueError(
            f"`max_prompt_tokens`={max_prompt_tokens} and `max_completion_tokens`="
            f"{max_completion_tokens} make {longest} tokens, but the model reads "
            f"{positions} (`max_position_embeddings` of its config.json). Lower them, "
            "or stretch the model, for example with `model_config_overrides`="
            f"{{'max_position_embeddings': {longest}}} if it uses rotary positions."
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


def build_empty(
    name_or_path: str,
    *,
    dtype: str,
    trust_remote_code: bool = False,
    config_overrides: Mapping[str, Any] | None = None,
    lora_config: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Builds the causal LM without weights, on PyTorch's meta device.

    Args:
        name_or_path: as for `resolve_model`.
        dtype: of the weights, a torch dtype's name.
        trust_remote_code: run code that comes with the model.
        config_overrides: values that replace those of the model's config.json.
        lora_config: arguments of `peft.LoraConfig`: add adapters.
        kwargs: others of `LanguagePolicy.from_pretrained`, unused.
    """
    from transformers import AutoModelForCausalLM

    config = load_model_config(
        name_or_path, trust_remote_code=trust_remote_code, overrides=config_overrides
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
        )
        if lora_config is not None:
            add_adapters(model, lora_config)
    return model


def checkpoint_layers(model: Any) -> None:
    """Lets layers recompute their activations in the backward pass.

    transformers does so only for layers in training mode. Their parts stay in
    evaluation mode, without dropout.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


class TokenScores(NamedTuple):
    """Per counted token, in row order: (N,) float32 log-prob and entropy in nats."""

    logp: Tensor
    entropy: Tensor


class LanguagePolicy(nn.Module):
    """A Hugging Face causal LM that scores given completions.

    Logits exist only for completion tokens and only for a chunk of them at a time; the
    backward pass computes them again. Memory therefore does not grow with tokens times
    vocabulary.

    Args:
        model: the causal LM; its weights stay in `model`, under their own names.
        temperature: of sampling; the logits are divided by it, as in the engine.
        logits_per_chunk: see `TokenScorer`.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        logits_per_chunk: int = LOGITS_PER_CHUNK,
    ) -> None:
        super().__init__()
        self.model: Any = model  # any Hugging Face architecture
        self.scorer = TokenScorer(
            model.get_output_embeddings(),
            temperature=temperature,
            logits_per_chunk=logits_per_chunk,
        )

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        dtype: str = "float32",
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
        gradient_checkpointing: bool = False,
        config_overrides: Mapping[str, Any] | None = None,
        lora_config: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> "LanguagePolicy":
        """Loads weights and switches dropout off, as sampling has none.

        Args:
            name_or_path: folder, hub name, or the embedded model's name.
            dtype: of the weights, a torch dtype's name.
            attn_implementation: of transformers.
            trust_remote_code: run code that comes with the model.
            gradient_checkpointing: recompute layers in the backward pass.
            config_overrides: values that replace those of the model's config.json.
            lora_config: arguments of `peft.LoraConfig`: train only adapters.
            kwargs: for the constructor.
        """
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            resolve_model(name_or_path),
            config=load_model_config(
                name_or_path,
                trust_remote_code=trust_remote_code,
                overrides=config_overrides,
            ),
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        model.config.use_cache = False
        if lora_config is not None:
            add_adapters(model, lora_config)
        if gradient_checkpointing:
            checkpoint_layers(model)
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

    def use_liger_kernel(self) -> None:
        """Swaps Liger's fused kernels into the layers of a model on a GPU.

        The output head keeps `TokenScorer`, which gives entropies too.

        Raises:
            ImportError: if `liger-kernel` is not installed.
        """
        try:
            from liger_kernel.transformers import _apply_liger_kernel_to_instance
        except ImportError as error:
            raise ImportError(
                "`use_liger_kernel` needs a package: `pip install liger-kernel`."
            ) from error
        _apply_liger_kernel_to_instance(
            self.model, cross_entropy=False, fused_linear_cross_entropy=False
        )

    @property
    def _base(self) -> Any:
        return self.model.base_model

    @property
    def _embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, prediction_mask: Tensor
    ) -> TokenScores:
        """Scores the tokens that follow the marked positions.

        Args:
            input_ids: (B, L) int64.
            attention_mask: (B, L) bool.
            prediction_mask: (B, L - 1) bool, True where the next token is scored.

        Returns:
            (N,) values in row order, N the number of marked positions.
        """
        hidden = self._base(
            input_ids=input_ids, attention_mask=attention_mask.long()
        ).last_hidden_state
        hidden_N = hidden[:, :-1][prediction_mask]
        targets_N = input_ids[:, 1:][prediction_mask]
        return TokenScores(*self.scorer(hidden_N, targets_N))
