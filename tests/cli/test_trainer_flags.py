"""Flags of the trainer and stock callbacks have their usual effect on a run, or raise an error of one sentence.

A few run in every test; the others are a sweep. The runs have two collections of a network with four hidden units.
"""

import logging
import re

import pytest
import torch
import yaml
from commands import run_words
from tiny_runs import demonstrations, make_trainer, save_tiny_model, sft

NETWORK = "--model.init_args.policy.init_args.hidden_sizes=[4]"
SIZES = {"num_envs": 2, "num_steps": 8, "validation.episodes": 2}
TRAINER = ("--trainer.accelerator=cpu", "--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=1")
STEPS = 8
"""Optimiser steps of a whole run of PPO: two collections, two passes, two minibatches."""


def words_of(algorithm):
    sizes = SIZES | ({"num_epochs": 2, "num_minibatches": 2} if algorithm == "ppo" else {})
    data = [f"--data.init_args.{name}={value}" for name, value in sizes.items()]
    return ["--config", f"configs/cartpole/{algorithm}_mlp.yaml", *TRAINER, NETWORK, *data]


def fit(folder, *words, algorithm="ppo"):
    """Output of a command, and its run directory."""
    command = ["python", "-m", "lrl", "fit", *words_of(algorithm), "--run_directory", str(folder / "run"), *words]
    return run_words(command), folder / "run"


def flag(name, value):
    return [f"--trainer.{name}", str(value)]


def callback(name, **settings):
    given = (word for key, value in settings.items() for word in (f"--trainer.callbacks.{key}", str(value)))
    return ["--trainer.callbacks+", name, *given]


# -- what can be seen of a run in its directory ------------------------------------------------------------------------


def steps(run, name="last.ckpt"):
    return torch.load(run / "checkpoints" / name, weights_only=True)["global_step"]


def header(run):
    return (run / "metrics.csv").read_text().splitlines()[0].split(",")


def rows(run):
    """Number of logged collections."""
    lines = (run / "metrics.csv").read_text().splitlines()
    place = lines[0].split(",").index("train/entropy")
    return sum(bool(line.split(",")[place]) for line in lines[1:])


def saved(run):
    """Names of checkpoints."""
    return sorted(file.name for file in (run / "checkpoints").glob("*"))


def report(run):
    return (run / "fit-profile.txt").read_text()


def config(run):
    return yaml.safe_load((run / "config.yaml").read_text())["trainer"]


def trained(run, algorithm="ppo"):
    """Return whether the run was complete."""
    return rows(run) == 2 and steps(run) == {"ppo": STEPS, "trpo": 2}[algorithm]


def log(run):
    return (run / "run.log").read_text()


