"""Tests of the messages for errors of a user."""

import errno
import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import wandb
from safetensors import SafetensorError

import lrl.cli.main
from lrl.algorithms.ppo import PPOValueHeadModule
from lrl.cli.error_messages import user_errors
from lrl.cli.trainer_settings import check_wandb
from lrl.codecs.numbers import NumberFormat
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake import RandomMapRows
from lrl.lm.config import LoRAConfig
from lrl.policies.mlp import MLPPolicy
from lrl.training.optimizer import OptimizerConfig


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "run/last.ckpt"),
            "there is no space left on the disk ([Errno 28] No space left on device: 'run/last.ckpt'); free some, or "
            "write to another disk.",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB."),
            "memory ran out (CUDA out of memory. Tried to allocate 2.00 GiB); smaller batches, shorter texts or a "
            "smaller model need less.",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "run"), "Permission denied: 'run'"),
        (wandb.errors.CommError("no such\nentity"), "no such entity"),
    ],
)
def test_errors_of_the_disk_of_memory_and_of_weights_and_biases_are_one_sentence(error, sentence, monkeypatch, capsys):
    def refuse(args, notes):
        raise error

    monkeypatch.setattr(lrl.cli.main, "LRLCLI", refuse)
    with pytest.raises(SystemExit) as stopped:
        lrl.cli.main.run([])
    assert stopped.value.code == 2 and capsys.readouterr().err == f"lrl: {sentence}\n"


OWN_CLASSES = """
import lrl

class Plain: ...

class Failing(lrl.PPOValueHeadModule):
    def __init__(self, policy: lrl.Policy):
        raise ValueError("I do not like this")

class AbstractPolicy(lrl.Policy): ...

class Abstract(lrl.GradientModule):
    def __init__(self, policy: lrl.Policy):
        super().__init__(policy, lrl.OptimizerConfig(), "token")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        (
            "policy=wrong.A",
            "model.policy is 'wrong.A', which cannot be imported (SyntaxError: invalid syntax (wrong.py, ",
        ),
        ("policy=own.AbstractPolicy", "model.policy is 'own.AbstractPolicy', which cannot be used; it must define "),
        ("own.Plain", "model is 'own.Plain'; it must be a subclass of RunModule."),
        ("own.Failing", "I do not like this (own.py, line 8)"),
        ("own.Abstract", "model is 'own.Abstract', which cannot be used; it must define loss."),
        ("own.Failin", "model is 'own.Failin', which does not exist; did you mean 'own.Failing'?"),
        (
            "owm.Failing",
            "model is 'owm.Failing', which cannot be imported (No module named 'owm' in the current folder or among "
            "installed packages).",
        ),
        ("wrong.A", "model is 'wrong.A', which cannot be imported (SyntaxError: invalid syntax (wrong.py, line 1))."),
    ],
)
def test_mistakes_in_a_class_of_a_user_are_named_with_their_place(path, sentence, tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text(OWN_CLASSES)
    (tmp_path / "wrong.py").write_text("def x(:")
    monkeypatch.syspath_prepend(tmp_path)
    option = f"--model.{path}" if "=" in path else f"--model.class_path={path}"
    with pytest.raises(SystemExit):
        lrl.cli.main.run(["fit", "--config", "cartpole/ppo_mlp.yaml", option, "--run_directory", str(tmp_path / "run")])
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"lrl: {sentence}")


def test_no_place_is_named_for_an_error_of_a_library(capsys):
    with pytest.raises(SystemExit), user_errors("lrl"):
        np.random.default_rng(-1)
    assert capsys.readouterr().err == "lrl: expected non-negative integer\n"


@pytest.mark.parametrize(
    "words", [["--json", "a/b"], ["x", "--json=a"], ["--seed", "1", "--json", "a", "--other", "c"]]
)
def test_an_error_of_a_file_names_the_option_with_its_path(words, capsys):
    value = "a/b" if "a/b" in words else "a"
    with pytest.raises(SystemExit), user_errors("lrl evaluate", args=words):
        raise OSError(errno.ENAMETOOLONG, "File name too long", str(Path("a", "b").absolute()))
    assert capsys.readouterr().err == f"lrl evaluate: --json is {value!r}, which cannot be used: File name too long.\n"


@pytest.mark.parametrize(
    ("create", "sentence"),
    [
        (lambda: OptimizerConfig(lr=math.inf), "model.optimizer.lr is inf; it must be positive and at most 3.4e+38."),
        (lambda: OptimizerConfig(lr=-math.inf), "model.optimizer.lr is -inf; it must be positive."),
        (lambda: PPOValueHeadModule(MLPPolicy((4,)), vf_coef=1e300), "model.vf_coef is 1e+300; .* at most 3.4e+38."),
        (
            lambda: GymnasiumEnvs("CartPole-v1", invalid_penalty=-math.inf),
            r"env.invalid_penalty is -inf; it must be a number from -3.4e+38 to 3.4e+38.",
        ),
        (
            lambda: GymnasiumEnvs("FrozenLake-v1", {"is_slippery": "x"}).make_native(),
            "env.kwargs is .*, which FrozenLake-v1 does not accept: is_slippery is 'x'; it must be true or false.",
        ),
        (lambda: NumberFormat(ranges=[(True, 2)]), r"numbers.ranges\[0\] is \(True, 2\); it must be two numbers."),
        (
            lambda: NumberFormat(ranges=[(0, 1e300)]),
            r"numbers.ranges\[0\] is 1e+300; it must be a number from -3.4e+38 to 3.4e+38.",
        ),
        (
            lambda: OptimizerConfig(factory=partial(torch.optim.SGD, lr=None)).make([{"params": []}], 1, False),
            "model.optimizer.factory is set, but creates no optimiser: '<=?' not supported .*",
        ),
        (lambda: LoRAConfig(target_modules=["q_proj", ""]), "lora.target_modules is .*; it must name layers, or .*"),
        (lambda: RandomMapRows(gamma=2.5), r"env.rows.gamma is 2.5; it must be in \[0, 1\]."),
    ],
)
def test_a_number_that_is_out_of_range_is_named_in_a_sentence(create, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$".replace("e+", r"e\+")):
        create()


def write_with_torch():
    torch.save({"weights": torch.zeros(10_000)}, "/dev/full")


def write_with_safetensors():
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def write_with_python():
    with open("/dev/full", "w") as file:
        file.write("lines")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("write", [write_with_torch, write_with_safetensors, write_with_python])
def test_a_full_disk_is_one_sentence_whichever_library_writes(write, capsys):
    sentence = "there is no space left on the disk.*; free some, or write to another disk\\.\n$"
    with pytest.raises(SystemExit) as stopped, user_errors("lrl merge"):
        write()
    assert stopped.value.code == 2 and re.match(f"lrl merge: {sentence}", capsys.readouterr().err)


def test_an_error_of_the_program_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="shapes"), user_errors("lrl merge"):
        raise RuntimeError("shapes do not fit")


@pytest.mark.parametrize("mode", [None, "offline"])
def test_weights_and_biases_without_login_raises_before_objects_are_created(mode, monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
        check_wandb(offline=False)
        return
    monkeypatch.setattr(wandb, "login", lambda prompt, verify: False)
    with pytest.raises(ValueError, match="there is no API key; call `wandb login`"):
        check_wandb(offline=False)
