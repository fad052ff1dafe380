"""Groups of options that several commands have, such as devices and seeds."""

import importlib
import json
import sys
from argparse import Namespace

import pytest
import torch

import lrl.cli.evaluate as evaluate_command
from lrl.cli.main import _seed
from lrl.cli.options import DeviceOptions
from lrl.cli.program import MODULES, main
from lrl.policies.baselines import ConstantActor


def evaluate(monkeypatch, *arguments):
    """Run ``lrl evaluate`` on two episodes."""
    monkeypatch.setattr(sys, "argv", ["lrl", "evaluate", "--policy", "constant", "--episodes", "2", *arguments])
    main()


@pytest.fixture
def seen(monkeypatch):
    """State in which a policy with one weight acts: whether autocast is on, and the data type of the weight."""
    seen = set()
    act = ConstantActor.act

    def watched(self, *args, **kwargs):
        seen.add((torch.is_autocast_enabled("cpu"), self.weight.dtype))
        return act(self, *args, **kwargs)

    connect = ConstantActor.connect

    def connected(self, codec):
        connect(self, codec)
        self.weight = torch.nn.Parameter(torch.zeros(1))

    monkeypatch.setattr(ConstantActor, "connect", connected)
    monkeypatch.setattr(ConstantActor, "act", watched)
    return seen


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (False, torch.float32)),
        (["--precision", "bf16-mixed"], (True, torch.float32)),
        (["--precision", "bf16-true"], (False, torch.bfloat16)),
        (["--precision", "64-true"], (False, torch.float64)),
    ],
)
def test_a_policy_acts_in_the_given_precision(arguments, expected, seen, monkeypatch, capsys):
    evaluate(monkeypatch, "--accelerator", "cpu", *arguments)
    assert seen == {expected} and "constant" in capsys.readouterr().out
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--precision", "bf15"], "'bf15'"),
        (["--strategy", "nothing"], "'nothing'"),
        (["--devices", ""], "--devices is ''"),
    ],
)
def test_an_unusable_setting_raises_one_sentence(arguments, sentence, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        evaluate(monkeypatch, "--accelerator", "cpu", *arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("lrl evaluate: ") and sentence in told and "Traceback" not in told


def test_a_strategy_that_shards_the_policy_raises(monkeypatch):
    kind = type("FSDPStrategy", (), {})  # Fabric itself wants a GPU for it
    monkeypatch.setattr("lightning.fabric.Fabric", lambda **settings: Namespace(strategy=kind()))
    with pytest.raises(ValueError, match="--strategy is 'fsdp', which shards the weights"):
        DeviceOptions(accelerator="cuda", devices="2", strategy="fsdp").fabric()


SEEDED = {
    "evaluate": ("--policy", "random"),
    "watch": ("--policy", "random"),
    "collect": ("--policy", "random", "--dataset_id", "lrl/lake/random-v0"),
    "success_table": ("--policy", "random", "--env_id", "CartPole-v1"),
    "zero_shot": ("--model", "none", "--json", "none.json"),
    "expert_q": ("--out", "none.csv"),
    "synthetic_search": (),
}
"""Commands with a seed, and options that each of them needs."""


@pytest.mark.parametrize("seed", [-1, 2**63])
@pytest.mark.parametrize("command", SEEDED)
def test_a_seed_out_of_range_is_one_sentence(command, seed, capsys):
    """It was a traceback of Gymnasium's or an OverflowError."""
    main = importlib.import_module(MODULES.get(command, f"lrl.cli.{command}")).main
    with pytest.raises(SystemExit) as end:
        main(f"lrl {command}", [*SEEDED[command], f"--seed={seed}"])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"lrl {command}: --seed is {seed}; it must be from 0 to {2**63 - 1}.\n"


def test_the_last_seed_is_in_range_too(capsys):
    with pytest.raises(SystemExit):
        evaluate_command.main("lrl evaluate", ["--policy", "random", "--episodes", "3", f"--seed={2**63 - 2}"])
    sentence = f"seed is {2**63 - 2}; it must be from 0 to {2**63 - 3} for 3 consecutive seeds."
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_the_seed_of_a_run_is_in_the_range_of_libraries(seed):
    with pytest.raises(ValueError, match=f"seed_everything is {seed}; it must be from 0 to {2**32 - 1}"):
        _seed(seed)


def test_evaluate_names_the_rule_of_success(capsys, tmp_path):
    words = ["--policy", "constant", "--episodes", "2", "--success_at", "any_step", "--json", str(tmp_path / "it.json")]
    evaluate_command.main("lrl evaluate", words)
    assert "success at any step" in capsys.readouterr().out
    assert json.loads((tmp_path / "it.json").read_text())["success_at"] == "any_step"
