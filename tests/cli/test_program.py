"""The subcommands of the one program."""

import gc
import subprocess
import sys

import pytest
from commands import run_words

from lrl.cli import program
from lrl.cli.program import COMMANDS, TRAINER_COMMANDS, main, with_configuration

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


def test_libraries_are_imported_without_garbage_collection_unless_they_have_been_imported_before(monkeypatch):
    frozen = []
    monkeypatch.setattr(program.gc, "freeze", lambda: frozen.append(gc.isenabled()))
    with program._without_collection():
        assert gc.isenabled()
    monkeypatch.delitem(sys.modules, "torch")
    with program._without_collection():
        assert not gc.isenabled()
    assert gc.isenabled() and frozen == [False]


def test_ctrl_c_while_modules_are_imported_prints_no_traceback(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("lrl.cli.program._run", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130 and capsys.readouterr().err == "lrl: interrupted\n"


@pytest.fixture
def run(tmp_path):
    """The directory of a run with a checkpoint."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "checkpoints/last.ckpt", "checkpoints/best.ckpt"):
        (tmp_path / "run" / name).touch()
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["", "checkpoints/best.ckpt"])
def test_the_configuration_of_a_checkpoint_is_that_of_its_run_unless_another_is_given(run, name):
    path, config = str(run / name), str(run / "config.yaml")
    read = ["--config", config, "--run_directory", "null"]
    assert with_configuration(["fit", "--ckpt_path", path, "--a=1"]) == ["fit", *read, "--ckpt_path", path, "--a=1"]
    assert with_configuration(["test", f"--ckpt_path={path}"]) == ["test", *read, f"--ckpt_path={path}"]
    in_place = ["--ckpt_path", path, "--run_directory", str(run)]
    for given in (["--resume", path], [f"--resume={path}"]):
        assert with_configuration(["fit", "--a", "1", *given, "--b=2"]) == [
            "fit",
            *read,
            "--a",
            "1",
            "--b=2",
            *in_place,
        ]
    others = ["fit", "--config", "x.yaml"]
    assert with_configuration([*others, "--resume", path]) == [*others, *in_place]
    for given in ([*others, "--ckpt_path", path], others, ["fit", "--ckpt_path=null"]):
        assert with_configuration(given) == given


@pytest.mark.parametrize(
    ("words", "removed", "sentence"),
    [
        ("fit --ckpt_path nowhere", "", "ckpt_path is 'nowhere', which does not exist"),
        ("fit --resume nowhere", "", "resume is 'nowhere', which does not exist"),
        ("fit --resume run", "checkpoints/last.ckpt", "resume is 'run', which has no checkpoints/last.ckpt; start"),
        ("validate --ckpt_path run", "config.yaml", "ckpt_path is 'run', but there is no '.*/run/config.yaml'; give"),
        ("validate --resume run", "", "resume continues a run of lrl fit in its directory"),
        ("fit --resume run --run_directory other", "", "in its directory, without ckpt_path and run_directory"),
        ("fit --resume run --resume=other", "", "resume is given more than once; give it once"),
        ("fit --resume=run --lr 1 --resume run", "", "resume is given more than once; give it once"),
    ],
)
def test_a_run_that_cannot_be_continued_is_one_sentence(run, monkeypatch, words, removed, sentence):
    monkeypatch.chdir(run.parent)
    if removed:
        (run / removed).unlink()
    with pytest.raises(ValueError, match=sentence):
        with_configuration(words.split())
