"""Every command that the documentation shows is run, cut short."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = ("README.md", "configs/README.md")
SHORT = "--trainer.max_epochs 1 --trainer.limit_train_batches 2 --trainer.limit_val_batches 0"
NEEDS_A_HUB = ("grpo_gemma", "ppo_llama3b", "trpo_gpt2")


def commands():
    """Each ``python ...`` of a fenced block or between backticks, once."""
    found = []
    for page in PAGES:
        text = Path(page).read_text(encoding="utf-8")
        blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        lines = [line.strip() for block in blocks for line in block.splitlines()]
        lines += re.findall(r"`(python [^`]+)`", text)
        found += [line for line in lines if line.startswith("python ")]
    return list(dict.fromkeys(found))


def run(command, **environment):
    """As a shell runs it, which expands braces."""
    line = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", command)
    clean = {name: value for name, value in os.environ.items() if name != "LRL_RUN_DIRECTORY"}
    shell = ["bash", "-c", line]
    return subprocess.run(shell, capture_output=True, text=True, env=clean | environment, timeout=300, input="")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run directory that scripts can be given."""
    folder = tmp_path_factory.mktemp("readme") / "run"
    command = f"python -m lrl fit --config configs/frozen_lake/grpo.yaml {SHORT} --run_directory {folder}"
    result = run(command)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Where small ones of all documented data sets are."""
    folder = str(tmp_path_factory.mktemp("minari"))
    for command in commands():
        if "collect.py --policy" in command:
            result = run(f"{command} --episodes 4", MINARI_DATASETS_PATH=folder)
            assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def warm_starts(datasets, tmp_path_factory):
    """Short runs of the documented commands that others start from, by the directory that they name, in their order."""
    folders = {}
    for command in commands():
        named = re.search(r" -m lrl .*--run_directory (runs/\S+)", command)
        if named:
            folders[named[1]] = tmp_path_factory.mktemp("warm") / "run"
            first = start_of(command)
            more = f" --model.init_args.init_from {folders[first]}" if first else ""
            line = f"{command} {SHORT} --run_directory {folders[named[1]]}{more}"
            result = run(line, HF_HUB_OFFLINE="1", MINARI_DATASETS_PATH=datasets)
            assert result.returncode == 0, result.stderr
    return folders


def start_of(command):
    """The run directory that a command's config starts from, if it does."""
    config = re.search(r"--config (\S+)", command)
    named = config and re.search(r"init_from: (runs/\S+)", Path(config[1]).read_text(encoding="utf-8"))
    return named and named[1]


@pytest.mark.learning
@pytest.mark.parametrize("command", [line for line in commands() if " -m lrl " in line])
def test_a_training_command_runs(command, datasets, tmp_path, request):
    needs_a_hub = any(name in command for name in NEEDS_A_HUB)
    more = " --trainer.accelerator auto" if needs_a_hub else ""
    if start_of(command):
        more += f" --model.init_args.init_from {request.getfixturevalue('warm_starts')[start_of(command)]}"
    line = f"{command} {SHORT} --run_directory {tmp_path / 'run'}{more}"
    result = run(line, HF_HUB_OFFLINE="1", MINARI_DATASETS_PATH=datasets)
    if needs_a_hub:
        assert result.returncode == 2 and "language_model.name" in result.stderr and "Traceback" not in result.stderr
        return
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()


@pytest.mark.learning
@pytest.mark.parametrize(
    "command", [line for line in commands() if " scripts/" in line and "collect.py --policy" not in line]
)
def test_a_script_runs(command, trained, datasets, tmp_path):
    command = re.sub(r"runs/\S*last\.ckpt", str(trained / "checkpoints" / "last.ckpt"), command)
    command = re.sub(r"runs/\S+", str(trained), command)
    command = re.sub(r"(--(?:json|out|tensorboard|capture_video)) \S+", rf"\1 {tmp_path}/out", command)
    short = " --episodes 4" if re.search("evaluate|success_table", command) else ""
    result = run(command + short, MINARI_DATASETS_PATH=datasets)
    assert result.returncode == 0, result.stderr


def test_there_are_commands_to_run():
    assert len([line for line in commands() if " -m lrl " in line]) >= 4
    assert any("scripts/evaluate.py" in line for line in commands())


def test_make_targets_that_the_readme_names_exist():
    named = set(re.findall(r"make ([a-z-]+)", Path("README.md").read_text(encoding="utf-8")))
    targets = set(re.findall(r"^([a-z-]+):", Path("Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"quickstart", "test"} <= named & targets


def test_tables_are_what_the_kept_results_say():
    result = run("python scripts/results.py check")
    assert result.returncode == 0, result.stderr
