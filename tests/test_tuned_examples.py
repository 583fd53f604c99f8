"""Tuned examples: each builds, validates, says what it is, and fits its baseline."""

import ast

import pytest

from rllib_exgrpo.cli._experiment import Experiment
from rllib_exgrpo.cli.example import example_files
from rllib_exgrpo.metric_names import check_stop

NAMES = [
    "exgrpo_arithmetic_cpu",
    "exgrpo_competition_math_cpu",
    "exgrpo_countdown_cpu",
    "exgrpo_gsm8k",
    "exgrpo_multiple_choice",
    "exgrpo_qwen2.5_math_7b",
    "exgrpo_reasoning_gym_cpu",
    "exgrpo_smollm2_cpu",
    "exgrpo_verifiers_cpu",
    "on_policy_arithmetic_cpu",
]
SWEEPS = ["sweep_asha", "sweep_pbt", "sweep_replay_ratio"]
MAIN_AND_BASELINE = ["exgrpo_arithmetic_cpu", "on_policy_arithmetic_cpu"]


def load(name):
    return Experiment.from_file(example_files()[name])


def test_the_examples_are_listed():
    assert list(example_files()) == NAMES + SWEEPS


@pytest.mark.parametrize("name", NAMES)
def test_example_validates_and_stops(name):
    experiment = load(name)
    experiment.config.copy(copy_frozen=False).validate()
    assert check_stop(experiment.stop)
    assert experiment.name == name


@pytest.mark.parametrize(
    ("name", "searched", "num_variants"),
    [
        ("sweep_replay_ratio", ["replay_ratio"], 4),
        ("sweep_asha", ["lr", "replay_buffer_config/sigma", "shaping_beta"], 1),
        ("sweep_pbt", ["entropy_coeff", "lr", "replay_ratio"], 1),
    ],
)
def test_every_point_of_a_sweep_is_checked(name, searched, num_variants):
    experiment = load(name).checked()
    assert experiment.searched == searched
    # Four points of the grid; drawn settings are drawn once for the check.
    assert len(list(experiment.variants())) == num_variants


@pytest.mark.parametrize("name", NAMES + SWEEPS)
def test_docstring_tells_hardware_and_expectation(name):
    text = ast.get_docstring(ast.parse(example_files()[name].read_text()))
    assert "Hardware:" in text
    assert "Expected" in text


@pytest.mark.parametrize("name", [*MAIN_AND_BASELINE, "exgrpo_countdown_cpu"])
def test_examples_without_files_open(name):
    load(name).checked()


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("reasoning_gym", "exgrpo_reasoning_gym_cpu"),
        ("verifiers.v1", "exgrpo_verifiers_cpu"),
    ],
)
def test_an_example_with_an_optional_package_opens(package, name):
    pytest.importorskip(package)
    load(name).checked()


def test_the_competition_example_opens(shared_dir, monkeypatch):
    path = shared_dir / "data" / "competition_math_verl.parquet"
    monkeypatch.setenv("EXGRPO_COMPETITION_PARQUET", str(path))
    load("exgrpo_competition_math_cpu").checked()


def test_baseline_differs_from_the_main_job_by_replay_and_reporting_only():
    main, baseline = (load(n).config.to_dict() for n in MAIN_AND_BASELINE)
    different = {key for key in main if main[key] != baseline[key]}
    assert different == {"replay_ratio", "retired_prompts", "evaluation_interval"}


def test_baseline_and_main_job_sample_equally_many_completions():
    main, baseline = map(load, MAIN_AND_BASELINE)
    config, steps = main.config, main.stop["training_iteration"]
    # A step samples 32 * 8 = 256 completions, and 16 fewer when half are replayed:
    # 48 * 240 = 11,520 = 45 * 256. Up to 7 steps before replay add at most 1 %.
    replaying = config.prompts_per_step * (config.group_size - config.replay_ratio)
    fresh = config.prompts_per_step * config.group_size
    assert steps * replaying == baseline.stop["training_iteration"] * fresh == 11_520


@pytest.mark.parametrize("name", NAMES + SWEEPS)
def test_the_last_step_is_evaluated(name):
    experiment = load(name)
    interval = experiment.config.evaluation_interval
    assert experiment.stop["training_iteration"] % interval == 0


def test_paper_example_has_the_papers_settings():
    config = load("exgrpo_qwen2.5_math_7b").config
    assert config.prompts_per_step == 128
    assert config.prompts_per_update == 64
    assert config.group_size == 8
    assert config.max_completion_tokens == 8192
    assert config.lr == 1e-6
    assert config.zero_stage == 3
    assert config.model_dtype == "bfloat16"
    gpus = (
        config.num_env_runners * config.num_gpus_per_env_runner
        + config.num_learners * config.num_gpus_per_learner
    )
    assert gpus == 8
