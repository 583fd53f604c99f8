import re

import pytest

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import ArithmeticEnv
from rllib_exgrpo.exgrpo_evaluation import check_evaluation_prompts, open_prompts
from rllib_exgrpo.rollout_correction import RolloutCorrection


def config_with(**knobs):
    config = ExGRPOConfig().environment(ArithmeticEnv)
    for name, value in knobs.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("knob", "value", "remedy"),
    [
        ("group_size", 1, "a group needs at least 2"),  # bug report 13
        ("replay_ratio", 1.5, "a number from 0 .* to 1"),
        ("replay_ratio", -0.1, "a number from 0 .* to 1"),
        ("replay_start_pass_rate", 1.0, "None to start at once"),
        ("shaping_beta", 0.0, "or None to turn it off"),
        ("clip_eps", -0.2, "above 0"),
        ("temperature", 0.0, "above 0"),
        ("success_threshold", 0.0, "above 0 and at most 1"),
        ("loss_aggregation", "mean", "'completion_mean', 'completion_sum'"),
        ("max_resampled_prompts", -1, "at least 0"),
        ("max_resampled_prompts", 0.5, "at least 0"),
        ("behavior_logp_source", "vllm", "'engine', 'learner'"),
        ("rollout_correction_level", "row", "'token', 'sequence'"),
        ("rollout_correction_cap", 0.0, "or None to turn it off"),
        ("rollout_correction_cap", 2.0, "`behavior_logp_source`='learner'"),
        ("rollout_correction_range", (0.5, 0.9), "0 <= low < 1 < high"),
        ("rollout_correction_range", (0.5, 2.0), "`behavior_logp_source`='learner'"),
        ("use_liger_kernel", True, "set `num_gpus_per_learner`"),
        ("max_rollout_logp_diff", -1.0, "or None to turn it off"),
        ("retired_prompts", "never", "'drop', 'until_pass_ends', 'keep'"),
        ("prompt_format", "raw", "'auto', 'chat', 'plain', 'paper'"),
        ("model_dtype", "float16", "'float32', 'bfloat16'"),
        ("zero_stage", 4, "None, 0, 1, 2, 3"),
        ("prompts_per_update", 0, "at least 1"),
        ("replay_ratio", "0.5", "a number, without quotes"),
        ("lr", "1e-5", "in YAML"),
        ("lr", -1.0, "above 0"),
        ("max_completion_tokens", 0, "at least 1"),
        ("plain_template", "Q:", "placeholder {prompt}"),
        ("model_name_or_path", "./no/such/model", "no such folder"),
        ("evaluation_temperature", -1.0, "0 \\(greedy\\) or more"),
        ("evaluation_max_prompts", 0, "at least 1, or None"),
        ("model_dtype", "bf16", "'float32', 'bfloat16'"),
        ("minibatch_size", 64, "no effect on ExGRPO; set `prompts_per_update`"),
        ("num_epochs", 3, "no effect on ExGRPO"),
        ("gamma", 0.9, "nothing is discounted"),
        ("model", {"fcnet_hiddens": [8]}, "`language_model\\(\\)`"),
    ],
)
def test_bad_values_are_refused_with_knob_value_and_remedy(knob, value, remedy):
    with pytest.raises(ValueError, match=remedy) as caught:
        config_with(**{knob: value}).validate()
    assert f"`{knob}`" in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        # Bug reports 16 and 17: whatever cuts or reweighs the distribution biases
        # every importance ratio.
        ("top_p", "the model's full distribution"),
        ("top_k", "the model's full distribution"),
        ("repetition_penalty", "the model's full distribution"),
        ("generation_config", "the model's full distribution"),
        ("override_generation_config", "the model's full distribution"),
        ("logits_processors", "the model's full distribution"),
        ("logprobs_mode", "log-probs of the sampling distribution"),
        ("temperature", "`temperature` of `engine"),
        ("dtype", "`model_dtype` sets it"),
        ("max_model_len", "`max_prompt_tokens`"),
    ],
)
def test_engine_arguments_that_change_the_log_probs_are_refused(name, reason):
    config = config_with(engine_kwargs={name: 0.9})
    with pytest.raises(ValueError, match=f"`engine_kwargs`.*'{name}': .*{reason}"):
        config.validate()


def test_without_an_entropy_bonus_idle_completions_are_skipped():
    assert not config_with().skips_zero_advantages
    assert config_with(entropy_coeff=0.0).skips_zero_advantages
    assert config_with(skip_zero_advantage_groups=True).skips_zero_advantages


def test_a_correction_is_what_its_knobs_say():
    config = config_with(
        behavior_logp_source="learner",
        rollout_correction_level="sequence",
        rollout_correction_cap=2.0,
        rollout_correction_range=(0.5, 2.0),
    )
    config.validate()
    expected = RolloutCorrection(level="sequence", cap=2.0, keep_range=(0.5, 2.0))
    assert config.rollout_correction == expected
    assert config_with().rollout_correction == RolloutCorrection()


