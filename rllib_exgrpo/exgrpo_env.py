"""Finds the environment that a config names.

The names are those of Tune and Gymnasium, of installed plug-ins and of the environments
that come with this package, which is imported for nothing else.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.metadata import entry_points
from typing import Any

import gymnasium as gym
from ray.tune.registry import ENV_CREATOR, _global_registry

ENTRY_POINT_GROUP = "rllib_exgrpo.envs"
"""Packages that name their environments under this group need no import path."""

_CUTOFF = 0.6  # of similarity; below it a suggestion misleads

EnvCreator = Callable[[Mapping[str, Any]], Any]


class UnknownEnvError(ValueError):
    """Raised for a name that no environment has."""


@dataclass(frozen=True, slots=True)
class KnownEnv:
    """An environment that can be named without its import path.

    Attributes:
        name: what to give as `env`.
        origin: where it comes from.
        summary: first line of its docstring; empty if it has not been imported.
    """

    name: str
    origin: str
    summary: str = ""


def find_env(env: Any) -> EnvCreator:
    """Returns what creates an environment from its config: a class or a function.

    Args:
        env: a class or function, which is returned as it is; a name registered with
            `tune.register_env`; a Gymnasium id; the name of an installed plug-in or of
            a shipped environment; or "module:Class".

    Raises:
        UnknownEnvError: if there is none, with the nearest names.
    """
    if callable(env):
        return env
    if not isinstance(env, str):
        raise UnknownEnvError(
            f"`env` is {env!r}: give a class, MODULE:CLASS such as "
            "rllib_exgrpo.envs:ArithmeticEnv, or a name that `rllib env list` shows."
        )
    if _global_registry.contains(ENV_CREATOR, env):
        return _global_registry.get(ENV_CREATOR, env)
    if env in gym.registry:
        return partial(_make, gym.spec(env))
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=env):
        return entry_point.load()
    shipped = _shipped()
    if env in shipped:
        return shipped[env]
    if ":" in env or "." in env:
        return _import(env)
    raise UnknownEnvError(
        f"`env` is {env!r}: no environment has this name. {_nearest(env, _names())}"
        "Give a class, MODULE:CLASS, a Gymnasium id, or a name that `rllib env list` "
        "shows."
    )


def known_envs() -> Iterator[KnownEnv]:
    """Yields the shipped environments and those of installed plug-ins."""
    for name, env in _shipped().items():
        yield KnownEnv(name, "shipped", (env.__doc__ or "").partition("\n")[0])
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        yield KnownEnv(entry_point.name, f"plug-in {entry_point.value}")


def _make(spec: Any, config: Mapping[str, Any]) -> Any:
    """Makes an environment of Gymnasium's; the spec works in other processes too."""
    return gym.make(spec, **config)


def _shipped() -> dict[str, Any]:
    """The environments of this package that can be used as they are, by name."""
    package = importlib.import_module("rllib_exgrpo.envs")
    classes = {name: getattr(package, name) for name in package.__all__}
    return {name: env for name, env in classes.items() if _is_complete(env)}


def _is_complete(env: Any) -> bool:
    methods = [getattr(env, name, None) for name in ("load", "verify")]
    return all(m and not getattr(m, "__isabstractmethod__", False) for m in methods)


def _names() -> list[str]:
    plug_ins = entry_points(group=ENTRY_POINT_GROUP)
    return [*_shipped(), *(e.name for e in plug_ins), *gym.registry]


def _import(path: str) -> EnvCreator:
    """Imports "module:Class", "module.Class", or Gymnasium's "module:Id-v0"."""
    module_name, _, name = path.replace(":", ".").rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks one of its own imports
        raise UnknownEnvError(
            f"`env` is {path!r}: there is no module {error.name!r}. Install it, or "
            "start where it lies."
        ) from error
    if hasattr(module, name):
        return getattr(module, name)
    if name in gym.registry:
        return partial(_make, gym.spec(name))
    names = [*vars(module), *getattr(module, "__all__", ())]
    raise UnknownEnvError(
        f"`env` is {path!r}: the module {module_name} has no {name!r}. "
        f"{_nearest(name, names)}".rstrip()
    )


def _nearest(name: str, names: list[str]) -> str:
    """Returns a question with the most similar names, or nothing."""
    by_lower_case = {n.lower(): n for n in names}
    near = get_close_matches(name.lower(), by_lower_case, n=2, cutoff=_CUTOFF)
    if not near:
        return ""
    return f"Did you mean {' or '.join(repr(by_lower_case[n]) for n in near)}? "
