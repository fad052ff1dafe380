"""The subcommands of the one program."""

import subprocess
import sys

import pytest
from commands import run_words

from lrl.cli.program import COMMANDS, TRAINER_COMMANDS

HELP = """
import resource, runpy, sys
from lrl.cli.program import COMMANDS, TRAINER_COMMANDS
for words in [[], *([name] for name in TRAINER_COMMANDS | COMMANDS), ["fit", "--config", "frozen_lake/grpo.yaml"]]:
    sys.argv = ["lrl", *words, "--help" if len(words) < 2 else "--model.init_args.lrr=1"]
    try:
        runpy.run_module("lrl", run_name="__main__", alter_sys=False)
    except SystemExit as end:
        assert end.code == (0 if len(words) < 2 else 2), words
slow = {"torch", "lightning", "transformers"} & set(sys.modules)
assert not slow, slow
used = resource.getrusage(resource.RUSAGE_SELF)
assert used.ru_utime + used.ru_stime < 3, used
"""


def test_the_help_of_all_commands_and_a_misspelt_key_take_less_than_three_seconds_and_no_torch():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, text in (TRAINER_COMMANDS | COMMANDS).items():
        assert any(line.split() == [name, *text.split()] for line in done.stdout.splitlines())
    assert all(f"usage: lrl {name} " in done.stdout for name in TRAINER_COMMANDS | COMMANDS)
    assert done.stderr == "lrl: model.init_args.lrr is not an argument of GRPOModule; did you mean 'optimizer.lr'?\n"


@pytest.mark.parametrize(
    ("word", "sentence"), [("evalute", "is not a command; did you mean evaluate?"), ("x", "it must be one of fit, ")]
)
def test_an_unknown_command_is_one_sentence(word, sentence):
    done = run_words(["python", "-m", "lrl", word])
    assert done.returncode == 2 and sentence in done.stderr and len(done.stderr.splitlines()) == 1
