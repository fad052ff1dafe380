"""Tests of the base class of algorithms: initial weights, contents of checkpoints, and mismatches."""

from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from tiny_runs import demonstrations, grpo, make_trainer, network, rollout_data, save_tiny_model, sft, text_policy

from lrl.algorithms.grpo import GroupCreditConfig, GRPOModule, KLConfig
from lrl.algorithms.ppo import CriticConfig, PPOValueHeadModule
from lrl.algorithms.reinforce_pp import REINFORCEPlusPlusModule
from lrl.algorithms.trpo import TRPOModule
from lrl.lm.config import LoRAConfig
from lrl.lm.heads import ValueHeadConfig
from lrl.policies.mlp import MLPPolicy
from lrl.rollouts.examples import draw_examples
from lrl.training.checkpoint import CollectionCheckpoint
from lrl.training.guards import check_credit, check_loss
from lrl.training.optimizer import OptimizerConfig
from lrl.training.value_fit import ValueFit
from lrl.types import Credit, Evaluation, TokenLoss

LOSS = torch.ones(6, 2, requires_grad=True)
LORA = {"lora": LoRAConfig(r=2, alpha=4)}
WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tied(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tied", tie_word_embeddings=True, **WIDE)


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    """Checkpoints of short runs: the whole model, and adapters."""
    root = tmp_path_factory.mktemp("runs")
    for name, model in {"full": {}, "lora": LORA}.items():
        fit(grpo(folder, model=model), root / name)
    fit(sft(folder), root / "sft", data=demonstrations())
    return root


def fit(module, root, ckpt_path=None, data=None, max_epochs=1, **changes):
    trainer = make_trainer(root, CollectionCheckpoint(1), max_epochs=max_epochs, **changes)
    data = data or rollout_data("prompts")
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return trainer


def last(root):
    return root / "checkpoints" / "last.ckpt"


def saved(root):
    return torch.load(last(root), weights_only=True)


def started(module):
    """Return the module before the first collection."""
    module.policy.connect(rollout_data("prompts").codec)
    module.configure_model()
    return module


def test_few_shot_examples_come_from_the_training_environment(folder, tmp_path):
    module = grpo(folder)
    module.policy.prompt = replace(module.policy.prompt, num_examples=1)
    fit(module, tmp_path)
    (turn,) = module.policy.prompt.examples
    assert (turn,) == draw_examples(rollout_data("prompts").env, 1, "direct")


# -- init_from --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("source", ["full", "sft", "full/checkpoints/last.ckpt"])
def test_a_run_starts_from_the_weights_of_a_run_of_another_algorithm(folder, runs, source):
    module = started(grpo(folder, init_from=str(runs / source)))
    given = saved(runs / source.split("/")[0])["state_dict"]
    own = module.state_dict()
    assert sorted(own) == sorted(given) and all(torch.equal(own[name], tensor) for name, tensor in given.items())
    reference = module.policy.language_model.copied_reference[0].state_dict()
    assert all(torch.equal(reference[n.removeprefix("policy.language_model.model.")], t) for n, t in given.items())
    assert all(weight.requires_grad for weight in module.parameters())


def test_init_from_loads_only_weights(folder, runs, tmp_path):
    events = []
    module = grpo(folder, init_from=str(runs / "full"))
    module.on_train_start = lambda: events.append((len(module.optimizers().state), module.trainer.current_epoch))
    trainer = fit(module, tmp_path)
    assert events == [(0, 0)]
    assert trainer.logger.rows[0][1]["clock/env_steps"] == saved(runs / "full")["lrl"]["env_steps"] > 0


def test_adapters_start_from_adapters_and_the_reference_is_where_they_start(folder, runs):
    module = started(grpo(folder, model=LORA, init_from=str(runs / "lora")))
    given, own = saved(runs / "lora")["state_dict"], module.state_dict()
    assert sorted(own) == sorted(given) and all(torch.equal(own[name], tensor) for name, tensor in given.items())
    everything = dict(module.named_parameters())
    for name, tensor in given.items():
        assert torch.equal(everything[name.replace(".default.", ".reference.")], tensor)


@pytest.mark.slow
def test_a_whole_model_becomes_the_base_of_adapters_and_is_kept_with_them(folder, runs, tmp_path):
    settings = {"model": LORA, "init_from": str(runs / "full")}
    given = saved(runs / "full")["state_dict"]
    whole = fit(grpo(folder, **settings), tmp_path / "whole", max_epochs=2)
    kept = saved(tmp_path / "whole")["state_dict"]
    bases = {name.replace("base_model.model.", "").replace("base_layer.", ""): tensor for name, tensor in kept.items()}
    assert all(torch.equal(bases[name], tensor) for name, tensor in given.items())
    stopped = {"optimizer": {"schedule": "constant"}, **settings}
    fit(grpo(folder, **stopped), tmp_path / "again")
    resumed = fit(grpo(folder, **stopped), tmp_path / "again", ckpt_path=last(tmp_path / "again"), max_epochs=2)
    assert sorted(resumed.lightning_module.state_dict()) == sorted(whole.lightning_module.state_dict())


def test_a_folder_of_safetensors_gives_the_weights_of_a_model(folder, tmp_path):
    other = save_tiny_model(tmp_path / "other", initializer_range=0.1)
    module, wanted = started(grpo(folder, init_from=other)), started(grpo(other))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), wanted.parameters(), strict=True))
    named = started(grpo(folder))
    assert not all(torch.equal(a, b) for a, b in zip(module.parameters(), named.parameters(), strict=True))


