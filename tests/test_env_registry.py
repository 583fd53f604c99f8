"""Finding environments by class, path, plug-in, Gymnasium id and Tune name."""

import pickle
import sys

import gymnasium as gym
import pytest
from ray import tune

from rllib_exgrpo import ExGRPOConfig
from rllib_exgrpo.envs import ArithmeticEnv, CountdownEnv
from rllib_exgrpo.exgrpo_env import UnknownEnvError, find_env, known_envs


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """An installed package that names an environment under our entry-point group."""
    (tmp_path / "toy_plug_in.py").write_text(
        "from rllib_exgrpo.envs import ArithmeticEnv\n"
        "class ToyEnv(ArithmeticEnv):\n    pass\n"
    )
    folder = tmp_path / "toy-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: toy\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[rllib_exgrpo.envs]\ntoy = toy_plug_in:ToyEnv\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("toy_plug_in", None)


@pytest.mark.parametrize(
    "env",
    [
        ArithmeticEnv,
        "ArithmeticEnv",
        "rllib_exgrpo.envs:ArithmeticEnv",
        "rllib_exgrpo.envs.ArithmeticEnv",
        "rllib_exgrpo.envs.arithmetic:ArithmeticEnv",
    ],
)
def test_class_name_and_path(env):
    assert find_env(env) is ArithmeticEnv
    ExGRPOConfig().environment(env).validate()


def test_a_plug_in_is_found_by_its_name_and_listed(plug_in):
    assert find_env("toy").__name__ == "ToyEnv"
    assert [e.origin for e in known_envs() if e.name == "toy"] == [
        "plug-in toy_plug_in:ToyEnv"
    ]
    with pytest.raises(UnknownEnvError, match="Did you mean 'toy'"):
        find_env("toyy")


def test_a_gymnasium_id_works_in_processes_that_did_not_register_it():
    gym.register("test/Countdown-v0", entry_point=CountdownEnv)
    try:
        create = find_env("test/Countdown-v0")
        assert find_env("rllib_exgrpo.envs:test/Countdown-v0").args == create.args
    finally:
        del gym.registry["test/Countdown-v0"]
    env = pickle.loads(pickle.dumps(create))({"num_problems": 5})
    assert len(env.unwrapped.prompt_ids) == 5


def test_a_name_registered_with_tune_is_found():
    tune.register_env("named_for_tune", lambda config: dict(config))
    assert find_env("named_for_tune")({"n": 1}) == {"n": 1}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("countdown", "Did you mean 'CountdownEnv'"),
        ("zzz", "rllib env list"),
        ("rllib_exgrpo.envs:ArithmetikEnv", "Did you mean 'ArithmeticEnv'"),
        ("no_such_module:Env", "no module 'no_such_module'"),
        ("rllib_exgrpo.no_such:Env", "no module 'rllib_exgrpo.no_such'"),
        (3, "MODULE:CLASS"),
    ],
)
def test_an_unknown_name_is_one_paragraph_in_the_python_api_too(name, words):
    with pytest.raises(ValueError) as caught:
        ExGRPOConfig().environment(name).build_algo()
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert ("Did you mean" in message) == ("Did you mean" in words)


def test_a_module_that_lacks_one_of_its_own_imports_says_which(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        find_env("needs_more:Env")
