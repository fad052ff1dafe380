"""The command line, and the overlays that are shipped."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from commands import run_words
from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import ModelParallelStrategy

import lrl.cli.main
import lrl.files
from lrl.cli.main import LRLCLI, check_ours, none_as_null
from lrl.cli.run_directory import RunDirectory, experiment_name
from lrl.cli.trainer_settings import set_data_parallel_size
from lrl.evaluation.load import checkpoint_file
from lrl.registry import short_name
from lrl.training.export import ExportModel

OVERLAYS = sorted(Path("configs/overlays").glob("*.yaml"))


class Parsed(LRLCLI):
    """Command line that parses everything and creates no objects."""

    def before_instantiate_classes(self):
        pass

    def instantiate_classes(self):
        pass

    def _run_subcommand(self, subcommand):
        pass


def parse(*args):
    return parsed_by(*args).config["fit"]


def parsed_by(*args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lrl", "fit", *map(str, args)])
        return Parsed()


class Made(LRLCLI):
    """Command line that creates all objects and runs nothing."""

    def before_instantiate_classes(self):
        self.config["fit"].trainer.logger = False

    def _run_subcommand(self, subcommand):
        pass


def loggers_of(parsed):
    return [logger.class_path.rsplit(".", 1)[-1] for logger in parsed.trainer.logger]


@pytest.mark.slow
def test_overlays_can_be_combined_with_an_experiment_and_with_each_other():
    """One command parses all overlays; tests/test_readme.py parses and runs every experiment."""
    overlays = [part for path in OVERLAYS for part in ("--config", path)]
    cli = parsed_by("--config", "configs/frozen_lake/grpo.yaml", *overlays)
    parsed, written = cli.config["fit"], cli.parser.dump(cli.config)
    validated = LightningArgumentParser.dump(cli.parser, cli.config)
    assert written == re.sub(r"(?<=class_path: )lrl\.[\w.]+", lambda found: found[0].rpartition(".")[2], validated)
    trainer, policy = parsed.trainer, parsed.model.init_args.policy.init_args
    assert [path.stem for path in OVERLAYS] == ["bf16", "ddp", "debug", "fsdp", "qlora", "trackio", "wandb"]
    assert trainer.precision == "bf16-mixed" and trainer.devices == "auto"
    assert (trainer.max_epochs, trainer.check_val_every_n_epoch) == (3, 3)
    assert trainer.strategy.class_path == "lightning.pytorch.strategies.ModelParallelStrategy"  # in place of "ddp"
    assert loggers_of(parsed) == ["CSVLogger", "TensorBoardLogger", "TrackioLogger", "WandbLogger"]
    assert len(trainer.callbacks) == 6
    language_model = policy.language_model  # that of the experiment, quantised
    assert (language_model.name, language_model.quantization) == ("assets/tiny-lm", "nf4")
    assert language_model.lora.r == 16 and policy.prompt.response_format == "think_answer"


@pytest.mark.slow
def test_null_on_the_command_line_unsets_a_key_at_any_depth():
    policy = "--model.init_args.policy.init_args"
    cli = parsed_by(
        *("--config", "configs/frozen_lake/grpo.yaml", "--model.init_args.clip_range_high", "null"),
        *(f"{policy}.pack_tokens", "null", f"{policy}.language_model.lora", "null", f"{policy}.prompt.stop", "null"),
        *("--data.init_args.validation.env.init_args.kwargs", '{"map_name": "None"}'),
        "--data.init_args.env.init_args.rewards",
        '[{"class_path": "LearnedReward", "init_args": {"path": "None\'s", "invalid": null}}]',
    )
    model, data = cli.config["fit"].model.init_args, cli.config["fit"].data.init_args
    policy = model.policy.init_args
    assert model.clip_range_high is None and policy.pack_tokens is None
    assert policy.language_model.lora is None and policy.prompt.stop is None, "not the word None"
    assert data.validation.env.init_args.kwargs == {"map_name": "None"}, "a text of the user's"
    (reward,) = data.env.init_args.rewards
    assert reward.init_args.invalid is None and reward.init_args.path == "None's"


@pytest.mark.parametrize(("tensor_parallel_size", "size"), [(1, 2), (2, "auto")])
def test_the_size_of_data_parallel_groups_is_the_number_of_devices(tensor_parallel_size, size):
    strategy = ModelParallelStrategy("auto", tensor_parallel_size)
    set_data_parallel_size(
        L.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    )
    assert strategy._data_parallel_size == size


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--model.init_args.optimizer.lr", "much"],
            "lrl: model.optimizer.lr is 'much'; it must be a number that is positive.",
        ),
        (["--model.init_args.optimizer.lr", "-1"], "lrl: model.optimizer.lr is -1; it must be positive."),
        (["--model.init_args.clip_range_high", "0"], "lrl: model.clip_range_high is 0; it must be positive, or null."),
        (
            ["--model.init_args.credit.kind", "t"],
            "lrl: model.credit.kind is 't'; it must be one of episode, turn, step, grouped_gae.",
        ),
        (["--model", "SFTModul"], "lrl: model is 'SFTModul', which is no class; did you mean 'SFTModule'?"),
        (
            ["--model.init_args.policy", "TextPolicyy"],
            "lrl: model.policy is 'TextPolicyy', which is no class; did you mean 'TextPolicy'?",
        ),
        (["--trainer.max_epochs", "many"], "lrl: trainer.max_epochs is 'many'; it must be an integer or null."),
        (
            ["--trainer.limit_train_batches", "[1]"],
            "lrl: trainer.limit_train_batches is [1]; it must be a number or null.",
        ),
        (["--seed_everything", "abc"], "lrl: seed_everything is 'abc'; it must be an integer."),
        (
            ["--data.init_args.num_minibatches", "1.5"],
            "lrl: data.num_minibatches is '1.5'; it must be an integer that is at least 1.",
        ),
        (
            ["--data.init_args.num_minibatches", "{}"],
            "lrl: data.num_minibatches is a dict; it must be an integer that is at least 1.",
        ),
        (
            ["--config", "data: {init_args: {num_minibatches: 1.5}}"],
            "lrl: data.num_minibatches is 1.5; it must be an integer that is at least 1.",
        ),
        (
            ["--config", "model: {init_args: {policy: {init_args: {language_model: {name: []}}}}}"],
            "lrl: model.policy.language_model.name is []; it must be a text.",
        ),
        (
            ["--config", "trainer: {callbacks: [3]}"],
            "lrl: trainer.callbacks is 3; it must be the name of a subclass of Callback, or have a class_path.",
        ),
        (
            ["--data", "SFTModule"],
            "lrl: data is 'SFTModule'; it must be the name of a subclass of LightningDataModule, such as "
            "package.module.Class.",
        ),
        (
            ["--config", "model: {init_args: {policy: {class_path: lrl.nothing.X}}}"],
            "lrl: model.policy is 'lrl.nothing.X', which cannot be imported (module 'lrl' has no attribute 'nothing').",
        ),
        (
            ["--trainer.max_epochs", "x" * 5000],
            f"lrl: trainer.max_epochs is '{'x' * 59}... (5003 characters) it must be an integer or null.",
        ),
        (
            ["--data.num_groups", "four"],
            "lrl: data.num_groups is 'four'; it must be an integer that is at least 1, or null.",
        ),
        (["--model.optimizer.lr", "fast"], "lrl: model.optimizer.lr is 'fast'; it must be a number that is positive."),
        (["--trainer.max_epoch", "3"], "lrl: unrecognized arguments: --trainer.max_epoch 3"),
        (
            ["--trainer.precision", "bf15"],
            "lrl: trainer.precision: 'bf15' must be one of 64, 32, 16, transformer-engine, transformer-engine-float16, "
            "16-true, 16-mixed, bf16-true, bf16-mixed, 32-true, 64-true, bf16; did you mean 'bf16'?",
        ),
    ],
)
def test_a_value_of_the_wrong_type_raises_one_sentence(arguments, sentence, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lrl"])
    with pytest.raises(SystemExit) as stopped:
        lrl.cli.main.run(["fit", "--config", "configs/frozen_lake/grpo.yaml", *arguments])
    assert stopped.value.code == 2 and capsys.readouterr().err == sentence + "\n"


@pytest.mark.slow
def test_chat_models_and_callbacks_are_named_without_their_module():
    chat = "--model.init_args.searcher.init_args.chat_model"
    words = ("--config", "configs/cartpole/props.yaml", chat, "LocalChatModel", f"{chat}.init_args.language_model.name")
    callback = ("--trainer.callbacks+", "Transcripts", "--trainer.callbacks.episodes", "9")
    parsed = parse(*words, "assets/tiny-lm", *callback)
    chat_model, last = parsed.model.init_args.searcher.init_args.chat_model, parsed.trainer.callbacks[-1]
    assert short_name(chat_model.class_path) == "LocalChatModel"
    assert short_name(last.class_path) == "Transcripts" and last.init_args.episodes == 9


@pytest.mark.slow
def test_another_class_keeps_the_settings_that_both_have():
    config = ("--config", "configs/babyai/ppo_writing.yaml")
    before, parsed = parse(*config).model, parse(*config, "--model.class_path", "REINFORCEPlusPlusModule").model
    assert short_name(parsed.class_path) == "REINFORCEPlusPlusModule"
    for name in ("policy", "init_from", "optimizer", "clip_range", "target_kl"):
        assert parsed.init_args[name] == before.init_args[name], name
    assert parsed.init_args.policy.init_args.value_head.hidden_sizes == [64]
    assert "vf_coef" not in parsed.init_args


@pytest.mark.slow
def test_the_seed_reaches_the_data():
    parsed = parse("--config", "configs/frozen_lake/grpo.yaml", "--seed_everything", "7")
    assert parsed.data.init_args.seed == 7
    assert loggers_of(parsed) == ["CSVLogger", "TensorBoardLogger"] and len(parsed.trainer.callbacks) == 6


@pytest.mark.slow
def test_one_option_exports_the_model_and_pushes_it(monkeypatch):
    command = ["lrl", "fit", "--config", "configs/frozen_lake/sft.yaml", "--trainer.accelerator", "cpu"]
    exports = []
    for option in ([], ["--push_to_hub", "me/lake"]):
        monkeypatch.setattr(sys, "argv", [*command, *option])
        exports.append([part for part in Made().trainer.callbacks if isinstance(part, ExportModel)])
    assert exports[0] == [] and [(part.repo_id, part.private) for part in exports[1]] == [("me/lake", True)]


@pytest.mark.slow
def test_a_missing_accelerator_is_named(monkeypatch):
    command = ["lrl", "fit", "--config", "configs/frozen_lake/sft.yaml", "--trainer.accelerator", "gpu"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="trainer.accelerator is 'gpu'"):
        Made()


def test_a_run_directory_belongs_to_one_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("LRL_RUN_DIRECTORY", "")  # so that its absence is restored
    monkeypatch.delenv("LRL_RUN_DIRECTORY")
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create(None, "frozen_lake/grpo", 3).path
    assert run.parent == tmp_path / "runs" / "frozen_lake" / "grpo" and run.name.endswith("-seed3")
    assert {"run.log", "commit.txt", "command.txt"} <= set(os.listdir(run))
    monkeypatch.delenv("LRL_RUN_DIRECTORY")
    with pytest.raises(ValueError, match="not empty"):
        RunDirectory.create(str(run), "frozen_lake/grpo", 3)


def test_an_experiment_is_named_by_its_file_not_by_an_overlay():
    assert experiment_name(["configs/frozen_lake/grpo.yaml", "configs/overlays/debug.yaml"]) == "frozen_lake/grpo"
    assert experiment_name(["configs/overlays/debug.yaml", "my_run.yaml"]) == "my_run"
    assert experiment_name([]) == "unnamed"


def test_a_checkpoint_is_found_in_a_run_directory(tmp_path):
    with pytest.raises(ValueError, match="ckpt_path"):
        checkpoint_file(tmp_path, "ckpt_path")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    assert checkpoint_file(tmp_path).name == "last.ckpt"


@pytest.mark.parametrize("case", ["text", "foreign", "cut", "sharded"])
def test_an_invalid_checkpoint_to_resume_raises_one_sentence(tmp_path, case):
    path = tmp_path / "some.ckpt"
    if case == "text":
        path.write_text("not a checkpoint")
    elif case == "sharded":
        path.mkdir()
        (path / ".metadata").write_text("")
    else:
        torch.save({"state_dict": {"weight": torch.zeros(10_000)}} | {"lrl": {}} if case == "cut" else {}, path)
    if case == "cut":
        path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(ValueError, match="ckpt_path.*some.ckpt'.*(is not a checkpoint|lrl did not write)") as caught:
        check_ours(path)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_lrl_is_accepted(tmp_path):
    torch.save({"state_dict": {}, "lrl": {}}, tmp_path / "last.ckpt")
    check_ours(tmp_path / "last.ckpt")


SHORT = ("--config", "configs/frozen_lake/grpo.yaml", "--data.init_args.validation.episodes", "2")
SIZES = ("--trainer.max_epochs", "1", "--data.init_args.num_epochs", "1", "--data.init_args.group_size", "2")
QUIET = ("--trainer.callbacks", "[{class_path: CollectionCheckpoint}]")
WANDB = ("--config", "configs/frozen_lake/sft.yaml", "--config", "configs/overlays/wandb.yaml",
         "--trainer.logger.project", "lakes", "--trainer.logger.entity", "ours", "--trainer.max_epochs=1",
         "--trainer.limit_val_batches=0", "--trainer.accelerator=cpu")  # fmt: skip
NEXT = "--- next command ---"
ONE_AFTER_THE_OTHER = f"""
import os, runpy, sys
for command in {{}}:
    os.environ.pop("LRL_RUN_DIRECTORY", None)
    sys.argv = ["lrl", *command]
    runpy.run_module("lrl", run_name="__main__")
    for stream in (sys.stdout, sys.stderr):
        print({NEXT!r}, file=stream, flush=True)
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Make two short runs in one new process.

    Returns:
        Their directories, the output of each, and whether the process opened a connection.
    """
    root = tmp_path_factory.mktemp("launched")
    runs = [root / f"run-of-mine-{number}" for number in range(2)]
    words = (*SHORT, *SIZES, *QUIET), WANDB
    commands = [["fit", *some, "--run_directory", str(run)] for some, run in zip(words, runs, strict=True)]
    with socket.create_server(("127.0.0.1", 0)) as network:
        proxy = "http://{}:{}".format(*network.getsockname())
        environment = {**os.environ, "WANDB_MODE": "offline", "HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "NO_PROXY": ""}
        environment.pop("WANDB_SILENT", None)
        program = [sys.executable, "-c", ONE_AFTER_THE_OTHER.format(commands)]
        result = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=300)
        network.settimeout(0)
        try:
            network.accept()[0].close()
        except BlockingIOError:
            called = False
        else:
            called = True
    assert result.returncode == 0, result.stderr
    out, err = (text.split(f"{NEXT}\n") for text in (result.stdout, result.stderr))
    assert len(out) == len(err) == 3
    said = [out[0] + err[0], "".join(out[1:] + err[1:])]
    return runs, said, called


@pytest.mark.distributed
def test_a_run_writes_its_records(launched):
    (folder, _), (said, _), called = launched
    assert not called
    assert {"config.yaml", "metrics.csv", "run.log", "commit.txt", "checkpoints"} <= set(os.listdir(folder))
    (events,) = folder.glob("events.out.tfevents.*")
    assert "GRPOModule" in (folder / "hparams.yaml").read_text() and b"GRPOModule" in events.read_bytes()
    for noise in ("Tip", "Warning", "deprecated", "litlogger", "GPU available"):
        assert noise not in said and noise not in (folder / "run.log").read_text()


@pytest.mark.distributed
def test_weights_and_biases_offline_writes_to_the_run_directory_without_a_connection(launched):
    (_, run), (_, said), called = launched
    assert not called and "wandb" not in said.lower()
    (written,) = run.glob("wandb/offline-run-*/run-*.wandb")
    record = written.read_bytes()
    assert all(text in record for text in (b"lakes", b"ours", b"run-of-mine", b"train/loss"))


@pytest.mark.distributed
@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_a_checkpoint_is_evaluated_and_its_results_are_printed(subcommand, launched, tmp_path):
    (folder, _), _, _ = launched
    command = [subcommand, *SHORT, "--ckpt_path", str(folder), "--run_directory", str(tmp_path / "run")]
    result = run_words(["python", "-m", "lrl", *command])
    assert result.returncode == 0, result.stderr
    assert all(word in result.stdout for word in ("FrozenLake-v1", "success", "2 episodes"))
    assert "before training" not in result.stderr
    assert (tmp_path / "run" / "predictions.json").exists() == (subcommand == "predict")


def test_options_are_prepared_for_the_command_that_is_named_and_without_one_for_all(monkeypatch):
    prepared, prepare = [], LRLCLI._prepare_subcommand_parser
    monkeypatch.setattr(
        LRLCLI, "_prepare_subcommand_parser", lambda *given, **kw: prepared.append(given[2]) or prepare(*given, **kw)
    )
    for words in (["validate", "--nonsense", "1"], ["--nonsense", "1"]):
        monkeypatch.setattr(sys, "argv", ["lrl", *words])
        with pytest.raises(ArgumentError):
            LRLCLI()
    assert prepared == ["validate", "fit", "validate", "test", "predict"]


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("--a=None", "--a=null"),
        ("--a=[{'b': None, 'c': 1e-05}]", "--a=[{'b': null, 'c': 1e-05}]"),
        ("--a={'b': [None], 1: '1e-5'}", "--a={'b': [null], 1: '1e-5'}"),
        ("--a=['None', \"None's\", None]", "--a=['None', \"None's\", null]"),
        ("--a={'later': None, 'earlier': 1}", "--a={'later': null, 'earlier': 1}"),
        *((text, text) for text in ("--a=(None)", "--a= None", "--a=None # x", "--a={{None}}", "--a=[None,]")),
        *((text, text) for text in ("--a=xNone", "--a='None'", "--a={None}", "--a=(None,)", "--None", "--a=")),
    ],
)
def test_none_of_parsed_values_is_null_and_texts_stay(word, read):
    assert none_as_null(word) == read
