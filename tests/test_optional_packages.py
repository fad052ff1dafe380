"""Packages that only some functions need: without them, one sentence names the extra that installs them."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from lrl.envs.factory import GymnasiumEnvs
from lrl.files import require
from lrl.lm.files import sources


def without(monkeypatch, *missing):
    """Let packages seem not to be installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in missing else find(name, *rest))


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("minigrid", "babyai", lambda: GymnasiumEnvs("lrl/BabyAI-GoToLocal-v0").codec),
        ("gguf", "gguf", lambda: sources("model.gguf")),
    ],
)
def test_one_sentence_names_the_extra_of_a_missing_package(monkeypatch, package, extra, use):
    without(monkeypatch, package)
    sentence = f"needs the package {package}, which is not installed; run pip install 'lrl[{extra}]'."
    with pytest.raises(ValueError, match=re.escape(sentence)):
        use()


IMPORT_ALL = """
import importlib, pkgutil, sys
sys.stderr = open({errors!r}, "w", buffering=1)
assert not any(name.startswith("lrl") for name in sys.modules)
for name in ("bitsandbytes", "gguf", "minigrid", "trackio", "wandb"):
    sys.modules[name] = None  # an import of it raises an error
import lrl
for module in pkgutil.walk_packages(lrl.__path__, "lrl."):
    if module.name not in ("lrl.__main__", "lrl.envs.babyai") and not module.name.startswith("lrl.files."):
        importlib.import_module(module.name)
"""


@pytest.mark.slow
def test_all_modules_but_the_levels_of_babyai_are_imported_without_optional_packages(processes, tmp_path):
    """In a new process, which starts with other libraries imported but no module of lrl."""
    child = processes.Process(target=exec, args=(IMPORT_ALL.format(errors=str(tmp_path / "errors")), {}))
    child.start()
    child.join(300)
    assert child.exitcode == 0, (tmp_path / "errors").read_text()


def test_an_installed_package_is_accepted():
    require("numpy", "any", "this test")


def test_every_extra_of_a_sentence_exists():
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra
        for file in (root / "lrl").rglob("*.py")
        for extra in re.findall(r"lrl\[([a-z-]+)\]|require\([^,]+, \"([a-z-]+)\",", file.read_text())
    }
    assert {first or second for first, second in named} <= set(extras)
