"""The rules that keep the structure visible."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rllib_exgrpo"


def imported_by(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_one_module_imports_vllm_and_one_deepspeed():
    users = {"vllm": [], "deepspeed": []}
    for path in PACKAGE.rglob("*.py"):
        for library in users:
            if library in imported_by(path):
                users[library].append(path.name)
    assert users == {"vllm": ["sampler.py"], "deepspeed": ["deepspeed_engine.py"]}


def test_only_adapters_import_ray():
    for path in PACKAGE.rglob("*.py"):
        adapter = (
            path.name.startswith("exgrpo")
            or path.parent.name == "cli"
            or path == PACKAGE / "__init__.py"
        )
        assert adapter or "ray" not in imported_by(path), path


def test_environments_know_neither_ray_nor_the_algorithm():
    for path in (ROOT / "envs").rglob("*.py"):
        assert not imported_by(path) & {"ray", "vllm", "torch", "rllib_exgrpo"}, path


def test_importing_the_package_loads_no_engine():
    code = (
        "import sys, rllib_exgrpo, rllib_exgrpo.envs;"
        "print([m for m in ('vllm', 'deepspeed') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.strip().endswith("[]"), done.stderr[-2000:]


def test_without_vllm_only_sampling_fails_and_names_the_extra(monkeypatch):
    import pytest

    from rllib_exgrpo import sampler

    monkeypatch.setitem(sys.modules, "vllm", None)  # makes the import fail
    with pytest.raises(ImportError, match=r"rllib_exgrpo\[cpu\].*rllib_exgrpo\[cuda\]"):
        sampler._import_vllm()
