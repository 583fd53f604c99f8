"""The configuration of ExGRPO, in RLlib's dialect."""

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.annotations import override

from rllib_exgrpo.config_checks import setting_faults
from rllib_exgrpo.evaluation.sets import (
    UNNAMED,
    EvaluationSet,
    check_best_checkpoint_set,
    named_sets,
)
from rllib_exgrpo.exgrpo_env import find_env
from rllib_exgrpo.lora import build_lora_config
from rllib_exgrpo.policy import TINY_MODEL, check_model_folder
from rllib_exgrpo.prompt_book import PromptBook
from rllib_exgrpo.prompt_format import PromptFormatter
from rllib_exgrpo.replay.finding import find_buffer
from rllib_exgrpo.rollout_correction import RolloutCorrection

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

_WITHOUT_EFFECT = {
    "minibatch_size": "set `prompts_per_update`",
    "num_epochs": "each completion is trained on once; set `prompts_per_update`",
    "train_batch_size": "set `prompts_per_step`",
    "train_batch_size_per_learner": "set `prompts_per_step`",
    "gamma": "an episode has one step, so nothing is discounted",
    "model": "set the language model with `language_model()`",
}
"""Settings of RLlib that this algorithm does not read, and what to do instead."""

_OTHER_NAMES = {
    "model": "model_name_or_path",
    "learning_rate": "lr",
    "max_grad_norm": "grad_clip",
    "num_generations": "group_size",
    "batch_size": "prompts_per_step",
    "max_new_tokens": "max_completion_tokens",
    "beta": "shaping_beta",
    "rho": "replay_ratio",
}
"""What other trainers and the paper call some settings."""


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
        self.max_resampled_prompts = 0

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
        self.skip_zero_advantage_groups = False

        # What differs between engine and learner.
        self.behavior_logp_source = "engine"
        self.rollout_correction_level = "token"
        self.rollout_correction_cap: float | None = None
        self.rollout_correction_range: tuple[float, float] | None = None
        self.max_rollout_logp_diff: float | None = 0.05

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
        self.use_liger_kernel = False
        self.gradient_checkpointing = False
        self.trust_remote_code = False
        self.model_config_overrides: dict[str, Any] = {}
        self.lora_config: dict[str, Any] | None = None
        self.prompt_format = "auto"
        self.plain_template = "{prompt}\n"
        self.system_prompt: str | None = None
        self.assistant_prefix = ""
        self.chat_template_kwargs: dict[str, Any] = {}
        self.max_prompt_tokens = 1024
        self.max_completion_tokens = 8192
        self.long_prompts = "error"
        self.special_token_text = "split"

        # Sampling engine.
        self.temperature = 1.0
        self.kv_cache_bytes = 2**28
        self.gpu_memory_utilization = 0.8
        self.tensor_parallel_size = 1
        self.engine_sleeps = False
        self.weight_transfer = "object_store"
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
        self.prompt_overlap = "warn"
        self.evaluation_sets: dict[str, dict[str, Any]] = {}
        self.best_checkpoint_set: str | None = None

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
        max_resampled_prompts: int = NotProvided,
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
        skip_zero_advantage_groups: bool = NotProvided,
        behavior_logp_source: str = NotProvided,
        rollout_correction_level: str = NotProvided,
        rollout_correction_cap: float | None = NotProvided,
        rollout_correction_range: tuple[float, float] | None = NotProvided,
        max_rollout_logp_diff: float | None = NotProvided,
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
            max_resampled_prompts: most prompts a step that are sampled in place of
                fresh ones whose completions all have one reward (dynamic sampling). The
                update then trains on more prompts that teach something; the replay
                buffer and the metrics of the rollout see all of them. 0 turns it off.
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
                `ReplayKnobs`); `warm_start` names a run, checkpoint or saved buffer
                whose experience this run starts with (docs/replay.md); `type` names
                another class. Merged into the present settings.
            shaping_beta: beta of the shaping f(w) = w / (w + beta) of replayed tokens;
                None turns shaping off.
            replay_importance_ratio: weigh replayed tokens by the importance ratio;
                False takes the probability under the current policy in its place.
            clip_eps: clip range of fresh tokens (epsilon); None turns clipping off.
            clip_eps_high: upper clip range, if it differs.
            clip_when_mixed: clip fresh tokens also once replay is active.
            entropy_coeff: weight of the entropy bonus.
            normalize_advantages_by_std: divide advantages by the group's deviation.
            loss_aggregation: "completion_mean" (the paper's) or "completion_sum" over
                the completions of a mini-batch; each completion counts the sum over its
                tokens divided by `max_completion_tokens`. "token_mean": over all tokens
                of the mini-batch. "sequence_mean": over its completions, each counting
                the mean over its tokens.
            skip_zero_advantage_groups: leave completions with advantage 0 out of the
                forward and backward pass. Their policy term is 0 anyway; what is
                dropped is their part of the entropy bonus. Without a bonus
                (`entropy_coeff` 0) they are always left out. The denominators count
                them in any case.
            behavior_logp_source: "engine" takes the log-probs of fresh tokens that vLLM
                reported, "learner" has the learner compute them before the first
                update (one more forward pass). Replayed tokens keep their stored ones.
            rollout_correction_level: "token" or "sequence": what the next two compare
                with their bounds, c = learner's over engine's probability of a fresh
                token, or of its whole completion. They need "learner" as source.
            rollout_correction_cap: weigh fresh tokens by min(c, cap), that is,
                truncated importance sampling; None gives all weight 1.
            rollout_correction_range: (low, high); fresh tokens or completions with c
                outside are left out of the loss and its denominators; None keeps all.
            max_rollout_logp_diff: warn once if `rollout_logp_diff_mean`, in nats a
                token, exceeds it; None never does.
            adam_betas: of AdamW.
            adam_eps: of AdamW.
            weight_decay: of AdamW.
            skip_above_grad_norm: updates with a larger gradient norm (before clipping)
                are skipped and counted; None skips only norms that are not finite.
            kwargs: RLlib's own, such as `grad_clip` and `lr`: a number, or a schedule
                over the completions sampled, see `rllib_exgrpo.schedules`.
        """
        given = _provided(locals())
        if "replay_buffer_config" in given:
            merged = {**self.replay_buffer_config, **given["replay_buffer_config"]}
            given["replay_buffer_config"] = merged
        self._refuse_unknown(kwargs, AlgorithmConfig.training)
        super().training(**kwargs)
        return self._assign(given)

    def language_model(
        self,
        model_name_or_path: str = NotProvided,
        *,
        model_dtype: str = NotProvided,
        attn_implementation: str = NotProvided,
        use_liger_kernel: bool = NotProvided,
        gradient_checkpointing: bool = NotProvided,
        trust_remote_code: bool = NotProvided,
        model_config_overrides: dict[str, Any] = NotProvided,
        lora_config: dict[str, Any] | None = NotProvided,
        prompt_format: str = NotProvided,
        plain_template: str = NotProvided,
        system_prompt: str | None = NotProvided,
        assistant_prefix: str = NotProvided,
        chat_template_kwargs: dict[str, Any] = NotProvided,
        max_prompt_tokens: int = NotProvided,
        max_completion_tokens: int = NotProvided,
        long_prompts: str = NotProvided,
        special_token_text: str = NotProvided,
    ) -> Self:
        """Sets the language model and how prompts are put to it.

        Args:
            model_name_or_path: a Hugging Face causal language model: a folder, a hub
                name, or "tiny-arithmetic", the embedded one.
            model_dtype: of weights and activations in the engine, and of activations
                in the learner: "float32" or "bfloat16". What is trained is kept in
                float32 either way.
            attn_implementation: of transformers: "sdpa", "eager",
                "flash_attention_2", ...
            use_liger_kernel: Liger's fused kernels in the layers of the learner's
                model, on GPUs.
            gradient_checkpointing: recompute layers in the backward pass to save
                memory.
            trust_remote_code: run code that comes with the model; off for safety.
            model_config_overrides: values that replace those of the model's
                config.json, in the engine and in the learner, for example
                `{"max_position_embeddings": 16384}`.
            lora_config: arguments of `peft.LoraConfig`, such as `{"r": 16,
                "lora_alpha": 32, "target_modules": "all-linear"}`: train low-rank
                adapters only. None trains all weights.
            prompt_format: "chat" uses the tokenizer's chat template, "plain" the
                `plain_template`, "auto" the template where there is one; "paper" is
                the paper's prompt in the chat template, "paper_llama" its plain one.
            plain_template: text with the placeholder `{prompt}`.
            system_prompt: replaces the system message of the problems, and that of
                "paper".
            assistant_prefix: text each completion starts after, such as "<think>"; the
                verifier reads it too.
            chat_template_kwargs: passed to the chat template.
            max_prompt_tokens: longest prompt, in tokens.
            max_completion_tokens: longest completion, in tokens; also the constant
                that the loss of a completion is divided by.
            long_prompts: what to do with longer prompts: "error", "drop", or
                "truncate_left", which keeps their last tokens. More than 20,000
                prompts are checked partly at start and partly when drawn.
            special_token_text: how to read the text of a special token inside a
                message: "split" as ordinary text, "keep" as that token; "drop" leaves
                such prompts out, "error" refuses them.
        """
        return self._assign(_provided(locals()))

    def engine(
        self,
        *,
        temperature: float = NotProvided,
        kv_cache_bytes: int = NotProvided,
        gpu_memory_utilization: float = NotProvided,
        tensor_parallel_size: int = NotProvided,
        engine_sleeps: bool = NotProvided,
        weight_transfer: str = NotProvided,
        engine_kwargs: dict[str, Any] = NotProvided,
    ) -> Self:
        """Sets the vLLM engine that each env runner hosts.

        Args:
            temperature: of sampling in training, above 0. Top-p and top-k stay off:
                they would change what a log-prob means.
            kv_cache_bytes: key-value cache of an engine on a CPU.
            gpu_memory_utilization: share of the GPU's memory for an engine on a GPU.
            tensor_parallel_size: GPUs of one engine.
            engine_sleeps: give the engine's memory to the learner during an update, for
                an engine and a learner in one process on one GPU.
            weight_transfer: how weights get from the learners to the engines:
                "object_store" (Ray's, by way of the CPU), or vLLM's own "nccl", or
                "ipc" for engines that share each learner's GPU in another process.
            engine_kwargs: further arguments of `vllm.LLM`; they win. Those that other
                knobs set, or that change what a log-prob means, are refused.
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
            deepspeed_config: further DeepSpeed settings, such as
                `{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}`.
                Those that knobs decide are refused.
            max_tokens_per_micro_batch: token budget of one forward and backward pass,
                padding included; it changes speed and memory, not the update.
            kwargs: RLlib's own, such as `num_learners` and `num_gpus_per_learner`.
        """
        self._refuse_unknown(kwargs, AlgorithmConfig.learners)
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
        prompt_overlap: str = NotProvided,
        evaluation_sets: dict[str, dict[str, Any]] = NotProvided,
        best_checkpoint_set: str | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Sets the evaluation on held-out problems.

        The problems are those of the environment with the overrides in
        `evaluation_config`, for example `{"env_config": {"split": "heldout"}}`. Each
        is sampled the same number of times by the training engines. Several sets of
        problems are described in `evaluation_sets`.

        Args:
            evaluation_temperature: of sampling; 0 is greedy.
            evaluation_samples_per_prompt: completions of each problem.
            evaluation_max_prompts: evaluate only the first so many problems; None
                takes all.
            evaluation_at_start: evaluate before the first step too, if
                `evaluation_interval` is set; reported as `evaluation_at_start`.
            prompt_overlap: what to do with evaluation questions that are training
                questions too: "warn", "error" or "ignore".
            evaluation_sets: name to a dict of `env`, `env_config`, `samples`,
                `temperature`, `max_prompts` and `role` ("validation" or "test"); what
                it leaves out is as in training, or as given above. Its metrics are
                under `evaluation/NAME`. The unnamed set is then evaluated only if there
                is an `evaluation_config`.
            best_checkpoint_set: the set whose pass@1 chooses the checkpoint that
                `rllib train` keeps beside the last one; "evaluation" is the unnamed
                one. A test set is refused. None keeps checkpoints by age.
            kwargs: RLlib's own, such as `evaluation_interval`.
        """
        self._refuse_unknown(kwargs, AlgorithmConfig.evaluation)
        super().evaluation(**kwargs)
        return self._assign(_provided(locals()))

    def build_evaluation_sets(self) -> dict[str, EvaluationSet]:
        """Builds what an evaluation samples, by name, the unnamed set first.

        Raises:
            ValueError: for a set that cannot be used.
        """
        evaluation = self.get_evaluation_config_object()
        unnamed = EvaluationSet(
            name=UNNAMED,
            env=evaluation.env,
            env_config=evaluation.env_config,
            samples=self.evaluation_samples_per_prompt,
            temperature=0.0
            if evaluation.explore is False
            else self.evaluation_temperature,
            max_prompts=self.evaluation_max_prompts,
        )
        training = replace(unnamed, env=self.env, env_config=self.env_config)
        named = named_sets(self.evaluation_sets, training)
        if named and not self.evaluation_config:
            return named
        return {UNNAMED: unnamed, **named}

    def _assign(self, values: Mapping[str, Any]) -> Self:
        for name, value in values.items():
            setattr(self, name, value)
        return self

    # --- checking

    @override(AlgorithmConfig)
    def validate(self) -> None:
        """Checks all values; messages name the knob, its value and the remedy."""
        for fault in setting_faults(self):
            self._reject(fault.knob, fault.remedy)
        self._refuse_settings_without_effect()
        if not self.in_evaluation:
            sets = self.build_evaluation_sets()
            check_best_checkpoint_set(self.best_checkpoint_set, sets)
            if self.best_checkpoint_set and not self.evaluation_interval:
                self._reject("best_checkpoint_set", "set `evaluation_interval` too")
        check_model_folder(self.model_name_or_path)
        if self.lora_config is not None:
            build_lora_config(self.lora_config)
        if self.env is not None:
            find_env(self.env)
        self.build_replay_buffer()
        self._resolve_warm_start()
        super().validate()

    def _resolve_warm_start(self) -> None:
        """Names the buffer itself: Tune's workers change their working directory."""
        path = self.replay_buffer_config.get("warm_start")
        if path is not None:
            folder = find_buffer(path)
            if folder.is_local:
                own = {**self.replay_buffer_config, "warm_start": folder.path}
                self.replay_buffer_config = own

    def _reject(self, knob: str, remedy: str) -> None:
        self._value_error(f"`{knob}` is {getattr(self, knob)!r}: {remedy}.")

    def _refuse_settings_without_effect(self) -> None:
        rllib = vars(AlgorithmConfig())
        for knob, remedy in _WITHOUT_EFFECT.items():
            # One is a property, which derives a value where none is set.
            attribute = knob if knob in rllib else f"_{knob}"
            if vars(self)[attribute] != rllib[attribute]:
                self._reject(knob, f"it has no effect on ExGRPO; {remedy}")

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
            # RLlib's `model` is a dict, which nobody means who gives a name or a path.
            is_path = key == "model" and isinstance(settings[key], str)
            if is_path or not (is_tunes_own or name in special or is_setting):
                self._refuse_name(key)
        return super().update_from_dict(settings)

    def _refuse_unknown(self, names: Iterable[str], setter: Any) -> None:
        """Refuses keyword arguments that RLlib's setter does not have."""
        known = inspect.signature(setter).parameters
        for name in names:
            if name not in known:
                self._refuse_name(name)

    def _refuse_name(self, name: str) -> None:
        near = difflib.get_close_matches(name, vars(self), n=1, cutoff=0.5)
        right = _OTHER_NAMES.get(name) or (near[0] if near else None)
        hint = f"did you mean `{right}`?" if right else "see the README."
        raise ValueError(f"`{name}` is not a setting of ExGRPO; {hint}")

    # --- what RLlib and the stations read

    def build_replay_buffer(
        self, seed: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> Any:
        """Builds the empty replay buffer that `replay_buffer_config` describes.

        Args:
            seed: of its random generator.
            metadata: saved with it; what the settings give wins.

        Raises:
            ValueError: for a knob it does not have, or a value out of range.
        """
        from rllib_exgrpo.exgrpo_replay import ExGRPOReplayBuffer

        knobs = dict(self.replay_buffer_config)
        buffer_class = knobs.pop("type", ExGRPOReplayBuffer)
        knobs.pop("warm_start", None)
        known = [*inspect.signature(ExGRPOReplayBuffer).parameters, "warm_start"]
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
                "metadata": {**(metadata or {}), **knobs.get("metadata", {})},
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
            "config_overrides": self.model_config_overrides,
            "lora_config": self.lora_config,
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
            max_tokens=(
                self.max_prompt_tokens if self.long_prompts == "truncate_left" else None
            ),
            split_special_tokens=self.special_token_text != "keep",
        )

    def build_prompt_book(self, env: Any, tokenizer: Any) -> PromptBook:
        """Builds the prompts of an environment and checks them.

        Raises:
            ValueError: for prompts that cannot be used.
        """
        return PromptBook(
            env,
            self.build_prompt_formatter(tokenizer),
            max_prompt_tokens=self.max_prompt_tokens,
            long_prompts=self.long_prompts,
            special_token_text=self.special_token_text,
        )

    def resolved_engine_kwargs(self) -> dict[str, Any]:
        """Returns the arguments of `vllm.LLM` that depend on the hardware."""
        if self.num_gpus_per_env_runner > 0:
            sized: dict[str, Any] = {
                "gpu_memory_utilization": self.gpu_memory_utilization,
                "tensor_parallel_size": self.tensor_parallel_size,
                "enable_sleep_mode": self.engine_sleeps,
            }
        else:
            # Compiling takes longer than it saves on models that suit a CPU.
            sized = {
                "kv_cache_memory_bytes": self.kv_cache_bytes,
                "enforce_eager": True,
            }
        if self.weight_transfer != "object_store":
            sized["weight_transfer_config"] = {"backend": self.weight_transfer}
        return {**sized, **self.engine_kwargs}

    @property
    def max_replayed_prompts(self) -> int:
        """Most prompts replayed in a step: rho P, rounded down."""
        # 0.29 * 100 is 28.999999999999996 in floating point.
        return int(self.replay_ratio * self.prompts_per_step + 1e-9)

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether completions with advantage 0 need no pass of the learner."""
        return self.skip_zero_advantage_groups or self.entropy_coeff == 0

    @property
    def rollout_correction(self) -> RolloutCorrection:
        """What is done about differences between engine and learner."""
        return RolloutCorrection(
            level=self.rollout_correction_level,
            cap=self.rollout_correction_cap,
            keep_range=self.rollout_correction_range,
        )

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
