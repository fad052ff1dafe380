"""Every command that the documentation shows is run once, cut short."""

import csv
import hashlib
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import SMALL, run_command, run_words, shorten
from openenv_server import serving_process

from lrl.cli.main import LRLCLI
from lrl.data.minari import MinariDemonstrations
from lrl.envs.frozen_lake import RandomMapRows
from lrl.registry import components, short_name
from lrl.search.synthetic import SyntheticHistories

PAGES = ("README.md", "configs/README.md", *sorted(str(page) for page in Path("docs").rglob("*.md")))
SHORT = "--trainer.max_epochs 1 --trainer.limit_train_batches 2 --trainer.limit_val_batches 0"
MAPS = 10
NEEDS_A_HUB = ("grpo_gemma", "grpo_qwen", "ppo_llama3b", "trpo_gpt2", "_smollm2")
"""Configurations of models that are not in this repository; none is loaded here, even where `lrl fetch` has one."""
NOT_RUN = re.compile(
    r"^(lrl (consolidate|fetch|merge|preflight|run_seeds|search_table|sweep|zero_shot) "
    r"|lrl (?!fit).*(my_package|my-|runs/(room|problems|my_)|smollm2|--api_url|--model merged|/noise )"
    r"|lrl fit .*(--config (?!configs/)|LearnedReward|CloneLikelihoodReward|/reward_model\.yaml --)"
    r"|python (server/|check\.py|scripts/credit_truth.py --json|scripts/benchmark.py (gpu|processes|runs|served)\b))"
)
"""Commands that take hours, or need a hub, a server, a GPU or what another of them has written. Those of the guides are
run by `tests/test_extending.py`, and `lrl preflight` by `tests/diagnosis/test_preflight.py`."""
IN_BFLOAT16 = "configs/babyai/ppo_direct.yaml"
"""Processors that do not compute in bfloat16 emulate it slowly: of six configurations one is run as written."""


def commands():
    """Return each command of a fenced block, and each complete command between backticks, once."""
    found = []
    for page in PAGES:
        text = Path(page).read_text(encoding="utf-8")
        blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        lines = [line.strip() for block in blocks for line in block.splitlines()]
        lines += re.findall(r"`(python (?!-m lrl`)[^`]+|lrl fit --config [^`]+|lrl success_table --[^`]+)`", text)
        found += [line for line in lines if line.startswith(("python ", "lrl "))]
    return [line for line in dict.fromkeys(found) if not NOT_RUN.search(line)]


COLLECTING = [line for line in commands() if line.startswith("lrl collect --policy")]
SERVING = [line for line in commands() if " serve_env " in line or " --env_url " in line]
RESUMING = [line for line in commands() if line.startswith("lrl fit --resume ")]
TRAINING = [
    line
    for line in commands()
    if line.startswith(("lrl fit ", "python -m lrl fit ")) and line not in (*SERVING, *RESUMING)
]
OTHERS = [line for line in commands() if line not in (*COLLECTING, *SERVING, *RESUMING, *TRAINING)]
DIRECTORIES = {named[1]: line for line in TRAINING if (named := re.search(r" --run_directory (runs/\S+)", line))}
"""Training commands by the directory that they name."""


def configs_of(command):
    """Return the configuration files of a command."""
    return re.findall(r"--config (\S+)", command)


def anywhere(command):
    """Return a command without the directory that it writes to."""
    return re.sub(r" --run_directory \S+", "", command)


def start_of(command):
    """Return the run directory that a command's config starts from, or None."""
    config = re.search(r"--config (\S+)", command)
    named = config and re.search(r"init_from: (runs/\S+)", Path(config[1]).read_text(encoding="utf-8"))
    return named and named[1]


STARTS = {start_of(line) for line in TRAINING}
STARTS |= {run for line in COLLECTING for run in re.findall(r" --policy (runs/\S+)", line)}
"""Run directories whose policy another command starts from or collects with."""
VARIANTS = {
    line
    for line in TRAINING
    if line not in {DIRECTORIES.get(run) for run in STARTS}
    and any(configs_of(line) == configs_of(plain) and len(plain) < len(line) for plain in TRAINING)
}
"""Commands that change values of an experiment that another command trains: their objects are made, no more."""


def keys_of(command):
    """Return the program, the configurations and the keys of a training command, without their values."""
    program, _, options = anywhere(command).partition(" fit ")
    return program, *configs_of(command), *sorted(re.findall(r"(?:^| )(--[\w.+]+)", options))


REPEATED = VARIANTS - set({keys_of(line): line for line in reversed(TRAINING)}.values())
"""Variants that have other values of the same keys as a command before them."""


