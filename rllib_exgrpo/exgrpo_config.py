"""The configuration of ExGRPO, in RLlib's dialect."""

import difflib
import inspect
from collections.abc import Mapping
from numbers import Real
from typing import Any, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.annotations import override

from rllib_exgrpo.exgrpo_env import find_env
from rllib_exgrpo.policy import TINY_MODEL, resolve_model
from rllib_exgrpo.prompt_format import PromptFormatter

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "official_code": {
        "collect_before_start": False,
        "loss_aggregation": "completion_sum",
        "retired_prompts": "until_pass_ends",
        "replay_buffer_config": {"mark_failed": False},
    },
    "on_policy": {"replay_ratio": 0.0, "retired_prompts": "keep"},
}
"""What each preset changes of the defaults, which are the paper's."""

_CHOICES = {
    "loss_aggregation": ("completion_mean", "completion_sum"),
    "retired_prompts": ("drop", "until_pass_ends", "keep"),
    "prompt_format": ("auto", "chat", "plain"),
    "long_prompts": ("error", "drop"),
    "zero_stage": (None, 0, 1, 2, 3),
}


class ExGRPOConfig(AlgorithmConfig):
    """Configures ExGRPO (arXiv 2510.02245); the defaults are the paper's settings.

    .. code-block:: python

        from rllib_exgrpo import ExGRPOConfig
        from rllib_exgrpo.envs import ArithmeticEnv

        config = (
            ExGRPOConfig()
            .environment(ArithmeticEnv, env_config={"split": "train"})
            .language_model("tiny-arithmetic", max_completion_tokens=64)
            .training(lr=5e-5, prompts_per_step=32, prompts_per_update=16)
        )
        algo = config.build_algo()
        print(algo.train()["env_runners"]["pass_rate"])
    """

    def __init__(self, algo_class: Any = None) -> None:
        # Here, because both import this module.
        from rllib_exgrpo.exgrpo import ExGRPO
        from rllib_exgrpo.exgrpo_env_runner import ExGRPOEnvRunner

        super().__init__(algo_class=algo_class or ExGRPO)

        # The step. Paper symbols in brackets.
        self.prompts_per_step = 128  # [P]
        self.prompts_per_update = 64
        self.group_size = 8  # [G; the paper's K]
        self.success_threshold = 1.0

        # Replay.
        self.replay_ratio = 0.5  # [rho]
        self.replay_start_pass_rate: float | None = 0.35
        self.collect_before_start = True
        self.retired_prompts = "drop"
        self.replay_buffer_config: dict[str, Any] = {}  # mu, sigma, ...: see the class

        # Loss.
        self.shaping_beta: float | None = 0.1  # [beta]
        self.replay_importance_ratio = True
        self.clip_eps: float | None = 0.2  # [epsilon]
        self.clip_eps_high: float | None = None
        self.clip_when_mixed = False
        self.entropy_coeff = 0.001
        self.normalize_advantages_by_std = False
        self.loss_aggregation = "completion_mean"

        # Optimiser.
        self.lr = 1e-6
        self.adam_betas = (0.9, 0.999)
        self.adam_eps = 1e-8
        self.weight_decay = 0.01
        self.grad_clip = 1.0
        self.skip_above_grad_norm: float | None = 500.0

        # Language model and prompts.
        self.model_name_or_path = TINY_MODEL
        self.model_dtype = "float32"
        self.attn_implementation = "sdpa"
        self.gradient_checkpointing = False
        self.trust_remote_code = False
        self.prompt_format = "auto"
        self.plain_template = "{prompt}\n"
        self.system_prompt: str | None = None
        self.assistant_prefix = ""
        self.chat_template_kwargs: dict[str, Any] = {}
        self.max_prompt_tokens = 1024
        self.max_completion_tokens = 8192
        self.long_prompts = "error"

        # Sampling engine.
        self.temperature = 1.0
        self.kv_cache_bytes = 2**28
        self.gpu_memory_utilization = 0.8
        self.tensor_parallel_size = 1
        self.engine_kwargs: dict[str, Any] = {}

        # Learners.
        self.zero_stage: int | None = None
        self.deepspeed_config: dict[str, Any] = {}
        self.max_tokens_per_micro_batch: int | None = 32768

        # Evaluation.
        self.evaluation_temperature = 0.6
        self.evaluation_samples_per_prompt = 1
        self.evaluation_max_prompts: int | None = None
        self.evaluation_at_start = True

        # RLlib's own settings, where its defaults do not suit text.
        self.env_runner_cls = ExGRPOEnvRunner
        self.num_env_runners = 0
        self.sample_timeout_s = None  # a slow generation is not a lost one
        self.evaluation_sample_timeout_s = None
        self.delay_between_env_runner_restarts_s = 1.0
        self._dont_auto_sync_env_runner_states = True  # there are no connectors

    @classmethod
    def preset(cls, name: str) -> Self:
        """Returns a config with one of the published settings.

        Args:
            name: "paper"; "official_code", which follows the authors' code where it
                departs from the paper; or "on_policy", the baseline without replay
                (Dr. GRPO).

        Raises:
            ValueError: for an unknown name.
        """
        if name not in PRESETS:
            raise ValueError(f"`preset` is {name!r}; take one of {sorted(PRESETS)}.")
        return cls().training(**PRESETS[name])

    @override(AlgorithmConfig)
    def training(
        self,
        *,
        prompts_per_step: int = NotProvided,
        prompts_per_update: int = NotProvided,
        group_size: int = NotProvided,
        success_threshold: float = NotProvided,
        replay_ratio: float = NotProvided,
        replay_start_pass_rate: float | None = NotProvided,
        collect_before_start: bool = NotProvided,
        retired_prompts: str = NotProvided,
        replay_buffer_config: dict[str, Any] = NotProvided,
        shaping_beta: float | None = NotProvided,
        replay_importance_ratio: bool = NotProvided,
        clip_eps: float | None = NotProvided,
        clip_eps_high: float | None = NotProvided,
        clip_when_mixed: bool = NotProvided,
        entropy_coeff: float = NotProvided,
        normalize_advantages_by_std: bool = NotProvided,
        loss_aggregation: str = NotProvided,
        adam_betas: tuple[float, float] = NotProvided,
        adam_eps: float = NotProvided,
        weight_decay: float = NotProvided,
        skip_above_grad_norm: float | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets the training related configuration.

        Args:
            prompts_per_step: prompts of a training step, fresh and replayed (P).
            prompts_per_update: prompts of a mini-batch, that is, of one optimiser
                update; must divide `prompts_per_step`.
            group_size: completions of each prompt (G; the paper's K), at least 2.
            success_threshold: smallest reward, in (0, 1], that counts as correct.
            replay_ratio: share of the prompts that are replayed (rho), in [0, 1]; 0
                turns replay off.
            replay_start_pass_rate: replay starts after the first step whose pass rate
                on fresh completions exceeds it; None starts at once.
            collect_before_start: store completions before replay starts too.
            retired_prompts: solved prompts in fresh draws: "drop" never draws them
                again, "until_pass_ends" still does in the pass over the data in which
                they were solved, "keep" always does.
            replay_buffer_config: arguments of the replay buffer: `mu`, `sigma`,
                `prompt_selection`, `completion_selection`, caps and ages (see
                `ExGRPOReplayBuffer`); `type` names another class. Merged into the
                present settings.
            shaping_beta: beta of the shaping f(w) = w / (w + beta) of replayed tokens;
                None turns shaping off.
            replay_importance_ratio: weigh replayed tokens by the importance ratio;
                False takes the probability under the current policy in its place.
            clip_eps: clip range of fresh tokens (epsilon); None turns clipping off.
            clip_eps_high: upper clip range, if it differs.
            clip_when_mixed: clip fresh tokens also once replay is active.
            entropy_coeff: weight of the entropy bonus.
            normalize_advantages_by_std: divide advantages by the group's deviation.
            loss_aggregation: "completion_mean" or "completion_sum" over the
                completions of a mini-batch; each completion counts the sum over its
                tokens divided by `max_completion_tokens`.
            adam_betas: of AdamW.
            adam_eps: of AdamW.
            weight_decay: of AdamW.
            skip_above_grad_norm: updates with a larger gradient norm (before clipping)
                are skipped and counted; None skips only norms that are not finite.
            kwargs: RLlib's own, such as `lr` and `grad_clip`.
        """
        given = _provided(locals())
        if "replay_buffer_config" in given:
            merged = {**self.replay_buffer_config, **given["replay_buffer_config"]}
            given["replay_buffer_config"] = merged
        super().training(**kwargs)
        return self._assign(given)

    def language_model(
        self,
        model_name_or_path: str = NotProvided,
        *,
        model_dtype: str = NotProvided,
        attn_implementation: str = NotProvided,
        gradient_checkpointing: bool = NotProvided,
        trust_remote_code: bool = NotProvided,
        prompt_format: str = NotProvided,
        plain_template: str = NotProvided,
        system_prompt: str | None = NotProvided,
        assistant_prefix: str = NotProvided,
        chat_template_kwargs: dict[str, Any] = NotProvided,
        max_prompt_tokens: int = NotProvided,
        max_completion_tokens: int = NotProvided,
        long_prompts: str = NotProvided,
    ) -> Self:
        """Sets the language model and how prompts are put to it.

        Args:
            model_name_or_path: a Hugging Face causal language model: a folder, a hub
                name, or "tiny-arithmetic", the embedded one.
            model_dtype: of the weights, in the engine and in the learner: "float32" or
                "bfloat16".
            attn_implementation: of transformers: "sdpa", "eager",
                "flash_attention_2", ...
            gradient_checkpointing: recompute layers in the backward pass to save
                memory.
            trust_remote_code: run code that comes with the model; off for safety.
            prompt_format: "chat" uses the tokenizer's chat template, "plain" the
                `plain_template`, "auto" the template where there is one.
            plain_template: text with the placeholder `{prompt}`.
            system_prompt: replaces the system message of the problems.
            assistant_prefix: text each completion starts after, such as "<think>"; the
                verifier reads it too.
            chat_template_kwargs: passed to the chat template.
            max_prompt_tokens: longest prompt, in tokens.
            max_completion_tokens: longest completion, in tokens; also the constant
                that the loss of a completion is divided by.
            long_prompts: what to do with longer prompts at start: "error" or "drop".
        """
        return self._assign(_provided(locals()))

    def engine(
        self,
        *,
        temperature: float = NotProvided,
        kv_cache_bytes: int = NotProvided,
        gpu_memory_utilization: float = NotProvided,
        tensor_parallel_size: int = NotProvided,
        engine_kwargs: dict[str, Any] = NotProvided,
    ) -> Self:
        """Sets the vLLM engine that each env runner hosts.

        Args:
            temperature: of sampling in training, above 0. Top-p and top-k stay off:
                they would change what a log-prob means.
            kv_cache_bytes: key-value cache of an engine on a CPU.
            gpu_memory_utilization: share of the GPU's memory for an engine on a GPU.
            tensor_parallel_size: GPUs of one engine.
            engine_kwargs: further arguments of `vllm.LLM`; they win.
        """
        return self._assign(_provided(locals()))

    @override(AlgorithmConfig)
    def learners(
        self,
        *,
        zero_stage: int | None = NotProvided,
        deepspeed_config: dict[str, Any] = NotProvided,
        max_tokens_per_micro_batch: int | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets how the model is trained.

        Args:
            zero_stage: DeepSpeed's ZeRO stage, 0 to 3. None, for at most one learner,
                trains with plain PyTorch.
            deepspeed_config: further DeepSpeed settings.
            max_tokens_per_micro_batch: token budget of one forward and backward pass,
                padding included; it changes speed and memory, not the update.
            kwargs: RLlib's own, such as `num_learners` and `num_gpus_per_learner`.
        """
        super().learners(**kwargs)
        given = _provided(locals())
        return self._assign(given)

    @override(AlgorithmConfig)
    def evaluation(
        self,
        *,
        evaluation_temperature: float = NotProvided,
        evaluation_samples_per_prompt: int = NotProvided,
        evaluation_max_prompts: int | None = NotProvided,
        evaluation_at_start: bool = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets the evaluation on held-out problems.

        The problems are those of the environment with the overrides in
        `evaluation_config`, for example `{"env_config": {"split": "heldout"}}`. Each
        is sampled the same number of times by the training engines.

        Args:
            evaluation_temperature: of sampling; 0 is greedy.
            evaluation_samples_per_prompt: completions of each problem.
            evaluation_max_prompts: evaluate only the first so many problems; None
                takes all.
            evaluation_at_start: evaluate before the first step too, if
                `evaluation_interval` is set; reported as `evaluation_at_start`.
            kwargs: RLlib's own, such as `evaluation_interval`.
        """
        super().evaluation(**kwargs)
        return self._assign(_provided(locals()))

    def _assign(self, values: Mapping[str, Any]) -> Self:
        for name, value in values.items():
            setattr(self, name, value)
        return self

    # --- checking

    @override(AlgorithmConfig)
    def validate(self) -> None:
        """Checks all values; messages name the knob, its value and the remedy."""
        self._validate_choices()
        self._validate_sizes()
        self._validate_numbers()
        self._validate_ranges()
        self._validate_learners()
        resolve_model(self.model_name_or_path)
        if self.env is not None:
            find_env(self.env)
        self.build_replay_buffer()
        super().validate()

    def _validate_choices(self) -> None:
        for knob, choices in _CHOICES.items():
            value = getattr(self, knob)
            if value not in choices:
                self._reject(knob, f"take one of {', '.join(map(repr, choices))}")

    def _validate_sizes(self) -> None:
        for knob in (
            "prompts_per_step",
            "prompts_per_update",
            "group_size",
            "max_prompt_tokens",
            "max_completion_tokens",
            "evaluation_samples_per_prompt",
        ):
            value = getattr(self, knob)
            if not isinstance(value, int) or value < 1:
                self._reject(knob, "give a whole number of at least 1")
        if self.group_size < 2:
            self._reject(
                "group_size",
                "advantages compare the completions of one prompt, so a group needs at "
                "least 2; the paper uses 8",
            )
        step, update = self.prompts_per_step, self.prompts_per_update
        if step % update:
            low = step // update * update
            fits = " or ".join(str(n) for n in (low, low + update) if n)
            self._reject(
                "prompts_per_step",
                f"it must be a multiple of `prompts_per_update`={update} (both count "
                f"prompts): {fits} would do",
            )

    def _validate_numbers(self) -> None:
        for knob in (
            "replay_ratio",
            "replay_start_pass_rate",
            "success_threshold",
            "shaping_beta",
            "clip_eps",
            "clip_eps_high",
            "entropy_coeff",
            "adam_eps",
            "weight_decay",
            "grad_clip",
            "skip_above_grad_norm",
            "temperature",
            "evaluation_temperature",
        ):
            value = getattr(self, knob)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not is_number:
                self._reject(knob, "give a number, without quotes")
        if isinstance(self.lr, str):
            self._reject("lr", "give a number (in YAML: 1.0e-5), or RLlib's schedule")
        if isinstance(self.lr, Real) and not self.lr > 0:
            self._reject("lr", "give a learning rate above 0")

    def _validate_ranges(self) -> None:
        positive = {
            "temperature": self.temperature,
            "shaping_beta": self.shaping_beta,
            "clip_eps": self.clip_eps,
            "clip_eps_high": self.clip_eps_high,
            "skip_above_grad_norm": self.skip_above_grad_norm,
        }
        for knob, value in positive.items():
            if value is not None and not value > 0:
                hint = "" if knob == "temperature" else ", or None to turn it off"
                self._reject(knob, f"give a number above 0{hint}")
        if not 0 <= self.replay_ratio <= 1:
            self._reject(
                "replay_ratio",
                "it is a share of the prompts of a step: give a number from 0 (no "
                "replay) to 1; the paper uses 0.5",
            )
        rate = self.replay_start_pass_rate
        if rate is not None and not 0 <= rate < 1:
            self._reject(
                "replay_start_pass_rate",
                "give a pass rate from 0 up to but not including 1, or None to start "
                "at once",
            )
        if not 0 < self.success_threshold <= 1:
            self._reject("success_threshold", "give a reward above 0 and at most 1")
        if self.evaluation_temperature < 0:
            self._reject("evaluation_temperature", "give 0 (greedy) or more")
        if "{prompt}" not in self.plain_template:
            self._reject("plain_template", "it needs the placeholder {prompt}")

    def _validate_learners(self) -> None:
        if self.zero_stage is None and self.num_learners > 1:
            self._reject(
                "zero_stage",
                f"`num_learners`={self.num_learners} share one model through "
                "DeepSpeed: give a ZeRO stage from 0 (whole copies) to 3 (everything "
                "sharded)",
            )
        budget = self.max_tokens_per_micro_batch
        if budget is not None and budget < 1:
            self._reject("max_tokens_per_micro_batch", "give at least 1, or None")

    def _reject(self, knob: str, remedy: str) -> None:
        self._value_error(f"`{knob}` is {getattr(self, knob)!r}: {remedy}.")

    @override(AlgorithmConfig)
    def update_from_dict(self, config_dict: Mapping[str, Any]) -> Self:
        """Updates from a dict, refusing names that are not settings.

        Raises:
            ValueError: for an unknown name, with the nearest right one.
        """
        # "class" is in configs that come from a checkpoint.
        special = {"multiagent", "callbacks", "_enable_new_api_stack", "class"}
        settings = dict(config_dict)  # RLlib also passes a whole AlgorithmConfig
        for key in settings:
            name = self._translate_special_keys(key, warn_deprecated=False)
            is_tunes_own = key.startswith("__")
            is_method = inspect.isfunction(getattr(type(self), name, None))
            is_setting = hasattr(self, name) and not is_method
            if not (is_tunes_own or name in special or is_setting):
                near = difflib.get_close_matches(name, vars(self), n=1, cutoff=0.5)
                hint = f"did you mean `{near[0]}`?" if near else "see the README."
                raise ValueError(f"`{key}` is not a setting of ExGRPO; {hint}")
        return super().update_from_dict(settings)

    # --- what RLlib and the stations read

    def build_replay_buffer(self, seed: int | None = None) -> Any:
        """Builds the replay buffer that `replay_buffer_config` describes.

        Raises:
            ValueError: for a knob it does not have, or a value out of range.
        """
        from rllib_exgrpo.exgrpo_replay import ExGRPOReplayBuffer

        knobs = dict(self.replay_buffer_config)
        buffer_class = knobs.pop("type", ExGRPOReplayBuffer)
        known = inspect.signature(ExGRPOReplayBuffer).parameters
        for name in knobs:
            if buffer_class is ExGRPOReplayBuffer and name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                hint = (
                    f"did you mean {near[0]!r}?" if near else f"take {sorted(known)}."
                )
                self._value_error(f"`replay_buffer_config` has {name!r}: {hint}")
        return buffer_class(
            **{
                "group_size": self.group_size,
                "success_threshold": self.success_threshold,
                "seed": seed,
                **knobs,
            }
        )

    @override(AlgorithmConfig)
    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Returns the language model as a module."""
        from rllib_exgrpo.exgrpo_rl_module import ExGRPORLModule

        return RLModuleSpec(module_class=ExGRPORLModule)

    @override(AlgorithmConfig)
    def get_default_learner_class(self) -> Any:
        """Returns the learner."""
        from rllib_exgrpo.exgrpo_learner import ExGRPOLearner

        return ExGRPOLearner

    @override(AlgorithmConfig)
    def build_learner_group(
        self,
        *,
        env: Any = None,
        spaces: Any = None,
        rl_module_spec: Any = None,
        placement_group: Any = None,
    ) -> Any:
        """Builds the learner group that can read sharded parameters."""
        from rllib_exgrpo.exgrpo_learner_group import ExGRPOLearnerGroup

        spec = rl_module_spec or self.get_multi_rl_module_spec(env=env, spaces=spaces)
        return ExGRPOLearnerGroup(
            config=self.copy(), module_spec=spec, placement_group=placement_group
        )

    @property
    @override(AlgorithmConfig)
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return {
            "name_or_path": self.model_name_or_path,
            "dtype": self.model_dtype,
            "attn_implementation": self.attn_implementation,
            "trust_remote_code": self.trust_remote_code,
            "gradient_checkpointing": self.gradient_checkpointing,
            "temperature": self.temperature,
        }

    def build_prompt_formatter(self, tokenizer: Any) -> PromptFormatter:
        """Builds what turns messages into prompt token ids."""
        return PromptFormatter(
            tokenizer,
            prompt_format=self.prompt_format,
            plain_template=self.plain_template,
            system_prompt=self.system_prompt,
            assistant_prefix=self.assistant_prefix,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def resolved_engine_kwargs(self) -> dict[str, Any]:
        """Returns the arguments of `vllm.LLM` that depend on the hardware."""
        if self.num_gpus_per_env_runner > 0:
            sized = {
                "gpu_memory_utilization": self.gpu_memory_utilization,
                "tensor_parallel_size": self.tensor_parallel_size,
            }
        else:
            # Compiling takes longer than it saves on models that suit a CPU.
            sized = {
                "kv_cache_memory_bytes": self.kv_cache_bytes,
                "enforce_eager": True,
            }
        return {**sized, **self.engine_kwargs}

    @property
    def max_replayed_prompts(self) -> int:
        """Most prompts replayed in a step: rho P, rounded down."""
        # 0.29 * 100 is 28.999999999999996 in floating point.
        return int(self.replay_ratio * self.prompts_per_step + 1e-9)

    def fresh_clip_range(
        self, *, replay_is_active: bool
    ) -> float | tuple[float, float] | None:
        """Returns the clip range of fresh tokens, None for no clipping."""
        if self.clip_eps is None or (replay_is_active and not self.clip_when_mixed):
            return None
        if self.clip_eps_high is None:
            return self.clip_eps
        return self.clip_eps, self.clip_eps_high


def _provided(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Keeps the arguments of a setter that were given."""
    internal = {"self", "kwargs", "__class__"}
    return {
        name: value
        for name, value in arguments.items()
        if name not in internal and value is not NotProvided
    }