@pytest.mark.parametrize("case", ["text", "tensors", "empty", "missing", "hub", "sharded"])
def test_sources_without_weights_raise_their_name(folder, tmp_path, monkeypatch, case):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "text").write_text("not a checkpoint")
    torch.save({"weights": torch.zeros(1)}, tmp_path / "tensors")
    (tmp_path / "empty").mkdir()
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / ".metadata").write_text("")
    source = "nobody/nothing" if case == "hub" else str(tmp_path / case)
    with pytest.raises(ValueError, match=f"model.init_from is '{source}'"):
        started(grpo(folder, init_from=source))


@pytest.mark.parametrize(
    ("architecture", "complaint"),
    [
        ({"num_hidden_layers": 3}, "lacks"),
        ({"num_hidden_layers": 1}, "lacks"),
        ({"intermediate_size": 16}, r"\(16, 16\)"),
    ],
)
def test_weights_of_another_shape_raise_their_name(folder, tmp_path, architecture, complaint):
    other = save_tiny_model(tmp_path / "other", **architecture)
    with pytest.raises(ValueError, match=f"model.init_from is '{other}'.*{complaint}"):
        started(grpo(folder, init_from=other))


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_a_checkpoint_of_adapters_contains_no_weights_of_a_tied_or_quantised_base(tied, tmp_path, quantization):
    trainer = fit(grpo(tied, model=LORA | {"quantization": quantization}), tmp_path)
    kept = saved(tmp_path)["state_dict"]
    assert kept and all("lora_" in name for name in kept)
    again = fit(
        grpo(tied, model=LORA | {"quantization": quantization}), tmp_path, ckpt_path=last(tmp_path), max_epochs=2
    )
    assert again.current_epoch == 2 and sorted(again.lightning_module.state_dict()) == sorted(kept)
    assert trainer.lightning_module.policy.fingerprint == again.lightning_module.policy.fingerprint


@pytest.mark.slow
def test_a_random_base_model_under_adapters_is_restored_from_its_seed(folder, tmp_path):
    model = LORA | {"random_init": True, "init_seed": 5}
    fit(grpo(folder, model=model), tmp_path)
    assert all("lora_" in name for name in saved(tmp_path)["state_dict"])
    fit(grpo(folder, model=model), tmp_path, ckpt_path=last(tmp_path), max_epochs=2)
    with pytest.raises(
        ValueError, match="the checkpoint is of a run with a language model with base weights .*; it must be the same"
    ):
        fit(grpo(folder, model=model | {"init_seed": 6}), tmp_path, ckpt_path=last(tmp_path), max_epochs=2)


def test_a_checkpoint_stores_the_fingerprint_of_the_base_and_the_env_steps(runs):
    notes = saved(runs / "full")["lrl"]
    assert len(notes["fingerprint"]) == 16 and notes["env_steps"] == 12 and not any(notes["meters"])


def test_other_initial_weights_raise_at_resume(folder, runs, tmp_path):
    fit(grpo(folder, init_from=str(runs / "full")), tmp_path)
    for source in (None, str(runs / "sft")):
        with pytest.raises(ValueError, match=f"model.init_from is {source!r}"):
            fit(grpo(folder, init_from=source), tmp_path, ckpt_path=last(tmp_path), max_epochs=2)