@pytest.fixture(scope="session")
def datasets(once):
    """Return a folder with small versions of all documented data sets."""

    def collect(folder):
        for command in COLLECTING:
            run = re.search(r" --policy (runs/\S+)", command)
            if run:
                if not (folder / run[1]).exists():  # several data sets may be of one policy
                    training = f"{DIRECTORIES[run[1]]} {SHORT} --run_directory {folder / run[1]}"
                    result = run_shortened(training, str(folder))
                    assert result.returncode == 0, result.stderr
                command = command.replace(run[1], str(folder / run[1]))
            if "/half_cheetah/" in command and "--max_episode_steps" not in command:
                command += " --max_episode_steps 250"  # instead of 1,000
            result = run_command(f"{command} --episodes 4", MINARI_DATASETS_PATH=str(folder))
            assert result.returncode == 0, result.stderr

    return str(once("readme-datasets", collect))


@pytest.fixture(scope="session")
def trained(datasets, once):
    """Return a function that returns the run directory of a training command, which runs at its first use."""
    collected = {anywhere(line): Path(datasets) / run for run, line in DIRECTORIES.items()}
    ready = {line: run for line, run in collected.items() if run.exists()}  # data sets were collected by them

    def directory(command):
        if anywhere(command) in ready:
            return ready[anywhere(command)]
        start, more = start_of(command), ""
        if start:
            more = f" --model.init_args.init_from {directory(DIRECTORIES[start])}"

        def train(folder):
            result = run_shortened(f"{command} {SHORT} --run_directory {folder / 'run'}{more}", datasets)
            assert result.returncode == 0, result.stderr

        return once(f"readme-{hashlib.sha256(anywhere(command).encode()).hexdigest()[:16]}", train) / "run"

    return directory


def run_shortened(command, datasets):
    """Run a command that is parsed and set up as documented, with fewer steps."""
    make, rows = LRLCLI.instantiate_classes, RandomMapRows.rows
    others = [Path(config) for config in configs_of(command) if config != IN_BFLOAT16]
    if any("precision: bf16-mixed" in config.read_text(encoding="utf-8") for config in others):
        command += " --trainer.precision 32-true"

    def made(self):
        parsed = self.config["fit"]
        assert {short_name(parsed.model.class_path), short_name(parsed.data.class_path)} <= components().keys()
        assert parsed.trainer.use_distributed_sampler is False
        assert parsed.data.init_args.seed == parsed.seed_everything == 0
        make(self)
        for source in (
            getattr(self.datamodule, name, None) for name in ("demonstrations", "validation_demonstrations")
        ):
            if isinstance(source, MinariDemonstrations):
                source.selection = replace(source.selection, num_rows=None, num_episodes=None)  # the sets are small
            if isinstance(source, SyntheticHistories):
                source.num_functions = MAPS
        shorten(self)

    def few(self):
        self.num_maps = min(self.num_maps, MAPS)
        return rows(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RandomMapRows, "rows", few)
        patch.setattr(LRLCLI, "instantiate_classes", made)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        return run_command(command, MINARI_DATASETS_PATH=datasets)


@pytest.mark.learning
@pytest.mark.parametrize(
    "command", [pytest.param(line, marks=pytest.mark.reference) if line in REPEATED else line for line in TRAINING]
)
def test_a_training_command_runs(command, trained, datasets, tmp_path, monkeypatch):
    if any(name in command for name in NEEDS_A_HUB):
        monkeypatch.setenv("LRL_CACHE", str(tmp_path))
        line = f"{command} {SHORT} --run_directory {tmp_path / 'run'} --trainer.accelerator auto"
        result = run_shortened(line, datasets)
        assert result.returncode == 2 and "language_model.name" in result.stderr and "Traceback" not in result.stderr
        return
    if command in VARIANTS:
        monkeypatch.setattr(LRLCLI, "_run_subcommand", lambda *_: None)
        start = f" --model.init_args.init_from {tmp_path}" if start_of(command) else ""
        line = f"{command} {SHORT} --run_directory {tmp_path / 'run'}{start}".replace("{seed}", "0")  # as run_seeds
        result = run_shortened(line, datasets)
        assert result.returncode == 0, result.stderr
        return
    assert (trained(command) / "checkpoints" / "last.ckpt").exists()