REPLACED = "trainer.callbacks: CollectionCheckpoint replaces an earlier one; monitor is val/return instead of null.\n"
ALL = [f"epoch={epoch}-step={4 * (epoch + 1)}.ckpt" for epoch in range(2)]
WORKS = {
    "fast_dev_run": (flag("fast_dev_run", True), lambda run: not {"checkpoints", "metrics.csv"} & names(run)),
    "profiler": (flag("profiler", "simple"), lambda run: "FIT Profiler Report" in report(run)),
    "accumulate": (flag("accumulate_grad_batches", 2), lambda run: steps(run) == STEPS // 2),
    "EarlyStopping": (
        [*callback("EarlyStopping", monitor="rollout/response_tokens", mode="max", stopping_threshold=0.5),
         *flag("check_val_every_n_epoch", 2)],
        lambda run: rows(run) == 1,
    ),
    "Timer": (callback("Timer", duration="00:01:00:00"), lambda run: timer_of(run)["interval"] == "step"),
    "a list in place of the default callbacks": (
        ["--trainer.callbacks=[ModelCheckpoint]"],
        lambda run: rows(run) == 2 and saved(run) == ALL[1:] and "transcripts.txt" not in names(run),
    ),
    "a callback in place of the default one of its class": (
        callback("CollectionCheckpoint", monitor="val/return"),
        lambda run: trained(run) and saved(run) == ["best.ckpt", "last.ckpt"] and REPLACED in log(run),
    ),
    "a single logger": (
        [*flag("logger", "CSVLogger"), *flag("logger.save_dir", "elsewhere")],
        lambda run: trained(run) and not (run.parent / "elsewhere").exists(),
    ),
}  # fmt: skip
SWEEP = {
    "plain": ([], trained),
    "a figure of a collection that max_steps ends": (
        [*flag("max_steps", 3), *flag("check_val_every_n_epoch", 2),
         *callback("EarlyStopping", monitor="train/update_kl")],
        lambda run: rows(run) == 1 and steps(run) == 3,
    ),
    "a duration with days": (
        callback("ModelCheckpoint", train_time_interval="01:00:00:30"),
        lambda run: saved(run) == ["last.ckpt"] and interval_of(run) == "1 day, 0:00:30",
    ),
    "fast_dev_run of two": (flag("fast_dev_run", 2), lambda run: not {"checkpoints", "metrics.csv"} & names(run)),
    "max_steps": (flag("max_steps", 3), lambda run: steps(run) == 3),
    "max_time": (
        [*flag("max_time", "00:00:00:01"), *flag("max_epochs", -1), "--model.init_args.optimizer.schedule=constant"],
        lambda run: steps(run) > STEPS,
    ),
    "limit_train_batches": (flag("limit_train_batches", 1), lambda run: steps(run) == 2),
    "a share of limit_train_batches": (flag("limit_train_batches", 0.5), lambda run: steps(run) == STEPS // 2),
    "limit_val_batches": (flag("limit_val_batches", 0), lambda run: trained(run) and "val/return" not in header(run)),
    "val_check_interval": (flag("val_check_interval", 0.5), trained),
    "num_sanity_val_steps": (flag("num_sanity_val_steps", 1), trained),
    "min_epochs": (flag("min_epochs", 2), trained),
    "gradient_clip_val": (flag("gradient_clip_val", 0.1), trained),
    "gradient_clip_algorithm": ([*flag("gradient_clip_val", 0.1), *flag("gradient_clip_algorithm", "value")], trained),
    "detect_anomaly": (flag("detect_anomaly", True), trained),
    "deterministic": (flag("deterministic", True), trained),
    "inference_mode": (flag("inference_mode", False), trained),
    "use_distributed_sampler": (flag("use_distributed_sampler", True), trained),
    "reload_dataloaders": (flag("reload_dataloaders_every_n_epochs", 1), trained),
    "precision": (flag("precision", "bf16-mixed"), trained),
    "profiler advanced": (flag("profiler", "advanced"), lambda run: "cumtime" in report(run)),
    "enable_checkpointing": (
        flag("enable_checkpointing", False),
        lambda run: rows(run) == 2 and "checkpoints" not in names(run),
    ),
    "no logger": (flag("logger", False), lambda run: steps(run) == STEPS and "metrics.csv" not in names(run)),
    "the default logger": (flag("logger", True), lambda run: steps(run) == STEPS and "lightning_logs" in names(run)),
    "a single TensorBoardLogger": (
        [*flag("logger", "TensorBoardLogger"), *flag("logger.save_dir", "elsewhere")],
        lambda run: any(name.startswith("events.out") for name in names(run)),
    ),
    "a single WandbLogger": (
        [*flag("logger", "WandbLogger"), *flag("logger.offline", True)],
        lambda run: len(list(run.glob("wandb/offline-run-*/run-*.wandb"))) == 1 and "config.yaml" in names(run),
    ),
    "ModelCheckpoint": (callback("ModelCheckpoint", save_top_k=-1), lambda run: saved(run) == [*ALL, "last.ckpt"]),
    "ModelCheckpoint with a monitor": (
        callback("ModelCheckpoint", monitor="val/return", mode="max"),
        lambda run: len(set(saved(run)) & set(ALL)) == 1,
    ),
    "ModelCheckpoint on training": (
        [*callback("ModelCheckpoint", monitor="train/entropy", save_top_k=-1), *flag("check_val_every_n_epoch", 2)],
        lambda run: saved(run) == [*ALL, "last.ckpt"],
    ),
    "ModelCheckpoint by steps": (
        callback("ModelCheckpoint", every_n_train_steps=2, save_top_k=-1),
        lambda run: {"epoch=0-step=2.ckpt", "epoch=1-step=6.ckpt"} < set(saved(run)),
    ),
    "OnExceptionCheckpoint": (callback("OnExceptionCheckpoint", dirpath="never"), trained),
    "EarlyStopping on validation": (
        callback("EarlyStopping", monitor="val/length", mode="max", stopping_threshold=0.5),
        lambda run: rows(run) == 1 and steps(run) == STEPS // 2,
    ),
    "LearningRateMonitor": (
        [*callback("LearningRateMonitor"), *flag("log_every_n_steps", 1)],
        lambda run: trained(run) and "lr-AdamW" in header(run),
    ),
    "GradientAccumulationScheduler": (
        callback("GradientAccumulationScheduler", scheduling="{0: 1, 1: 2}"),
        lambda run: steps(run) == STEPS // 2 + STEPS // 4,
    ),
    "DeviceStatsMonitor": (callback("DeviceStatsMonitor", cpu_stats=True), trained),
    "Timer by epoch": (
        callback("Timer", duration="00:01:00:00", interval="epoch"), lambda run: timer_of(run)["interval"] == "epoch"
    ),
    "RichProgressBar": ([*callback("RichProgressBar"), *flag("enable_progress_bar", True)], trained),
    "LambdaCallback": (callback("LambdaCallback"), trained),
}  # fmt: skip
REFUSED = {
    "EMAWeightAveraging": (
        callback("EMAWeightAveraging"),
        "trainer.callbacks has EMAWeightAveraging; it must be removed, it reads the weights before they are loaded.",
    ),
    "overfit_batches": (
        flag("overfit_batches", 1),
        "trainer.overfit_batches is 1; it must be 0, because every collection has new data: "
        "trainer.limit_train_batches limits the minibatches of a collection.",
    ),
    "default_root_dir": (
        flag("default_root_dir", "here"),
        "trainer.default_root_dir is 'here'; it must be null, because run_directory determines where a run is written.",
    ),
    "EarlyStopping on nothing": (
        callback("EarlyStopping", monitor="nothing"),
        "trainer.callbacks: Early stopping conditioned on metric `nothing` which is not available.",
    ),
}
REFUSED_SWEEP = {
    "StochasticWeightAveraging": (
        callback("StochasticWeightAveraging", swa_lrs=1e-3),
        "trainer.callbacks has StochasticWeightAveraging; it must be removed, it reads the weights before they are "
        "loaded.",
    ),
    "LearningRateFinder": (
        callback("LearningRateFinder"),
        "trainer.callbacks has LearningRateFinder; it must be removed, model.optimizer sets the learning rate, "
        "data the size of a minibatch.",
    ),
    "BatchSizeFinder": (
        callback("BatchSizeFinder"),
        "trainer.callbacks has BatchSizeFinder; it must be removed, model.optimizer sets the learning rate, "
        "data the size of a minibatch.",
    ),
    "BackboneFinetuning": (
        callback("BackboneFinetuning"),
        "trainer.callbacks has BackboneFinetuning; it must be removed, it reads the weights before they are loaded.",
    ),
    "AsyncCheckpointIO": (
        flag("plugins", "AsyncCheckpointIO"),
        "trainer.plugins has AsyncCheckpointIO; it must be removed, checkpoints are moved to their place when "
        "complete.",
    ),
    "barebones": (
        flag("barebones", True),
        "trainer.barebones is true; it must be false, because runs of lrl log and keep checkpoints.",
    ),
    "limit_val_batches": (
        flag("limit_val_batches", 0.5),
        "trainer.limit_val_batches is 0.5; it must be 0 or 1, because held-out episodes are one batch: "
        "data.validation.episodes sets its size.",
    ),
    **{
        name: (flag(name, 0), f"trainer.{name} is 0; it must not be 0, because nothing would be trained.")
        for name in ("limit_train_batches", "max_epochs", "max_steps")
    },
    "SpikeDetection": (
        [*callback("SpikeDetection", warmup=1, finite_only=True), "--model.init_args.vf_coef=0"],
        "trainer.callbacks: Training spike detected in batch ",
    ),
    "the same callback twice": (
        callback("EarlyStopping", monitor="val/return") * 2,
        "trainer.callbacks has EarlyStopping twice with the same state, such as the same monitor; one of them must be "
        "removed.",
    ),
    "a duration in words": (
        callback("ModelCheckpoint", train_time_interval="an hour"),
        "trainer.callbacks.train_time_interval: Not of type timedelta: a duration must be written as DD:HH:MM:SS or "
        "HH:MM:SS, not as 'an hour'.",
    ),
    "endless": (
        [*flag("max_epochs", -1), *flag("max_time", "00:00:00:01"), "--data.max_env_steps", "null"],
        "model.optimizer.schedule is 'linear'; it needs trainer.max_epochs, trainer.max_steps, or ",
    ),
    "TQDMProgressBar": (
        callback("TQDMProgressBar"),
        "Trainer was configured with `enable_progress_bar=False` but found `TQDMProgressBar` in callbacks list.",
    ),
    "ModelCheckpoint on nothing": (
        callback("ModelCheckpoint", monitor="nothing"),
        "trainer.callbacks: `ModelCheckpoint(monitor='nothing')` could not find the monitored key in the returned ",
    ),
    "CometLogger": (flag("logger", "CometLogger"), "Requirement 'comet-ml>=3.44.4' not met."),
}


def names(run):
    return {file.name for file in run.iterdir()}


def timer_of(run):
    (timer,) = [part for part in config(run)["callbacks"] if part["class_path"].endswith("Timer")]
    return timer["init_args"]


def interval_of(run):
    (kept,) = [part for part in config(run)["callbacks"] if part["class_path"].endswith("ModelCheckpoint")]
    return kept["init_args"]["train_time_interval"]


def cases(always, sweep):
    swept = [pytest.param(*case, id=name, marks=pytest.mark.reference) for name, case in sweep.items()]
    return [*(pytest.param(*case, id=name) for name, case in always.items()), *swept]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "has_its_effect"), cases(WORKS, SWEEP))
