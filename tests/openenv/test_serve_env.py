"""Tests of the commands that serve an environment and play a served one."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from commands import run_command
from openenv_server import serving

from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.evaluation.load import _build
from lrl.openenv.codec import OpenEnvAction
from lrl.openenv.factory import OpenEnvEnvs


def evaluate(where, out):
    result = run_command(f"python -m lrl evaluate --policy random {where} --episodes 5 --num_envs 3 --json {out}")
    assert result.returncode == 0, result.stderr
    return json.loads(Path(out).read_text())


@pytest.mark.slow
def test_evaluating_a_served_environment_equals_evaluating_it_here(tmp_path):
    with serving(GymnasiumEnvs("FrozenLake-v1")) as url:
        there = evaluate(f"--env_url {url}", tmp_path / "there.json")
        here = evaluate("--env_id FrozenLake-v1", tmp_path / "here.json")
        assert there.pop("env_id") == url and here.pop("env_id") == "FrozenLake-v1"
        assert url in there.pop("command") and url not in here.pop("command")
        assert there.pop("env_steps_per_second") > 0 and here.pop("env_steps_per_second") > 0
        assert there == here
        short = evaluate(f"""--env_url {url} --env_kwargs '{{"max_episode_steps": 1}}'""", tmp_path / "short.json")
        assert short["length_mean"] == 1.0


@pytest.mark.slow
def test_watching_a_served_environment_equals_watching_it_here(tmp_path):
    with serving(GymnasiumEnvs("FrozenLake-v1")) as url:
        there, here = (
            run_command(f"python -m lrl watch --policy random --seed 3 {where}")
            for where in (f"--env_url {url}", "--env_id FrozenLake-v1")
        )
        assert there.returncode == here.returncode == 0, there.stderr + here.stderr
        turns = re.compile(r"^(?:--- turn|action:) .*$", re.MULTILINE)
        assert turns.findall(there.stdout) == turns.findall(here.stdout) != []
        assert there.stdout.splitlines()[-1] == here.stdout.splitlines()[-1]
        pictures = run_command(f"python -m lrl watch --policy random --env_url {url} --frames {tmp_path / 'frames'}")
        assert pictures.returncode == 2 and "Traceback" not in pictures.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--env_url http://127.0.0.1:9", "env.url is 'http://127.0.0.1:9', which cannot be read"),
        ("--env_url http://127.0.0.1:9 --env_id CartPole-v1", "--env_id is given with --env_url"),
        ("--env_url http://127.0.0.1:9 --numbers integers", "--numbers is given with --env_url"),
        ("""--env_url http://127.0.0.1:9 --env_kwargs '{"speed": 1}'""", "settings of OpenEnvEnvs are .*'speed'"),
    ],
)
def test_a_wrong_address_raises_one_sentence(words, message):
    result = run_command(f"python -m lrl evaluate --policy random {words}")
    assert result.returncode == 2 and re.search(message, result.stderr) and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--env_id Nowhere-v0", "--env_id is 'Nowhere-v0', which is not registered"),
        ("--max_sessions 0", "--max_sessions is 0; it must be at least 1"),
        ("--port 99999", "port is 99999, which cannot be used"),
        ("--package tests", "--package is 'tests', which is not empty"),
        ("--package new --port 9", "--port is given with --package; it is for serving, so leave it out"),
        ("--reward_range 0 1", "--reward_range is given without --package; it is for the folder, so leave it out"),
    ],
)
def test_an_environment_that_cannot_be_served_raises_one_sentence(words, message):
    result = run_command(f"python -m lrl serve_env {words}")
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_the_command_writes_a_package(tmp_path):
    result = run_command(f"python -m lrl serve_env --invalid_penalty -0.5 --package {tmp_path / 'lake'}")
    assert result.returncode == 0 and "openenv validate" in result.stdout, result.stderr
    manifest = yaml.safe_load((tmp_path / "lake" / "openenv.yaml").read_text())
    assert manifest["validation"]["reward"]["range"] == [-0.5, 1.0]


def test_the_documented_configuration_is_valid():
    page = Path("docs/environments.md").read_text(encoding="utf-8")
    (block,) = [one for one in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "OpenEnvEnvs" in one]
    envs = _build(EnvFactory, yaml.safe_load(block)["data"]["init_args"]["env"], Path("docs"))
    assert isinstance(envs, OpenEnvEnvs) and isinstance(envs.action, OpenEnvAction)
    assert envs.url == "http://127.0.0.1:8000" and envs.action.names == {"LEFT": 0, "STAY": 1, "RIGHT": 2}


TRAINING = """
model:
  class_path: PPOValueHeadModule
  init_args:
    policy:
      class_path: ScoringPolicy
      init_args: {{language_model: {{name: assets/tiny-lm}}, prompt: {{response_format: direct}}, value_head: {{}}}}
data:
  class_path: RolloutDataModule
  init_args:
    env: {{class_path: {env}}}
    num_envs: 2
    num_steps: 4
    num_epochs: 1
    num_minibatches: 1
trainer: {{max_epochs: 1, limit_val_batches: 0}}
"""


@pytest.mark.slow
def test_a_scoring_policy_trains_equally_on_a_served_environment(tmp_path):
    def train(env, name):
        (tmp_path / f"{name}.yaml").write_text(TRAINING.format(env=env))
        result = run_command(f"python -m lrl fit --config {tmp_path / name}.yaml --run_directory {tmp_path / name}")
        assert result.returncode == 0, result.stderr
        return torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]

    with serving(GymnasiumEnvs("CartPole-v1")) as url:
        there = train(f"OpenEnvEnvs, init_args: {{url: '{url}'}}", "there")
    here = train("GymnasiumEnvs, init_args: {id: CartPole-v1}", "here")
    assert list(there) == list(here) and all(torch.equal(there[name], here[name]) for name in here)