def test_another_base_model_raises_at_resume(folder, runs, tmp_path):
    other = save_tiny_model(tmp_path / "other", initializer_range=0.1)
    with pytest.raises(
        ValueError, match="the checkpoint is of a run with a language model with base weights .*; it must be the same"
    ):
        fit(grpo(other), tmp_path, ckpt_path=last(runs / "full"), max_epochs=2)


@pytest.mark.parametrize(
    ("edit", "complaint"), [("drop", "lacks weights of the policy"), ("add", "has weights that the policy lacks")]
)
def test_missing_and_unknown_weights_raise_their_names(folder, runs, tmp_path, edit, complaint):
    checkpoint = saved(runs / "lora")
    name = next(iter(checkpoint["state_dict"]))
    tensor = checkpoint["state_dict"].pop(name)
    if edit == "add":
        checkpoint["state_dict"] |= {name: tensor, f"{name}2": tensor}
    torch.save(checkpoint, tmp_path / "edited.ckpt")
    with pytest.raises(ValueError, match=complaint):
        fit(grpo(folder, model=LORA), tmp_path, ckpt_path=tmp_path / "edited.ckpt", max_epochs=2)


def test_strict_loading_cannot_be_switched_on(folder):
    with pytest.raises(ValueError, match="strict_loading"):
        grpo(folder).strict_loading = True


# -- settings ---------------------------------------------------------------------------------------------------------


def test_a_schedule_needs_to_know_the_end_of_the_run(folder, tmp_path):
    with pytest.raises(ValueError, match=r"model.optimizer.schedule is 'linear'.*max_epochs"):
        fit(grpo(folder, optimizer={"schedule": "linear"}), tmp_path, max_epochs=-1)


@pytest.mark.parametrize(("name", "value"), [("lr", 0.0), ("lr", -1.0), ("warmup", 1.0), ("warmup", -0.1)])
def test_invalid_settings_raise_their_name(folder, name, value):
    with pytest.raises(ValueError, match=f"model.optimizer.{name} is {value}"):
        grpo(folder, optimizer={name: value})


@pytest.mark.parametrize(
    ("size", "model", "complaint"), [(2, {}, "tensor_parallel_size is 2"), (1, {"quantization": "nf4"}, "FSDP2 cannot")]
)
def test_settings_that_cannot_be_sharded_raise_their_name(tied, size, model, complaint):
    module = grpo(tied, model=LORA | model)
    module._device_mesh = {"tensor_parallel": SimpleNamespace(size=lambda: size), "data_parallel": None}
    with pytest.raises(ValueError, match=complaint):
        started(module)


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_a_metric_is_the_mean_of_all_values_since_it_was_last_asked_for(folder):
    module = grpo(folder)
    module.record("train/loss", torch.tensor([1.0, 2.0]))
    module.record("train/loss", torch.tensor(6.0))
    module.record("train/nothing", torch.zeros(0))
    assert module.flush() == {"train/loss": 3.0}
    assert module.flush() == {}
    module.record("train/loss", torch.tensor(1.0))
    assert module.flush() == {"train/loss": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "sft", "ppo"])
def test_gradients_are_clipped_in_mixed_precision(folder, tmp_path, kind):
    """Lightning raises an error for this with a fused optimiser."""
    module = {
        "grpo": lambda: grpo(folder),
        "sft": lambda: sft(folder),
        "ppo": lambda: PPOValueHeadModule(text_policy(folder, value_head=ValueHeadConfig())),
    }[kind]()
    data = demonstrations() if kind == "sft" else rollout_data("prompts" if kind == "grpo" else "episodes")
    trainer = make_trainer(tmp_path, max_epochs=1, precision="bf16-mixed", gradient_clip_val=0.5)
    trainer.fit(module, datamodule=data)
    assert any("train/loss" in row for _, row in trainer.logger.rows)
    assert all(torch.isfinite(weight).all() for weight in module.parameters())