def test_divisibility_is_explained_in_prompts():
    config = config_with(prompts_per_step=6, prompts_per_update=4)
    with pytest.raises(ValueError, match="both count prompts.*4 or 8 would do"):
        config.validate()


def test_settings_that_rllib_derives_are_not_refused():
    config = config_with(num_learners=2, zero_stage=1)
    assert config.train_batch_size_per_learner is not None  # derived
    config.validate()
    with pytest.raises(ValueError, match="`train_batch_size_per_learner` is 64"):
        config.training(train_batch_size_per_learner=64).validate()


def test_several_learners_need_a_zero_stage():
    config = config_with(num_learners=2)
    with pytest.raises(ValueError, match="`zero_stage` is None.*`num_learners`=2"):
        config.validate()


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"gradient_clipping": 2.0}, "`grad_clip` controls"),  # bug report 37
        ({"gradient_accumulation_steps": 2}, "`max_tokens_per_micro_batch`"),
        ({"train_batch_size": 8}, "`prompts_per_update` and `group_size`"),
        ({"train_micro_batch_size_per_gpu": 8}, "`max_tokens_per_micro_batch`"),
        ({"optimizer": {"type": "Adam"}}, "`lr`, `adam_betas`"),
        ({"scheduler": {"type": "WarmupLR"}}, "`lr` controls"),
        ({"bf16": {"enabled": True}}, "`model_dtype`"),
        ({"fp16": {"enabled": True}}, "`model_dtype`"),
        ({"zero_optimization": {"stage": 3}}, "stage 3 and `zero_stage` for 1"),
        ({"zero_optimization": {"offload_param": {}}}, "`zero_stage`=3 or more"),
    ],
)
def test_deepspeed_settings_with_a_knob_are_refused(settings, remedy):
    config = config_with(zero_stage=1, deepspeed_config=settings)
    with pytest.raises(ValueError, match=remedy) as caught:
        config.validate()
    assert "`deepspeed_config`" in str(caught.value)


def test_deepspeed_settings_need_a_zero_stage():
    with pytest.raises(ValueError, match="no effect without DeepSpeed"):
        config_with(deepspeed_config={"wall_clock_breakdown": True}).validate()


@pytest.mark.parametrize(
    "lr",
    [
        [[0, 1e-6]],
        [[5, 1e-6], [10, 0]],
        [[0, 1], [0, 2]],
        [[0, -1], [1, 1]],
        [0, 1],
        None,
    ],
)
def test_a_bad_learning_rate_schedule_is_refused(lr):
    with pytest.raises(ValueError, match="`lr` is .*completions sampled"):
        config_with(lr=lr).validate()


def test_replay_buffer_knobs_are_checked():
    with pytest.raises(ValueError, match="'sigm': did you mean 'sigma'"):
        config_with(replay_buffer_config={"sigm": 1.0}).validate()
    with pytest.raises(ValueError, match="`completion_selection` is 'best'"):
        config_with(replay_buffer_config={"completion_selection": "best"}).validate()


def test_unknown_settings_in_a_dict_are_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean `replay_ratio`"):
        ExGRPOConfig().update_from_dict({"replay_ration": 0.25})
    for method in ("language_model", "training"):
        with pytest.raises(ValueError, match=f"`{method}` is not a setting"):
            ExGRPOConfig().update_from_dict({method: "x"})
    for other, own in (("learning_rate", "lr"), ("num_generations", "group_size")):
        with pytest.raises(ValueError, match=f"did you mean `{own}`"):
            ExGRPOConfig().update_from_dict({other: 1})
        with pytest.raises(ValueError, match=f"did you mean `{own}`"):
            ExGRPOConfig().training(**{other: 1})
    with pytest.raises(ValueError, match="did you mean `model_name_or_path`"):
        ExGRPOConfig().update_from_dict({"model": "Qwen/Qwen2.5-Math-1.5B"})
    config = ExGRPOConfig().update_from_dict({"replay_ratio": 0.25, "lr": 1e-5})
    assert (config.replay_ratio, config.lr) == (0.25, 1e-5)


def test_the_defaults_are_the_papers():
    config = ExGRPOConfig()
    assert config.prompts_per_step == 128
    assert config.prompts_per_update == 64  # two optimiser updates a step
    assert config.group_size == 8
    assert config.replay_ratio == 0.5
    assert config.replay_start_pass_rate == 0.35
    assert config.shaping_beta == 0.1
    assert config.clip_eps == 0.2
    assert config.lr == 1e-6
    assert config.entropy_coeff == 0.001
    assert config.grad_clip == 1.0
    assert config.skip_above_grad_norm == 500
    assert (config.max_prompt_tokens, config.max_completion_tokens) == (1024, 8192)
    assert ExGRPOConfig.preset("paper").to_dict() == config.to_dict()


