"""Tests that files of lrl are found by name from any folder, and from the wheel."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lrl.files
from lrl.cli.run_directory import commit
from lrl.files import resolve, resolve_config

ROOT = Path(lrl.files.__file__).parents[1]
LAKE = str(ROOT / "configs" / "frozen_lake" / "grpo.yaml")
CALLBACKS = ["CollectionCheckpoint"]
SHORT = {
    "--trainer.max_epochs": "1",
    "--trainer.limit_val_batches": "0",
    "--trainer.callbacks": json.dumps([{"class_path": name} for name in CALLBACKS]),
    "--data.init_args.num_epochs": "1",
    "--data.init_args.group_size": "2",
    "--run_directory": "run",
}
FIT = ["fit", "--config", "frozen_lake/grpo.yaml", *(word for option in SHORT.items() for word in option)]
TRAIN_AND_EVALUATE = """
import os, sys
assert not any(name.startswith("lrl") for name in sys.modules)
os.chdir({folder!r})
os.environ.pop("LRL_RUN_DIRECTORY", None)
sys.path[:] = [{site!r}, *(path for path in sys.path if path not in ("", {root!r}))]
sys.stdout = sys.stderr = open({output!r}, "w", buffering=1)
import lrl
print(lrl.__file__)
import lrl.__main__ as program
for command in ({fit!r}, ["evaluate", "--checkpoint", "run", "--episodes", "2"]):
    sys.argv = ["lrl", *command]
    program.main()
"""


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("assets/tiny-lm", str(ROOT / "assets" / "tiny-lm")),
        ("./assets/tiny-lm", str(ROOT / "assets" / "tiny-lm")),
        ("assets/no-such-lm", "assets/no-such-lm"),
        ("lrl/cli/main.py", "lrl/cli/main.py"),
        ("assets/../lrl", "assets/../lrl"),
        ("owner/model", "owner/model"),
    ],
)
def test_a_model_that_ships_is_found_from_any_folder(name, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve(name) == found


def test_a_config_is_named_with_or_without_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_config("frozen_lake/grpo.yaml") == resolve_config("configs/frozen_lake/grpo.yaml") == LAKE
    assert resolve_config("frozen_lake/nothing.yaml") == "frozen_lake/nothing.yaml"
    assert resolve_config("{trainer: {max_epochs: 1}}") == "{trainer: {max_epochs: 1}}"


def test_files_of_the_users_own_win(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "frozen_lake").mkdir()
    (tmp_path / "frozen_lake" / "grpo.yaml").touch()
    (tmp_path / "assets" / "tiny-lm").mkdir(parents=True)
    assert resolve_config("frozen_lake/grpo.yaml") == "frozen_lake/grpo.yaml"
    assert resolve("assets/tiny-lm") == "assets/tiny-lm"


def test_an_installed_package_has_no_commit_of_the_repository_around_it(monkeypatch):
    assert commit() != "unknown"
    monkeypatch.setattr(lrl.files, "_PACKAGE", ROOT / "tests" / "site-packages" / "lrl")
    assert commit() == "unknown"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_every_model_every_config_and_the_files_that_configs_name(wheel):
    carried = set(zipfile.ZipFile(wheel).namelist())
    shipped = "assets/*-lm/*", "assets/expert_q/*", "configs/**/*.yaml"
    files = [path for pattern in shipped for path in ROOT.glob(pattern) if path.is_file()]
    assert len(files) > 40
    assert {f"lrl/files/{path.relative_to(ROOT)}" for path in files} <= carried


@pytest.mark.slow
def test_the_installed_wheel_trains_and_evaluates_in_an_empty_folder(wheel, processes, tmp_path):
    """In a new process, which starts with other libraries imported but no module of lrl."""
    site, empty, output = tmp_path / "site", tmp_path / "empty", tmp_path / "output"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(site)  # as pip does
    places = {"site": str(site), "root": str(ROOT), "folder": str(empty), "output": str(output)}
    program = TRAIN_AND_EVALUATE.format(fit=FIT, **places)
    child = processes.Process(target=exec, args=(program, {}))
    child.start()
    child.join(300)
    said = output.read_text()
    assert child.exitcode == 0, said
    assert said.splitlines()[0] == str(site / "lrl" / "__init__.py")
    assert (empty / "run" / "checkpoints" / "last.ckpt").is_file()
    assert (empty / "run" / "commit.txt").read_text() == "unknown\n"
    assert all(word in said for word in ("trained", "random", "expert", "optimum 0.7442"))