@pytest.mark.parametrize(
    ("before", "after", "rates"),
    [
        ({"lr": 1e-2, "schedule": "constant"}, {"lr": 1e-4, "schedule": "constant"}, [1e-4] * 4),
        ({"lr": 1e-2, "schedule": "constant"}, {"lr": 1e-3, "schedule": "linear"}, [5e-4, 3.75e-4, 2.5e-4, 1.25e-4]),
        ({"lr": 1e-2, "schedule": "linear"}, {"lr": 1e-3, "schedule": "linear"}, [5e-4, 3.75e-4, 2.5e-4, 1.25e-4]),
        ({"lr": 1e-2, "schedule": "linear"}, {"lr": 1e-3, "schedule": "constant"}, [1e-3] * 4),
        ({"lr": 1e-2, "schedule": "constant"}, {"lr": 1e-5, "schedule": "constant", "update_kl": 9.0}, [1e-5] * 4),
        (
            {"lr": 1e-2, "schedule": "constant", "update_kl": 9.0},
            {"lr": 1e-5, "schedule": "constant", "update_kl": 9.0},
            [1e-4] * 4,
        ),
        (
            {"lr": 1e-2, "schedule": "constant", "update_kl": 9.0},
            {"lr": 1e-2, "schedule": "constant", "update_kl": None},
            [1e-2] * 4,
        ),
    ],
)
def test_a_resumed_run_has_its_own_learning_rate_schedule_and_weight_decay(tmp_path, before, after, rates):
    """Two collections of four steps; the run is ended after the first, where a schedule is at its half or its end."""
    seen = []

    class Rates(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            seen.extend((group["lr"], group["weight_decay"]) for group in optimizer.param_groups)

    def run(optimizer, epochs, **options):
        trainer = make_trainer(tmp_path, CollectionCheckpoint(1), Rates(), max_epochs=epochs)
        trainer.fit(network(None, optimizer=optimizer), datamodule=rollout_data("network"), **options)

    run(before, 1)
    seen.clear()
    run(after | {"weight_decay": 0.3}, 2, ckpt_path=last(tmp_path), weights_only=True)
    assert [rate for rate, _ in seen] == pytest.approx(rates)
    assert {decay for _, decay in seen} == {0.3}


class Counting(torch.optim.AdamW):
    """An optimiser that keeps its state in the group, as Prodigy does."""

    def __init__(self, groups):
        super().__init__(groups, lr=1e-3)
        self.param_groups[0]["count"] = 0

    def step(self, closure=None):
        self.param_groups[0]["count"] += 1
        return super().step(closure)


def test_a_resumed_run_keeps_the_state_of_its_optimiser_and_schedules_of_other_kinds(tmp_path):
    class Cosine(PPOValueHeadModule):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)]

    def run(epochs, **options):
        module = Cosine(MLPPolicy((8,), init_seed=0), OptimizerConfig(factory=Counting))
        return fit(module, tmp_path, data=rollout_data("network"), max_epochs=epochs, **options).optimizers[0]

    run(1)
    resumed = run(2, ckpt_path=last(tmp_path)).param_groups[0]
    assert resumed["count"] == 8 and 0 < resumed["lr"] < 1e-3


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (TokenLoss(loss=LOSS[:, 0]), r"losses of shape \(6,\); it must be .* \(6, 2\)"),
        (TokenLoss(loss=LOSS.mean()), r"losses of shape \(\); it must be a tensor with the shape of batch"),
        (TokenLoss(loss=0.5), "losses that are a float; it must be a tensor"),
        (TokenLoss(loss=LOSS.detach()), "a loss without gradient; it must be computed"),
        (TokenLoss(loss=LOSS, metrics={"kl": 0.5}), "the metric kl, which is 0.5; it must be a tensor"),
        (LOSS, "a Tensor; it must return a TokenLoss"),
        (None, "None; it must return a TokenLoss"),
    ],
)
def test_what_loss_returns_is_checked(found, sentence):
    policy = Evaluation(logprobs=LOSS, entropy=LOSS)
    with pytest.raises(ValueError, match=rf"^GRPOModule.loss returned {sentence}"):
        check_loss(GRPOModule(MLPPolicy((8,))), found, torch.ones(6, 2, dtype=torch.bool), policy)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (LOSS, "a Tensor; it must return a Credit"),
        (Credit(advantages=LOSS[0]), r"advantages of shape \(2,\); it must be .* \(6, 2\)"),
        (Credit(advantages=None), "advantages that are None; it must be a tensor"),
        (Credit(advantages=LOSS, returns=LOSS[..., 0]), r"returns of shape \(6,\); it must"),
        (Credit(advantages=LOSS, metrics={"std": 1.0}), "the metric std, which is 1.0; it must be"),
    ],
)
def test_what_advantages_returns_is_checked(found, sentence):
    with pytest.raises(ValueError, match=rf"^GRPOModule.advantages returned {sentence}"):
        check_credit(GRPOModule(MLPPolicy((8,))), found, torch.ones(6, 2, dtype=torch.bool))