def test_presets():
    official = ExGRPOConfig.preset("official_code")
    assert not official.collect_before_start
    assert official.loss_aggregation == "completion_sum"
    assert official.retired_prompts == "until_pass_ends"
    assert not official.build_replay_buffer().mark_failed
    assert ExGRPOConfig.preset("on_policy").replay_ratio == 0
    with pytest.raises(ValueError, match="`preset` is 'grpo'"):
        ExGRPOConfig.preset("grpo")


@pytest.mark.parametrize(
    ("replay_ratio", "prompts", "replayed"),
    [(0.5, 128, 64), (0.29, 100, 29), (0.25, 7, 1), (1.0, 32, 32), (0.0, 32, 0)],
)
def test_the_share_of_replayed_prompts_is_rounded_down(replay_ratio, prompts, replayed):
    config = config_with(replay_ratio=replay_ratio, prompts_per_step=prompts)
    assert config.max_replayed_prompts == replayed


def test_clipping_of_fresh_tokens_ends_when_replay_starts():
    config = ExGRPOConfig()
    assert config.fresh_clip_range(replay_is_active=False) == 0.2
    assert config.fresh_clip_range(replay_is_active=True) is None
    config.training(clip_when_mixed=True, clip_eps_high=0.3)
    assert config.fresh_clip_range(replay_is_active=True) == (0.2, 0.3)


def test_long_prompts_are_refused_or_dropped(caplog):
    # "What is 7 + 8?\n" has 15 characters, the longest prompts have 21.
    config = config_with(max_prompt_tokens=18).debugging(seed=0)
    with pytest.raises(ValueError, match="more than `max_prompt_tokens`=18.* to 21"):
        open_prompts(config)
    config.language_model(long_prompts="drop")
    prompts = open_prompts(config)
    assert 0 < len(prompts.ids) < 2048
    assert all(len(prompts.token_ids(i)) <= 18 for i in prompts.ids)
    assert "left out" in caplog.text
    with pytest.raises(ValueError, match="`max_prompt_tokens`=3 "):
        open_prompts(config_with(max_prompt_tokens=3, long_prompts="drop"))


def test_evaluation_questions_among_the_training_ones_are_reported(caplog):
    # The same split with the same seed: the first 12 training problems.
    same = {"env_config": {"num_problems": 12}}
    config = config_with(max_completion_tokens=64).evaluation(
        evaluation_sets={"same": same, "heldout": {"env_config": {"split": "heldout"}}}
    )
    training = open_prompts(config)
    check_evaluation_prompts(config, training)
    found = (
        r"12 of 12 questions of the evaluation set 'same' are training questions too.*"
        r"numbers 0, 1, .*, 9, \.\.\., counted from 0"
    )
    assert re.search(found, caplog.text)
    assert "'heldout'" not in caplog.text
    with pytest.raises(ValueError, match=f"{found}.*`prompt_overlap` to 'warn'"):
        check_evaluation_prompts(config.evaluation(prompt_overlap="error"), training)
    caplog.clear()
    check_evaluation_prompts(config.evaluation(prompt_overlap="ignore"), training)
    assert not caplog.text


def test_an_environment_without_prompt_ids_is_refused():
    config = ExGRPOConfig().environment("CartPole-v1")
    with pytest.raises(ValueError, match="has no `prompt_ids`.*VerifiableTextEnv"):
        open_prompts(config)


def test_unknown_environment_settings_name_the_nearest():
    config = ExGRPOConfig().environment(ArithmeticEnv, env_config={"digit": (1, 2)})
    with pytest.raises(ValueError, match="`digit`.*`digits`"):
        open_prompts(config)


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = config_with(model_name_or_path=str(tmp_path))
    with pytest.raises(ValueError, match="`model_name_or_path`.*no weights.*config.j"):
        config.validate()


def test_sequences_beyond_the_models_positions_are_refused():
    # The embedded model reads 16,384 tokens.
    config = config_with(max_prompt_tokens=1024, max_completion_tokens=15361)
    with pytest.raises(ValueError, match="make 16385 tokens, but the model reads 163"):
        open_prompts(config)
    config.language_model(model_config_overrides={"max_position_embeddings": 16385})
    assert len(open_prompts(config).ids) == 2048


def test_a_bad_environment_is_told_before_the_model_is_looked_for():
    config = ExGRPOConfig().environment("CartPole-v1").language_model("no/model")
    with pytest.raises(ValueError, match="has no `prompt_ids`"):
        open_prompts(config)