def test_a_flag_or_callback_has_its_usual_effect(words, has_its_effect, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    done, run = fit(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert has_its_effect(run)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "sentence"), cases(REFUSED, REFUSED_SWEEP))
def test_a_flag_that_cannot_have_its_effect_raises_one_sentence(words, sentence, tmp_path):
    done, _ = fit(tmp_path, *words)
    *_, last = done.stderr.splitlines()
    assert done.returncode == 2 and last.startswith(f"lrl: {sentence}") and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("devices", "{}", "auto, -1, a positive number, or a list of indices"),
        ("devices", "abc", "auto, -1, a positive number, or a list of indices"),
        ("devices", "0", "auto, -1, a positive number, or a list of indices"),
        ("devices", "999999999", "auto, -1, a positive number, or a list of indices"),
        ("devices", "-1", "auto or a positive number, because the run uses the CPU"),
        ("gradient_clip_val", "-1", "0 or positive, or null"),
        ("check_val_every_n_epoch", "0", "at least 1, or null"),
    ],
)
def test_a_number_that_lightning_does_not_check_is_named_in_a_sentence(name, value, right, tmp_path):
    done, _ = fit(tmp_path, *flag(name, value))
    assert done.returncode == 2
    assert re.fullmatch(f"lrl: trainer.{name} is .*; it must be {right}\\.", done.stderr.splitlines()[-1]), done.stderr