@pytest.mark.parametrize("method", ["loss", "advantages"])
def test_a_run_checks_what_an_algorithm_returns(method, tmp_path, monkeypatch):
    monkeypatch.setattr(PPOValueHeadModule, method, lambda *_: None)
    with pytest.raises(ValueError, match=f"^PPOValueHeadModule.{method} returned None; it must return a "):
        fit(PPOValueHeadModule(MLPPolicy((8,), init_seed=0)), tmp_path, data=rollout_data("network"))


def test_a_fitted_critic_is_not_exchanged_at_resume(tmp_path):
    def run(fitted, **options):
        module = PPOValueHeadModule(MLPPolicy((8,), init_seed=0), critic=CriticConfig(fit=fitted))
        fit(module, tmp_path, data=rollout_data("network"), **options)

    run(None)
    with pytest.raises(ValueError, match=r"^model.critic.fit is set, in the checkpoint it was null; resume with"):
        run(ValueFit(), ckpt_path=last(tmp_path), max_epochs=2)


def test_a_reference_of_other_initial_weights_raises_at_resume(tmp_path):
    def run(seed, epochs, coef=0.1, **options):
        torch.manual_seed(seed)
        module = GRPOModule(MLPPolicy((8,)), kl=KLConfig(coef=coef))
        fit(module, tmp_path, data=rollout_data("episodes", num_groups=2), max_epochs=epochs, **options)

    run(1, 1)
    run(1, 2, ckpt_path=last(tmp_path))
    with pytest.raises(ValueError, match=r"^model.policy has other initial weights than in the checkpoint"):
        run(2, 3, ckpt_path=last(tmp_path))
    run(2, 3, coef=0.0, ckpt_path=last(tmp_path))
    torch.manual_seed(2)
    module, data = GRPOModule(MLPPolicy((8,)), kl=KLConfig(coef=0.1)), rollout_data("episodes", num_groups=2)
    trainer = make_trainer(tmp_path, CollectionCheckpoint(1), limit_val_batches=1)
    trainer.validate(module, datamodule=data, ckpt_path=last(tmp_path), weights_only=True, verbose=False)


# -- data that does not fit the algorithm -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["grpo", "ppo", "trpo", "reinforce++"])
def test_an_algorithm_for_rollouts_rejects_demonstrations(folder, tmp_path, kind):
    policy = text_policy(folder, value_head=ValueHeadConfig(hidden_sizes=(8,)))
    modules = {
        "grpo": GRPOModule,
        "ppo": PPOValueHeadModule,
        "trpo": TRPOModule,
        "reinforce++": REINFORCEPlusPlusModule,
    }
    complaint = f"^data is a DemonstrationsDataModule; it must be a RolloutDataModule for {modules[kind].__name__}."
    with pytest.raises(ValueError, match=complaint):
        fit(modules[kind](policy), tmp_path, data=demonstrations())


@pytest.mark.parametrize("sizes", [{"group_size": 1}, {"num_groups": None, "num_envs": 4, "group_size": 1}])
def test_groups_of_one_episode_raise(tmp_path, sizes):
    for module in (GRPOModule(MLPPolicy((8,))), REINFORCEPlusPlusModule(MLPPolicy((8,)), group_baseline=True)):
        with pytest.raises(ValueError, match=r"^data.group_size is 1; it must be at least 2, with data.num_groups"):
            fit(module, tmp_path, data=rollout_data("episodes", **sizes))
    steps = GRPOModule(MLPPolicy((8,)), credit=GroupCreditConfig(kind="step"))
    for number, module in enumerate((REINFORCEPlusPlusModule(MLPPolicy((8,))), steps)):
        fit(module, tmp_path / str(number), data=rollout_data("episodes", **sizes))


# -- trainer.limit_train_batches --------------------------------------------------------------------------------------


def test_a_limited_collection_counts_as_trained_and_ends_the_schedule(tmp_path):
    data = rollout_data("network", max_env_steps=144, num_minibatches=4)
    trainer = fit(network(None), tmp_path, data=data, max_epochs=9, limit_train_batches=3)
    assert trainer.global_step == 9 and trainer.optimizers[0].param_groups[0]["lr"] == 0
    assert "batches" not in saved(tmp_path)["RolloutDataModule"]
