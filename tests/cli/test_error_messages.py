"""Tests of the messages for errors of a user."""

import errno
import re
from pathlib import Path

import pytest
import torch
import wandb
from safetensors import SafetensorError

import lrl.cli.main
from lrl.cli.error_messages import user_errors
from lrl.cli.main import check_wandb


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "run/last.ckpt"),
            "there is no space left on the disk for 'run/last.ckpt' ([Errno 28] No space left on device: "
            "'run/last.ckpt'); free some, or write to another disk.",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "run"), "Permission denied: 'run'"),
        (wandb.errors.CommError("no such\nentity"), "no such entity"),
    ],
)
def test_errors_of_the_disk_and_of_weights_and_biases_are_one_sentence(error, sentence, monkeypatch, capsys):
    def refuse(args):
        raise error

    monkeypatch.setattr(lrl.cli.main, "LRLCLI", refuse)
    with pytest.raises(SystemExit) as stopped:
        lrl.cli.main.run([])
    assert stopped.value.code == 2 and capsys.readouterr().err == f"lrl: {sentence}\n"


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