@pytest.mark.parametrize(("command", "limit"), [("validate", "val"), ("test", "test"), ("predict", "predict")])
def test_an_evaluation_of_nothing_raises(command, limit, tmp_path):
    flags = flag(f"limit_{limit}_batches", 0)
    words = ["python", "-m", "lrl", command, *words_of("ppo"), "--run_directory", str(tmp_path / "run"), *flags]
    done = run_words(words)
    sentence = f"trainer.limit_{limit}_batches is 0; it must not be 0, because nothing would be evaluated."
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == f"lrl: {sentence}"


@pytest.mark.slow
def test_a_search_in_16_bits_raises(tmp_path):
    words = ["--config", "configs/cartpole/props.yaml", *TRAINER, *flag("precision", "bf16-true")]
    done = run_words(["python", "-m", "lrl", "fit", *words, "--run_directory", str(tmp_path / "run")])
    assert done.returncode == 2 and "lrl: trainer.precision is bf16-true, which would round" in done.stderr


@pytest.mark.slow
def test_model_checkpoint_saves_under_manual_optimisation(tmp_path):
    """Lightning saves nothing while its count of optimiser steps is 0."""
    done, run = fit(tmp_path, *callback("ModelCheckpoint", save_top_k=-1), algorithm="trpo")
    assert done.returncode == 0 and trained(run, "trpo")
    assert saved(run) == ["epoch=0-step=1.ckpt", "epoch=1-step=2.ckpt", "last.ckpt"]


