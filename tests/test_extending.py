"""A package outside the repository extends lrl as the pages on extending and the guides say."""

import ast
import importlib
import re
import shlex
import sys
from pathlib import Path

import gymnasium as gym
import pytest
from commands import run_words, shorten

from lrl.cli.main import LRLCLI
from lrl.registry import GROUP, components

PAGES = {"algorithm": "reinforce", "environment": "coins", "policy": "table", "reward": "brevity"}
"""The module of ``my_package`` that contains the classes of each page."""
EXPERIMENTS = {"environment": "cartpole/ppo_scoring.yaml", "reward": "frozen_lake/grpo.yaml"}
"""The experiments for which the YAML of a page is an overlay."""
GUIDES = {
    "environment": {"python": ["my_package/room.py"], "yaml": ["room.yaml", "network.yaml"]},
    "json_lines": {"python": ["my_package/problems.py", "check.py"], "yaml": ["problems.yaml"]},
    "model": {"python": ["save.py"], "yaml": ["my_model.yaml"]},
}
"""The files that the blocks of each guide are."""
TEXTS = {page: Path(f"docs/extending/{page}.md").resolve() for page in PAGES}
GUIDE_TEXTS = {guide: Path(f"docs/guides/{guide}.md").resolve() for guide in GUIDES}
SHORT = ("--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--data.init_args.validation.episodes=2",
         "--data.init_args.num_epochs=1", "--trainer.check_val_every_n_epoch=1")  # fmt: skip
SHORTENED = {
    "fit": ("--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=0",
            "--trainer.accelerator=cpu"),
    "evaluate": ("--episodes=2",),
    "collect": ("--episodes=14",),
}  # fmt: skip
"""Further options of the commands of a guide."""


def blocks(text, language):
    """Return the blocks of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", text.read_text(encoding="utf-8"), re.DOTALL)


def block(page, language):
    """Return the first block of a page in a language."""
    return blocks(TEXTS[page], language)[0]


def module_and_use(page):
    """The imports and classes of a page, which a user puts into a module, and the statements that use them."""
    code, parts = block(page, "python"), ([], [])
    for node in ast.parse(code).body:
        kept = isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef)) or "gym.register" in ast.unparse(node)
        parts[not kept].append(ast.get_source_segment(code, node))
    return ["\n".join(part) + "\n" for part in parts]


@pytest.fixture
def short_runs(monkeypatch):
    """Reduce the sizes of the runs of commands."""
    make = LRLCLI.instantiate_classes
    monkeypatch.setattr(LRLCLI, "instantiate_classes", lambda cli: (make(cli), shorten(cli)))


@pytest.fixture
def package(short_runs, tmp_path, monkeypatch):
    """The current folder, with ``my_package`` and an experiment of each page in it."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    for page, module in PAGES.items():
        (tmp_path / "my_package" / f"{module}.py").write_text(module_and_use(page)[0])
        (tmp_path / f"{page}.yaml").write_text(block(page, "yaml"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    components.cache_clear()
    gym.registry.pop("Coin-v0", None)  # the modules stay: jsonargparse imports every known subclass by its path


def fit(page):
    """Return the command of a short run."""
    configs = [f"--config={file}" for file in (EXPERIMENTS.get(page), f"{page}.yaml") if file]
    return ["fit", *configs, *SHORT, "--run_directory", f"run-{page}"]


def stored_classes(page):
    """Return the classes in the configuration that a run has stored."""
    return re.findall(r"class_path: (\S+)", Path(f"run-{page}", "config.yaml").read_text(encoding="utf-8"))


def evaluate(page):
    done = run_words(["python", "-m", "lrl", "evaluate", "--checkpoint", f"run-{page}", "--episodes", "2"])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_classes_of_a_page_are_used_from_yaml_and_from_python(page, package):
    done = run_words(["python", "-m", "lrl", *fit(page)])
    assert done.returncode == 0, done.stderr
    assert any(name.startswith(f"my_package.{PAGES[page]}.") for name in stored_classes(page))
    evaluate(page)
    module = importlib.import_module(f"my_package.{PAGES[page]}")
    exec(compile(module_and_use(page)[1], page, "exec"), dict(vars(module)))


@pytest.mark.slow
def test_the_classes_of_an_installed_package_have_short_names(package):
    (package / "my_package").rename(package / "my_components")
    for page, module in PAGES.items():
        file = package / "my_components" / f"{module}.py"
        source = re.sub(r"^class ", "@register\nclass ", file.read_text(), flags=re.MULTILINE)
        file.write_text(f"from lrl.registry import register\n{source}".replace("my_package", "my_components"))
        experiment = (package / f"{page}.yaml").read_text()
        (package / f"{page}.yaml").write_text(re.sub(r"my_package\.\w+\.(?=[A-Z])", "", experiment))
    info = package / "my_components-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_components\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nmy_components = my_components\n")
    components.cache_clear()
    done = run_words(["python", "-m", "lrl", *fit("policy")])
    assert done.returncode == 0, done.stderr
    assert "TablePolicy" in stored_classes("policy")
    evaluate("policy")
    assert {"REINFORCEModule", "BrevityReward", "CoinEnvs", "CoinCodec"} <= set(components())


@pytest.mark.slow
def test_the_console_script_finds_a_package_in_the_current_folder(package, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".", str(package))])
    for module in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        monkeypatch.delitem(sys.modules, module)  # of other tests
    done = run_words([str(Path(sys.executable).with_name("lrl")), *fit("algorithm")])
    assert done.returncode == 0, done.stderr
    assert "my_package.reinforce.REINFORCEModule" in stored_classes("algorithm")


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES)
def test_the_commands_of_a_guide_run_in_the_current_folder(guide, short_runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.syspath_prepend(tmp_path)
    gym.registry.pop("Room-v0", None)  # of another test, like the modules
    for module in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        monkeypatch.delitem(sys.modules, module)
    Path("my_package").mkdir()
    for language, files in GUIDES[guide].items():
        for file, content in zip(files, blocks(GUIDE_TEXTS[guide], language), strict=True):
            Path(file).write_text(content)
    lines = "\n".join(blocks(GUIDE_TEXTS[guide], "bash")).splitlines()
    lines = (["python save.py"] if guide == "model" else []) + lines
    for line in filter(None, lines):
        words = shlex.split(line)
        done = run_words([*words, *SHORTENED.get(words[1], ())])
        assert done.returncode == 0, f"{line}\n{done.stderr}"