@pytest.mark.learning
@pytest.mark.parametrize("command", RESUMING)
def test_a_run_is_resumed(command, trained, datasets, tmp_path):
    (run,) = re.findall(r"--resume (\S+)", command)
    shutil.copytree(trained(DIRECTORIES[run]), tmp_path / "run")
    command = re.sub(r"(--resume) \S+", rf"\1 {tmp_path / 'run'}", command)
    result = run_shortened(f"{command} {SHORT} --trainer.max_epochs 2", datasets)
    assert result.returncode == 0, result.stderr
    with (tmp_path / "run/metrics.csv").open(encoding="utf-8") as rows:
        assert len({row["clock/env_steps"] for row in csv.DictReader(rows)}) == 2


@pytest.fixture
def children_of_this_process(monkeypatch):
    """Run the Python children of a command in this process, because each would import torch and Lightning again."""
    start = subprocess.run

    def run(command, **settings):
        if command[0] != sys.executable:
            return start(command, **settings)
        done = run_words(["python", *command[1:]])
        assert done.returncode == 0, done.stderr
        return done

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.learning
@pytest.mark.usefixtures("children_of_this_process")
@pytest.mark.parametrize("command", OTHERS)
def test_another_command_runs(command, trained, datasets, tmp_path):
    run = trained("lrl fit --config configs/frozen_lake/grpo.yaml") if "runs/" in command else tmp_path
    command = re.sub(r"runs/\S*last\.ckpt", str(run / "checkpoints" / "last.ckpt"), command)
    command = re.sub(r"^(lrl (?:compare|plot|report|table)) runs/\S+", rf"\1 {run}", command)
    command = re.sub(r"(--baseline|--checkpoint) runs/\S+", rf"\1 {run}", command)
    command = re.sub(r"(--(?:json|out|tensorboard|capture_video)) \S+", rf"\1 {tmp_path}/out", command)
    command += " --episodes 4" if re.search("evaluate|success_table", command) else ""
    command += " --num_videos 1" if "--capture_video" in command else ""
    command += " --rows 300 --encoded_rows 128" if "benchmark.py demonstrations" in command else ""
    command = command.replace("phases CONFIG", "phases configs/cartpole/ppo_mlp.yaml --collections 2")
    result = run_command(command, MINARI_DATASETS_PATH=datasets)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_served_environment_is_played_and_packaged(tmp_path):
    packaging = [line for line in SERVING if " --package " in line]
    playing = [line for line in SERVING if " --env_url " in line]
    (serving,) = [line for line in SERVING if line not in (*packaging, *playing)]
    with serving_process(*serving.partition(" serve_env ")[2].split(), "--port", "0") as (url, _):
        for command in playing:
            result = run_command(re.sub(r"(--env_url) \S+", rf"\1 {url}", command) + " --episodes 4")
            assert result.returncode == 0, result.stderr
    for command in packaging:
        result = run_command(re.sub(r"(--package) \S+", rf"\1 {tmp_path}/package", command))
        assert result.returncode == 0 and (tmp_path / "package/openenv.yaml").exists(), result.stderr


def test_there_are_commands_to_run():
    assert len(TRAINING) >= 4 and any(line.startswith("lrl evaluate ") for line in OTHERS)


@pytest.mark.slow
def test_a_short_run_has_the_reduced_sizes(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(LRLCLI, "_run_subcommand", lambda self, _: seen.update(vars(self.datamodule)))
    command = "lrl fit --config configs/frozen_lake/grpo.yaml"
    result = run_shortened(f"{command} --run_directory {tmp_path / 'run'}", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert {name: seen[name] for name in SMALL if name in seen} == {
        "num_groups": 4,
        "group_size": 3,
        "num_steps": None,
        "max_turns": 4,
    }


def test_make_targets_that_the_readme_names_exist():
    named = set(re.findall(r"make ([a-z-]+)", Path("README.md").read_text(encoding="utf-8")))
    targets = set(re.findall(r"^([a-z-]+):", Path("Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"quickstart", "test"} <= named & targets


@pytest.mark.learning
def test_the_experiment_of_the_readme_runs(tmp_path):
    (yaml,) = re.findall(r"```yaml\n(.*?)```", Path("README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(yaml.splitlines()) <= 16 and yaml in Path("docs/getting_started.md").read_text(encoding="utf-8")
    (tmp_path / "my.yaml").write_text(yaml)
    command = f"lrl fit --config {tmp_path / 'my.yaml'} {SHORT} --run_directory {tmp_path / 'run'}"
    result = run_shortened(command, str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run/checkpoints/last.ckpt").exists()


def test_every_configuration_has_a_documented_command():
    trained = {config for line in TRAINING for config in re.findall(r"--config (\S+)", line)}
    assert {str(path) for path in Path("configs").glob("*/*.yaml") if path.parent.name != "overlays"} <= trained


def test_tables_agree_with_the_kept_results():
    result = run_command("python scripts/results.py check")
    assert result.returncode == 0, result.stderr