@pytest.mark.reference
@pytest.mark.parametrize("algorithm", ["ppo", "trpo"])
def test_a_run_resumes_from_a_file_of_model_checkpoint(algorithm, tmp_path):
    kept = callback("ModelCheckpoint", save_top_k=-1)
    done, run = fit(tmp_path, *kept, algorithm=algorithm)
    first = next((run / "checkpoints").glob("epoch=0-*"))
    resumed, again = fit(tmp_path / "again", *kept, "--ckpt_path", str(first), algorithm=algorithm)
    assert done.returncode == resumed.returncode == 0, resumed.stderr
    weights = [torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True) for folder in (run, again)]
    assert all(torch.equal(weights[0]["state_dict"][name], value) for name, value in weights[1]["state_dict"].items())


@pytest.mark.reference
@pytest.mark.parametrize(
    "words",
    [
        flag("accumulate_grad_batches", 2),
        flag("gradient_clip_val", 0.5),
        flag("max_steps", 1),
        callback("GradientAccumulationScheduler", scheduling="{0: 1, 1: 2}"),
        callback("StochasticWeightAveraging", swa_lrs=1e-3),
    ],
    ids=lambda words: words[-2] if len(words) == 2 else words[1],
)
def test_settings_of_automatic_optimisation_raise_under_manual_optimisation(words, tmp_path):
    done, _ = fit(tmp_path, *words, algorithm="trpo")
    assert done.returncode == 2 and "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 2


@pytest.mark.reference
@pytest.mark.parametrize("words", [flag("enable_model_summary", True), callback("ModelSummary", max_depth=2)])
def test_a_model_summary_is_printed(words, tmp_path):
    printed, handler = [], logging.Handler()
    handler.emit = lambda record: printed.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch.callbacks.model_summary")
    logger.addHandler(handler)
    done, _ = fit(tmp_path, *words)
    logger.removeHandler(handler)
    assert "MLPPolicy" in "".join([done.stdout, *printed])


@pytest.mark.slow
def test_overfitting_trains_on_the_same_demonstrations_in_every_pass(tmp_path):
    seen = []
    module = sft(save_tiny_model(tmp_path / "tiny"))
    step = module.step
    module.step = lambda batch: seen.append(batch.inputs["prompt_ids"]) or step(batch)
    make_trainer(tmp_path, max_epochs=3, overfit_batches=1).fit(module, datamodule=demonstrations())
    assert len(seen) == 3 and torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
