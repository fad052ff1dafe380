"""Fit, validate, test and predict with every algorithm, from a checkpoint and without one."""

import pytest
from tiny_runs import demonstrations, grpo, make_trainer, ppo, rollout_data, save_tiny_model, sft, trpo

from lrl.data.run_data import ValidationConfig
from lrl.evaluation.episodes import EpisodeResults
from lrl.training.checkpoint import CollectionCheckpoint

LOGGED = {"fit": "val/return", "validate": "val/return", "test": "test/return", "predict": "predict/return"}
ALGORITHMS = {"sft": sft, "grpo": grpo, "ppo": ppo, "trpo": trpo}


def data_for(algorithm):
    if algorithm == "sft":
        data = demonstrations()
        data.validation = ValidationConfig(episodes=2)
        return data
    whole = {"num_epochs": 1, "num_minibatches": 1} if algorithm == "trpo" else {}
    return rollout_data("continuing" if algorithm in ("ppo", "trpo") else "prompts", **whole)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=ALGORITHMS)
def run(request, tiny, tmp_path_factory):
    """An algorithm with the checkpoint of its first collection."""
    root = tmp_path_factory.mktemp(request.param)
    trainer = make_trainer(root, CollectionCheckpoint(), max_epochs=1)
    trainer.fit(ALGORITHMS[request.param](tiny), datamodule=data_for(request.param))
    return lambda: ALGORITHMS[request.param](tiny), lambda: data_for(request.param), root


@pytest.mark.slow
@pytest.mark.parametrize("from_checkpoint", [False, True], ids=["fresh", "checkpoint"])
@pytest.mark.parametrize("subcommand", LOGGED)
def test_every_subcommand_runs_with_every_algorithm(run, subcommand, from_checkpoint, tmp_path):
    make_module, make_data, root = run
    epochs = 2 if from_checkpoint else 1
    trainer = make_trainer(tmp_path, CollectionCheckpoint(), max_epochs=epochs, limit_val_batches=1.0)
    checkpoint = str(root / "checkpoints" / "last.ckpt") if from_checkpoint else None
    given = getattr(trainer, subcommand)(make_module(), datamodule=make_data(), ckpt_path=checkpoint)
    assert LOGGED[subcommand] in {name for _, row in trainer.logger.rows for name in row}
    if subcommand == "predict":
        (results,) = given
        assert isinstance(results, EpisodeResults) and len(results) == 2
