"""What to train: read from a file or from flags, and checked before anything starts."""

import os
import runpy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.search.variant_generator import generate_variants, parse_spec_vars

from rllib_exgrpo.cli._errors import CommandError, as_command_error
from rllib_exgrpo.exgrpo import ExGRPO
from rllib_exgrpo.exgrpo_config import ExGRPOConfig
from rllib_exgrpo.exgrpo_env import EnvCreator, find_env
from rllib_exgrpo.metric_names import check_stop

_YAML_KEYS = ("run", "env", "stop", "config")


@dataclass(frozen=True)
class Experiment:
    """A run that has not started.

    Attributes:
        name: of its folder of results.
        config: of the algorithm.
        stop: metric path to the value that ends the run, or each trial.
        tune_config: how trials are made of a config with search spaces.
    """

    name: str
    config: ExGRPOConfig
    stop: Mapping[str, Any] = field(default_factory=dict)
    tune_config: tune.TuneConfig | None = None

    @property
    def searched(self) -> list[str]:
        """Paths of the settings that a sweep varies; none for a single run."""
        _, drawn, in_grid = parse_spec_vars(self.config.to_dict())
        names = {"/".join(map(str, path)) for path, _ in [*drawn, *in_grid]}
        scheduler = self.tune_config and self.tune_config.scheduler
        return sorted({*names, *getattr(scheduler, "_hyperparam_mutations", {})})

    @classmethod
    def from_file(cls, path: str | Path) -> "Experiment":
        """Reads a Python file with a `config`, or a YAML file in RLlib's old form.

        A Python file may have a `stop` and, for a sweep, a `tune_config` beside it.

        Raises:
            CommandError: if it cannot be read, or holds no ExGRPO configuration.
        """
        path = Path(path)
        if not path.is_file():
            raise CommandError(f"there is no file {path}.")
        if path.suffix in (".yaml", ".yml"):
            return cls._from_yaml(path)
        if path.suffix == ".py":
            return cls._from_python(path)
        raise CommandError(f"{path} must be a .py or a .yaml file.")

    @classmethod
    def _from_python(cls, path: Path) -> "Experiment":
        make_importable(path.resolve().parent)
        with as_command_error(f"{path} cannot be run"):
            # Not left in `sys.modules`: classes it defines travel to Ray by value.
            module = runpy.run_path(str(path), run_name="tuned_example")
        config = module.get("config")
        if not isinstance(config, ExGRPOConfig):
            raise CommandError(
                f"{path} must define `config`, an ExGRPOConfig, on module level; "
                f"`config` is {_described(config)}."
            )
        tune_config = module.get("tune_config")
        return cls(path.stem, config, module.get("stop") or {}, tune_config)

    @classmethod
    def _from_yaml(cls, path: Path) -> "Experiment":
        import yaml

        with as_command_error(f"{path} cannot be read"):
            content = _parse(yaml, path.read_text())
        if not isinstance(content, dict) or len(content) != 1:
            raise CommandError(
                f"{path} must hold one experiment: `NAME: {{run: ExGRPO, env: "
                "module:Class, stop: {...}, config: {...}}`."
            )
        ((name, entry),) = content.items()
        for key in entry:
            if key not in _YAML_KEYS:
                near = get_close_matches(key, _YAML_KEYS, n=1)
                hint = f"did you mean `{near[0]}`?" if near else f"take {_YAML_KEYS}."
                raise CommandError(f"{path}: `{key}` is no key of {name!r}; {hint}")
        make_importable(path.resolve().parent)
        return cls.from_names(
            str(name),
            algorithm=entry.get("run"),
            env=entry.get("env"),
            config=entry.get("config") or {},
            stop=entry.get("stop") or {},
        )

    @classmethod
    def from_names(
        cls,
        name: str,
        *,
        algorithm: str | None,
        env: str | None,
        config: Mapping[str, Any],
        stop: Mapping[str, Any],
    ) -> "Experiment":
        """Builds an experiment from plain data.

        Args:
            name: of its folder of results.
            algorithm: must be "ExGRPO".
            env: as for `rllib_exgrpo.exgrpo_env.find_env`; None leaves it to `config`.
            config: setting to value.
            stop: metric to value.

        Raises:
            CommandError: for an unknown algorithm, environment or setting.
        """
        if algorithm != "ExGRPO":
            raise CommandError(
                f"the algorithm is {algorithm!r}; this command trains 'ExGRPO'."
            )
        settings = dict(config) if env is None else {**config, "env": env}
        return cls(name, ExGRPOConfig(), stop).changed(settings)

    def changed(
        self,
        settings: Mapping[str, Any],
        stop: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> "Experiment":
        """Returns the experiment with some settings and stop criteria replaced.

        Raises:
            CommandError: for a name that is not a setting, naming the nearest.
        """
        settings = dict(settings)
        if "env" in settings:
            settings["env"] = _by_class(settings["env"])
        if "evaluation_sets" in settings:
            settings["evaluation_sets"] = {
                name: {**keys, "env": _by_class(keys["env"])} if "env" in keys else keys
                for name, keys in settings["evaluation_sets"].items()
            }
        with as_command_error("the config cannot be used"):
            config = self.config.copy(copy_frozen=False).update_from_dict(settings)
        return replace(
            self,
            name=name or self.name,
            config=config,
            stop={**self.stop, **(stop or {})},
        )

    def checked(self) -> "Experiment":
        """Checks all that can be checked without a model, and returns the experiment.

        Raises:
            CommandError: for a stop criterion, setting, environment, prompt or model
                that cannot be used.
        """
        with as_command_error("the stop criteria cannot be used"):
            stop = check_stop(self.stop)
            _check_that_it_stops(stop, self.config)
        variants = list(self.variants())
        for config in variants:
            with as_command_error("the config cannot be used"):
                open_env(config.env)
                config.validate()
        _check_prompts(variants[0])
        return replace(self, stop=stop)

    def variants(self) -> Iterator[ExGRPOConfig]:
        """Yields the config, or in a sweep one for each point of the grid."""
        if not self.searched:
            yield self.config.copy(copy_frozen=False)
            return
        for _, spec in generate_variants({"config": self.config.to_dict()}):
            yield type(self.config)().update_from_dict(spec["config"])

    def largest(self) -> ExGRPOConfig:
        """Returns the config that needs most: there must be room for it too."""

        def needs(config: ExGRPOConfig) -> tuple[float, float]:
            found = ExGRPO.default_resource_request(config).required_resources
            return found.get("GPU", 0.0), found.get("CPU", 0.0)

        return max(self.variants(), key=needs)


def _check_prompts(config: ExGRPOConfig) -> None:
    from rllib_exgrpo.exgrpo_evaluation import (
        check_evaluation_prompts,
        open_prompts,
        warn_of_few_prompts,
    )

    with as_command_error("the config cannot be used"):
        prompts = open_prompts(config)
        warn_of_few_prompts(config, prompts)
    if config.evaluation_interval:
        with as_command_error("the evaluation cannot be used"):
            check_evaluation_prompts(config, prompts)


def _by_class(env: Any) -> Any:
    """Returns the class: it reaches processes that cannot import it by name."""
    found = open_env(env)
    return found if isinstance(found, type) else env


def open_env(env: Any) -> EnvCreator:
    """Returns what creates an environment; modules may lie in the current folder.

    Raises:
        CommandError: if there is no such environment.
    """
    make_importable(Path.cwd())
    with as_command_error("the environment cannot be used"):
        return find_env(env)


def _check_that_it_stops(stop: Mapping[str, float], config: ExGRPOConfig) -> None:
    if not stop:
        raise CommandError(
            "there is no stop criterion, so the run would never end: give "
            """--stop '{"training_iteration": 100}' or define `stop` in the file."""
        )
    needs_evaluation = [path for path in stop if path.startswith("evaluation/")]
    if len(needs_evaluation) == len(stop) and not config.evaluation_interval:
        raise CommandError(
            f"`stop` waits for {needs_evaluation[0]!r}, but `evaluation_interval` is "
            "not set, so nothing is evaluated and the run would never end."
        )


def make_importable(folder: Path) -> None:
    """Lets this process and Ray's workers import modules that lie in a folder."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, str(folder)]))


def _parse(yaml: Any, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {' '.join(str(error).split())}") from error


def _described(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
