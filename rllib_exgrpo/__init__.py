"""ExGRPO for RLlib: train reasoning models from their own past successes."""

from pathlib import Path

from ray import tune

from rllib_exgrpo.exgrpo import ExGRPO
from rllib_exgrpo.exgrpo_config import ExGRPOConfig

__all__ = ["ExGRPO", "ExGRPOConfig"]

# In a checkout the environments and tuned examples lie beside the package, not in it.
# An installed package has them inside; so does an editable one, by its path mapping.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "envs" / "__init__.py").is_file():
    __path__.append(str(_ROOT))

tune.register_trainable("ExGRPO", ExGRPO)
