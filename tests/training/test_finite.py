"""A loss that is not finite ends a run, gradients that are not skip a step, and the last checkpoint stays."""

import itertools

import lightning as L
import pytest
import torch
from tiny_runs import demonstrations, grpo, make_trainer, network, rollout_data, save_tiny_model, sft, trpo

from lrl.training.checkpoint import CollectionCheckpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def module_and_data(kind, folder, **changes):
    if kind == "sft":
        return sft(folder, **changes), demonstrations()
    if kind == "trpo":
        return trpo(folder, **changes), rollout_data("continuing", num_epochs=1, num_minibatches=1)
    if kind == "ppo":
        return network(folder, **changes), rollout_data("network")
    return grpo(folder, **changes), rollout_data("prompts")


class Spoil(L.Callback):
    """Callback that makes the loss or the gradients of given minibatches of the second collection infinite."""

    def __init__(self, what, minibatches=(1,)):
        self.what, self.minibatches = what, minibatches

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.now = trainer.current_epoch == 1 and batch_idx in self.minibatches
        if self.now and self.what == "loss":
            name = next(name for name in ("advantages", "old_logprobs") if getattr(batch, name).numel())
            getattr(batch, name)[0, 0] = float("nan")

    def on_after_backward(self, trainer, pl_module):
        if self.now and self.what == "gradients":
            next(weight for weight in pl_module.parameters() if weight.grad is not None).grad[0] = float("inf")


def fit(module, data, root, *callbacks, **changes):
    trainer = make_trainer(root, CollectionCheckpoint(1), *callbacks, **changes)
    trainer.fit(module, datamodule=data)
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "ppo", "trpo", "sft"])
def test_a_loss_that_is_not_finite_ends_the_run_and_the_last_checkpoint_stays(folder, tmp_path, kind):
    module, data = module_and_data(kind, folder)
    named = "surrogate .* in collection 2" if kind == "trpo" else "train/loss .* in minibatch 2 of collection 2"
    with pytest.raises(ValueError, match=named.replace(" .* ", r" .*is not finite ")):
        fit(module, data, tmp_path, Spoil("loss", (0,) if kind == "trpo" else (1,)))
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] == 1
    assert all(torch.isfinite(weight).all() for weight in module.parameters())


@pytest.mark.parametrize(("kind", "clip"), [("grpo", None), ("ppo", 0.5), ("sft", 1.0)])
def test_a_step_whose_gradients_are_not_finite_is_skipped_and_counted(folder, tmp_path, kind, clip):
    module, data = module_and_data(kind, folder, optimizer={"schedule": "constant"})
    before = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            before.append(torch.cat([weight.detach().flatten().clone() for weight in pl_module.parameters()]))

    trainer = fit(module, data, tmp_path, Spoil("gradients"), Watch(), gradient_clip_val=clip)
    each = trainer.num_training_batches
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(before)]
    assert moved == [index != each for index in range(len(moved))]
    assert [row["train/skipped_steps"] for _, row in trainer.logger.rows] == [0, 1, 0]


@pytest.mark.slow
def test_a_trust_region_step_whose_gradient_is_not_finite_is_skipped(folder, tmp_path, monkeypatch):
    module, data = module_and_data("trpo", folder)
    look = module._surrogate_and_gradient

    def spoilt(*args):
        start, gradient, old = look(*args)
        return start, gradient * float("nan") if module.current_epoch == 1 else gradient, old

    monkeypatch.setattr(module, "_surrogate_and_gradient", spoilt)
    trainer = fit(module, data, tmp_path)
    assert [row["train/skipped_steps"] for _, row in trainer.logger.rows] == [0, 1, 0]
    assert all(torch.isfinite(weight).all() for weight in module.parameters())


def test_too_many_skipped_steps_in_a_row_end_the_run(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("lrl.training.guards._MAX_SKIPPED", 2)
    module, data = module_and_data("ppo", folder)
    sentence = r"train/grad_norm .* in minibatch 4 of collection 2, after 2 skipped steps in a row"
    with pytest.raises(ValueError, match=sentence):
        fit(module, data, tmp_path, Spoil("gradients", (1, 2, 3)))
    module, data = module_and_data("ppo", folder)
    fit(module, data, tmp_path / "apart", Spoil("gradients", (0, 1, 3)))


def test_weights_that_are_not_finite_are_not_saved_over_good_ones(folder, tmp_path):
    class Break(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                next(pl_module.parameters()).data[0] = float("inf")

    module, data = module_and_data("ppo", folder)
    with pytest.raises(ValueError, match=r"weights are not finite in collection 2.*last.ckpt is unchanged"):
        fit(module, data, tmp_path, Break())
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(torch.isfinite(weight).all() for weight in saved["state_dict"].values())
