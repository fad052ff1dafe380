"""Tests of PPO on a network, a scoring and a writing language model."""

import math
import signal
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from commands import run_words
from lightning.pytorch.strategies import ModelParallelStrategy
from tiny_runs import (
    demonstrations,
    from_settings,
    make_trainer,
    merged,
    ppo,
    rollout_data,
    save_tiny_model,
    text_policy,
)

from lrl.algorithms import ppo as ppo_file
from lrl.algorithms.ppo import AdaptiveKLConfig, CriticConfig, PPOValueHeadModule
from lrl.algorithms.sft import SFTModule
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.data.run_data import ValidationConfig
from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.episodes import evaluate_policy
from lrl.evaluation.load import load_policy
from lrl.functional.advantages import CreditConfig
from lrl.functional.losses import value_loss
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.heads import ValueHeadConfig
from lrl.policies.mlp import MLPPolicy
from lrl.policies.policy import Policy
from lrl.policies.scoring import ScoringPolicy
from lrl.prompts import PromptTemplate
from lrl.training.checkpoint import CollectionCheckpoint
from lrl.training.collect import CollectionPlan, EpisodeCollector
from lrl.training.optimizer import OptimizerConfig
from lrl.training.value_fit import ValueFit
from lrl.training.weights import initial_weights, take_weights
from lrl.types import Evaluation, SamplingConfig, TurnBatch

LAKE = GymnasiumEnvs("FrozenLake-v1", max_episode_steps=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def policy_of(kind, folder):
    """Return a policy with a critic, connected to FrozenLake."""
    if kind == "mlp":
        policy = MLPPolicy(hidden_sizes=(8,), init_seed=0)
        policy.connect_spaces(*LAKE.spaces)
    elif kind == "text":
        policy = text_policy(folder, value_head=ValueHeadConfig(init_seed=0))
    else:
        prompt = PromptTemplate(response_format="direct", system="")
        policy = ScoringPolicy(LanguageModelConfig(name=folder), prompt, value_head=ValueHeadConfig(init_seed=0))
    policy.connect(LAKE.codec)
    policy.configure()
    return policy


def rollout_of(policy, groups=6):
    envs = LAKE.make(groups, policy.response_format)
    rollout = EpisodeCollector(policy, envs).collect(
        CollectionPlan(seed=0, collection=0, num_groups=groups, group_size=1)
    )
    envs.close()
    return rollout


@pytest.mark.parametrize("kind", ["mlp", "text", "scoring"])
@pytest.mark.parametrize("credit", ["turn", "token", "nested", "bandit"])
def test_the_first_ratio_is_one_and_the_values_are_those_that_were_credited(folder, kind, credit):
    policy = policy_of(kind, folder)
    module = PPOValueHeadModule(policy, credit=CreditConfig(kind=credit, normalise=False))
    batch = module.prepare(rollout_of(policy))
    evaluation = policy.evaluate(batch)
    mask = batch.response_mask
    ratio = (evaluation.logprobs - batch.old_logprobs).exp()[mask]
    assert (ratio - 1).abs().max() < 1e-5
    torch.testing.assert_close(evaluation.values[mask], batch.old_values[mask], atol=1e-5, rtol=1e-5)
    for tensor in (batch.advantages, batch.returns):
        assert tensor.shape == mask.shape and not tensor[~mask].any()
    assert batch.advantages[mask].any()


@pytest.mark.parametrize("kind", ["mlp", "text", "scoring"])
def test_the_value_of_a_state_is_that_before_its_first_token(folder, kind):
    policy = policy_of(kind, folder)
    rollout = rollout_of(policy)
    first = policy.evaluate(rollout.turns()).values[:, 0]
    if kind == "mlp":
        seen = list(rollout.inputs["observation"][rollout.active].argmax(-1).numpy())
    else:
        seen = [text for row, active in zip(rollout.observations, rollout.active) for text in row if text]
    torch.testing.assert_close(policy.state_values(seen, [()] * len(seen)), first.detach(), atol=1e-5, rtol=1e-5)


def test_a_truncated_episode_is_bootstrapped_with_the_value_of_its_last_state(folder):
    policy = policy_of("mlp", folder)
    rollout = rollout_of(policy, groups=16)
    cut = rollout.truncated & ~rollout.terminated
    assert cut.any() and not rollout.final_values[~cut].any() and rollout.final_values[cut].abs().min() > 0


@Policy.register
class Two(torch.nn.Module):
    """Stub that returns the tensors of a test."""

    has_critic, response_format, sampling = True, None, SamplingConfig()
    needs_distribution = True  # of all turns in one pass

    def __init__(self, logprobs, entropy, values):
        super().__init__()
        self.given = Evaluation(logprobs=logprobs, entropy=entropy, values=values)

    def evaluate(self, batch, dropout_seed=None):
        return self.given


def test_the_loss_equals_its_formula():
    """Two turns of three tokens, the last of which is padding in the second."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(2, 3, generator=generator, dtype=torch.float64)  # noqa: E731
    logprobs, old, values, old_values, returns, advantages = (draw() * 0.3 for _ in range(6))
    entropy, mask = draw().abs(), torch.tensor([[True, True, True], [True, True, False]])
    batch = TurnBatch(
        inputs={}, response_mask=mask, old_logprobs=old, advantages=advantages, returns=returns, old_values=old_values
    )
    module = PPOValueHeadModule(
        Two(logprobs, entropy, values),
        clip_range=0.1,
        clip_range_vf=0.05,
        kl=AdaptiveKLConfig(old_coef=0.7),
        ent_coef=0.02,
        vf_coef=0.4,
    )
    total = 0.0
    for turn, token in mask.nonzero().tolist():
        ratio = math.exp(logprobs[turn, token] - old[turn, token])
        advantage = float(advantages[turn, token])
        total -= min(ratio * advantage, min(max(ratio, 0.9), 1.1) * advantage) + 0.02 * float(entropy[turn, token])
        total -= 0.7 * math.log(ratio)
        value, before, target = (float(t[turn, token]) for t in (values, old_values, returns))
        moved = before + min(max(value - before, -0.05), 0.05)
        total += 0.4 * 0.5 * max((value - target) ** 2, (moved - target) ** 2)
    assert float(module.training_step(batch)) == pytest.approx(total / 5)
    told, moves = module.flush(), (logprobs - old)[mask].exp() - 1
    assert told["train/entropy"] == pytest.approx(float(entropy[mask].mean()))
    assert told["train/approx_kl"] == pytest.approx(float((moves - (moves + 1).log()).mean()))
    assert told["train/clip_fraction"] == pytest.approx(sum(abs(float(move)) > 0.1 for move in moves) / 5)
    assert told["train/ratio_error"] == pytest.approx(max(abs(float(move)) for move in moves))


def test_the_penalty_includes_probability_of_tokens_that_were_not_sampled():
    """Two choices were sampled in proportion to their probabilities; the third has 0.25 in the new policy."""
    old, logits = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.0, -0.4], requires_grad=True)
    zeros = torch.zeros(2, 1)
    batch = TurnBatch(
        inputs={},
        response_mask=torch.ones(2, 1, dtype=torch.bool),
        old_logprobs=old[:2, None].log(),
        advantages=zeros,
        returns=zeros,
        old_values=zeros,
    )
    new = torch.log_softmax(logits, 0)
    module = PPOValueHeadModule(Two(new[:2, None], zeros, zeros), clip_range=None, kl=AdaptiveKLConfig(old_coef=1.0))
    kl = torch.nn.functional.kl_div(new, old, reduction="sum")
    loss = module.training_step(batch)
    torch.testing.assert_close(loss, kl)
    ours, theirs = (torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (loss, kl))
    torch.testing.assert_close(ours, theirs)
    assert theirs[2] > 0.2


def test_the_value_loss_without_a_range_is_half_the_squared_error():
    values, returns = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]])
    assert value_loss(values, returns, None, None).tolist() == [[0.5, 2.0]]


def test_the_kl_penalty_is_per_token_and_its_weight_follows_the_target(folder):
    module = ppo(folder, credit={"normalise": False})
    policy = module.policy
    policy.connect(LAKE.codec)
    module.configure_model()
    rollout = rollout_of(policy)
    with torch.no_grad():
        for parameter in policy.language_model.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    moved = rollout_of(policy)
    batch = module.prepare(moved)
    kl = (batch.old_logprobs - batch.ref_logprobs) * batch.response_mask
    assert kl.abs().max() > 0.01
    paid = moved.replace(ref_logprobs=moved.unflatten(batch.ref_logprobs), values=moved.unflatten(batch.old_values))
    penalty = moved.unflatten(-0.1 * kl)  # a token costs what it became likelier by
    expected = module.credit.estimate(paid, penalty).advantages
    torch.testing.assert_close(module.advantages(paid).advantages, expected)
    assert not torch.equal(expected, module.credit.estimate(paid).advantages)
    error = (kl.sum(-1).mean() / 0.01 - 1).clamp(-0.2, 0.2)
    assert module.kl_coef == 0.1
    assert module._next_kl_coef == pytest.approx(0.1 * math.exp(float(error) * len(batch) / 10_000))
    free = ppo(folder, credit={"normalise": False}, kl={"coef": 0.0, "target": None})
    free.policy.connect(LAKE.codec)
    free.policy = policy
    difference = batch.returns - free.prepare(moved).returns
    assert difference[kl.abs() > 1e-3].abs().min() > 0
    assert module.prepare(rollout).ref_logprobs.shape == rollout.turns().old_logprobs.shape


def test_normalised_advantages_have_mean_0_and_deviation_1_over_what_was_sampled(folder):
    batch = PPOValueHeadModule(policy_of("text", folder)).prepare(rollout_of(policy_of("text", folder), groups=12))
    picked = batch.advantages[batch.response_mask]
    assert abs(float(picked.mean())) < 1e-5 and float(picked.std()) == pytest.approx(1, abs=1e-4)


def chain_data(**changes):
    """Return FrozenLake without slipping on two rows of two cells; the optimal actions are right, then down."""
    lake = GymnasiumEnvs("FrozenLake-v1", {"desc": ["SF", "HG"], "is_slippery": False}, max_episode_steps=6)
    sizes = {"num_envs": 8, "num_steps": 16, "num_epochs": 4, "num_minibatches": 2}
    sizes["validation"] = {"episodes": 8, "num_envs": 8}
    return from_settings(RolloutDataModule, lake, **merged(sizes, changes))


def reward_of(module, data, root, epochs=25):
    trainer = make_trainer(root, max_epochs=epochs, limit_val_batches=1, check_val_every_n_epoch=epochs)
    trainer.fit(module, datamodule=data)
    (found,) = [row["val/return"] for _, row in trainer.logger.rows if "val/return" in row]
    return found


@pytest.mark.learning
@pytest.mark.parametrize("credit", ["turn", "token", "nested"])
def test_a_network_solves_a_lake_of_four_cells(tmp_path, credit):
    module = PPOValueHeadModule(
        MLPPolicy((16,), init_seed=0), optimizer=OptimizerConfig(lr=1e-2), credit=CreditConfig(kind=credit)
    )
    assert reward_of(module, chain_data(), tmp_path) == 1


@pytest.mark.learning
def test_with_a_flipped_sign_the_network_does_not_learn(tmp_path):
    class Flipped(PPOValueHeadModule):
        def advantages(self, rollout):
            credit = super().advantages(rollout)
            return replace(credit, advantages=-credit.advantages)

    module = Flipped(MLPPolicy((16,), init_seed=0), optimizer=OptimizerConfig(lr=1e-2))
    assert reward_of(module, chain_data(), tmp_path, epochs=8) == 0


def test_a_critic_without_weights_of_its_own_cannot_be_fitted(tmp_path, monkeypatch):
    monkeypatch.setattr(MLPPolicy, "critic_parameters", lambda policy: [])
    module = PPOValueHeadModule(MLPPolicy((16,)), critic=CriticConfig(fit=ValueFit()))
    with pytest.raises(ValueError, match="whose critic has no weights of its own"):
        reward_of(module, chain_data(), tmp_path, epochs=1)


def test_weight_decay_does_not_change_a_fitted_critic(tmp_path, monkeypatch):
    fitted, fit_values = [], ppo_file.fit_values

    def fit(module, *given):
        error = fit_values(module, *given)
        fitted[:] = [weight.detach().clone() for weight in module.policy.critic_parameters()]
        return error

    monkeypatch.setattr(ppo_file, "fit_values", fit)
    decaying = OptimizerConfig(lr=1e-2, weight_decay=1.0)
    module = PPOValueHeadModule(MLPPolicy((8,), init_seed=0), decaying, critic=CriticConfig(fit=ValueFit()))
    make_trainer(tmp_path, max_epochs=1).fit(module, datamodule=chain_data())
    assert fitted and all(map(torch.equal, module.policy.critic_parameters(), fitted))


def test_minibatches_after_target_kl_is_exceeded_are_skipped(tmp_path):
    module = PPOValueHeadModule(MLPPolicy((16,), init_seed=0), optimizer=OptimizerConfig(lr=5e-2), target_kl=1e-4)
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(module, datamodule=chain_data())
    steps = {float(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert max(steps) < 2 * 8


def test_the_standard_deviation_after_each_collection_is_logged(tmp_path):
    policy = MLPPolicy((8,), init_seed=0)
    env = GymnasiumEnvs("Swimmer-v5", max_episode_steps=8)
    data = RolloutDataModule(env, num_envs=2, num_steps=8, validation=ValidationConfig(episodes=1))
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(PPOValueHeadModule(policy, OptimizerConfig(lr=0.3)), datamodule=data)
    first, last = (row["train/std"] for _, row in trainer.logger.rows if "train/std" in row)
    std = policy.head.log_std.detach().exp()
    assert (
        last == pytest.approx(std.prod().sqrt().item()) and last != pytest.approx(std.mean().item()) and first != last
    )


def test_statistics_of_observations_change_between_collections_only(tmp_path):
    policy = MLPPolicy((8,), normalise_observations=True, init_seed=0)
    env = GymnasiumEnvs("Pendulum-v1", max_episode_steps=20)
    data = RolloutDataModule(env, num_envs=4, num_steps=16, num_epochs=2, validation=ValidationConfig(episodes=1))
    trainer = make_trainer(tmp_path, max_epochs=3)
    trainer.fit(PPOValueHeadModule(policy), datamodule=data)
    assert policy.norm.counting[0, 0] == 2 * 64 and policy.norm.learned[0, 0] == 3 * 64
    for _, row in trainer.logger.rows:
        assert row["train/ratio_error"] < 0.5 and row.get("rollout/return", -1) < 0
    seen = data.rollout.inputs["observation"].flatten(0, 1)
    assert seen.std(0).max() > 1.5 * policy.norm(seen).std(0).max()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"policy": MLPPolicy(critic=False)}, "model.policy is a MLPPolicy without critic"),
        (
            {"credit": {"kind": "episode"}},
            "model.credit.kind is 'episode'; it must be one of turn, token, nested, bandit",
        ),
        ({"clip_range": 0.0}, "model.clip_range is 0.0"),
        ({"clip_range": None}, "one of them must be set"),
        ({"kl": {"coef": -1.0}}, "model.kl.coef is -1.0"),
        ({"kl": {"target": 6.0}}, "model.kl.target is 6.0, but model.kl.coef is 0"),
        ({"kl": {"horizon": 0}}, "model.kl.horizon is 0"),
        ({"critic": {"fit": ValueFit(method="adam")}}, "model.critic.fit.method is adam; it must be lbfgs"),
        ({"critic": {"fit": ValueFit()}, "clip_range_vf": 0.2}, "model.clip_range_vf is 0.2; it must be null"),
        ({"credit": {"gamma": 1.5}}, "model.credit.gamma is 1.5"),
        ({"clip_range_vf": 0.0}, "model.clip_range_vf is 0.0; it must be positive, or null"),
        ({"target_kl": -0.1}, "model.target_kl is -0.1; it must be positive, or null"),
        ({"vf_coef": -1.0}, "model.vf_coef is -1.0; it must be 0 or positive"),
        ({"ent_coef": -1.0}, "model.ent_coef is -1.0; it must be 0 or positive"),
        ({"loss_normalisation": "turn"}, "model.loss_normalisation is 'turn'; it must be one of token, sequence"),
        ({"optimizer": {"weight_decay": -1.0}}, "model.optimizer.weight_decay is -1.0; it must be 0 or positive"),
        (
            {"optimizer": {"schedule": "lineer"}},
            "model.optimizer.schedule is 'lineer'; it must be one of constant, linear, cosine",
        ),
        ({"credit": {"token_gamma": -1.0}}, "model.credit.token_gamma is -1.0"),
        ({"credit": {"critic_lambda": 1.5}}, "model.credit.critic_lambda is 1.5"),
        ({"credit": {"kind": "bandit", "critic_lambda": 1.0}}, "model.credit.critic_lambda is 1.0; it must be null"),
        (
            {"credit": {"kind": "token", "local_penalties": True}},
            "model.credit.local_penalties is true; it must be false",
        ),
        (
            {"credit": {"kind": "bandit", "bootstrap_last": True}},
            "model.credit.bootstrap_last is true; it must be false",
        ),
    ],
)
def test_inconsistent_settings_raise_their_name(settings, complaint):
    with pytest.raises(ValueError) as error:
        from_settings(PPOValueHeadModule, **{"policy": MLPPolicy()} | settings)
    assert complaint in str(error.value)


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_sharded_weights_with_a_separately_fitted_critic_raise(stage):
    module = PPOValueHeadModule(MLPPolicy((8,), init_seed=0), critic=CriticConfig(fit=ValueFit()))
    module._trainer = SimpleNamespace(strategy=ModelParallelStrategy(), datamodule=chain_data())
    told = pytest.raises(ValueError, match="model.critic.fit is set and trainer.strategy shards the weights")
    with told if stage == "fit" else nullcontext():
        module.setup(stage)


def test_a_job_that_is_requeued_while_the_critic_is_fitted_resumes_bit_identical(tmp_path, monkeypatch):
    path, fit_values, sent = tmp_path / "requeue.ckpt", ppo_file.fit_values, []

    def hit(module, *given):
        fitted = fit_values(module, *given)
        if module.current_epoch == 1 and not sent:
            sent.append(1)
            signal.raise_signal(signal.SIGUSR1)
            assert not path.exists()
        return fitted

    def fit(name, **given):
        module = PPOValueHeadModule(MLPPolicy((8,), init_seed=0), critic=CriticConfig(fit=ValueFit()))
        trainer = make_trainer(tmp_path / name, max_epochs=4, enable_checkpointing=False)
        signal.signal(signal.SIGUSR1, lambda *_: trainer.save_checkpoint(path))
        trainer.fit(module, datamodule=chain_data(num_epochs=2), **given)
        return trainer

    monkeypatch.setattr(ppo_file, "fit_values", hit)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        whole = fit("whole")
        resumed = fit("resumed", ckpt_path=path, weights_only=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
    ours, theirs = (trainer.lightning_module.state_dict() for trainer in (resumed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert resumed.logger.rows == whole.logger.rows[-len(resumed.logger.rows) :]


@pytest.mark.parametrize("minibatch", [0, 1])
def test_a_job_that_is_requeued_between_accumulated_minibatches_resumes_bit_identical(tmp_path, minibatch):
    path = tmp_path / "requeue.ckpt"

    class Requeue(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == minibatch and not path.exists():
                signal.raise_signal(signal.SIGUSR1)

    def fit(name, *callbacks, **given):
        module = PPOValueHeadModule(MLPPolicy((8,), init_seed=0))
        options = {"max_epochs": 3, "accumulate_grad_batches": 2, "enable_checkpointing": False}
        trainer = make_trainer(tmp_path / name, *callbacks, **options)
        signal.signal(signal.SIGUSR1, lambda *_: trainer.save_checkpoint(path))
        trainer.fit(module, datamodule=chain_data(num_epochs=2, num_minibatches=2), **given)
        return trainer

    before = signal.getsignal(signal.SIGUSR1)
    try:
        whole = fit("whole", Requeue())
        resumed = fit("resumed", ckpt_path=path, weights_only=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
    ours, theirs = (trainer.lightning_module.state_dict() for trainer in (resumed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_bandit_credit_with_unfinished_episodes_raises(tmp_path):
    module = PPOValueHeadModule(MLPPolicy((8,), init_seed=0), credit=CreditConfig(kind="bandit"))
    with pytest.raises(ValueError, match="needs whole episodes"):
        make_trainer(tmp_path, max_epochs=3).fit(module, datamodule=chain_data(num_steps=2))


def test_incompatible_settings_of_rollout_data_raise_their_names():
    for changes, complaint in (
        ({"num_groups": 2}, "exactly one must be set"),
        ({"num_envs": None}, "exactly one must be set"),
        ({"group_size": 2}, "data.group_size is 2, which needs data.num_groups"),
        ({"num_envs": None, "num_groups": 2}, "groups play whole episodes"),
        ({"num_steps": 0}, "data.num_steps is 0"),
    ):
        with pytest.raises(ValueError, match=complaint):
            chain_data(**changes)
    assert rollout_data("continuing").num_steps == 4


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_and_started_from(tmp_path):
    command = ["python", "-m", "lrl", "fit", "--config", "configs/cartpole/ppo_mlp.yaml"]
    command += ["--trainer.max_epochs", "2", "--trainer.check_val_every_n_epoch", "3"]
    command += ["--run_directory", str(tmp_path / "run")]
    done = run_words(command)
    assert done.returncode == 0, done.stderr
    loaded = load_policy(tmp_path / "run")
    assert evaluate_policy(loaded.policy, loaded.env_factory, 3, 0, 3).returns.min() >= 8
    other = MLPPolicy(init_seed=7)
    other.connect_spaces(*loaded.env_factory.spaces)
    other.configure()
    take_weights(other, initial_weights(str(tmp_path / "run")), "run")
    assert all(torch.equal(other.state_dict()[name], value) for name, value in loaded.policy.state_dict().items())


def test_a_cloned_model_gets_an_untrained_value_head(folder, tmp_path):
    cloned = text_policy(folder)
    cloned.connect(LAKE.codec)
    cloned.configure()
    torch.save(
        {"state_dict": {f"policy.{n}": p for n, p in cloned.state_dict().items()}, "lrl": {}}, tmp_path / "c.ckpt"
    )
    module = ppo(folder, init_from=str(tmp_path / "c.ckpt"))
    module.policy.connect(LAKE.codec)
    module.configure_model()
    assert module.policy.value_head is not None


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_a_value_head_is_trained_in_16_bits(folder, tmp_path, precision):
    module = PPOValueHeadModule(text_policy(folder, value_head=ValueHeadConfig(hidden_sizes=[4])))
    trainer = make_trainer(tmp_path, max_epochs=1, precision=precision, gradient_clip_val=0.5)
    trainer.fit(module, datamodule=rollout_data("continuing"))
    assert any(math.isfinite(row.get("train/value_loss", math.nan)) for _, row in trainer.logger.rows)


@pytest.mark.slow
def test_a_critics_adapter_is_trained_saved_and_loaded_beside_actor_and_reference(folder, tmp_path):
    lora = {"lora": LoRAConfig(r=2)}

    def module(init_from=None):
        head = ValueHeadConfig(hidden_sizes=[4], init_seed=0, adapter=True)
        policy = text_policy(folder, value_head=head, **lora)
        return PPOValueHeadModule(
            policy, optimizer=OptimizerConfig(lr=1e-2), kl=AdaptiveKLConfig(coef=0.1), init_from=init_from
        )

    cloned = make_trainer(tmp_path / "sft", CollectionCheckpoint(1), max_epochs=1)
    cloned.fit(
        SFTModule(text_policy(folder, **lora), optimizer=OptimizerConfig(lr=1e-2, schedule="cosine", warmup=0.03)),
        datamodule=demonstrations(),
    )
    trained = module(init_from=str(next((tmp_path / "sft").rglob("last.ckpt"))))
    trainer = make_trainer(tmp_path / "ppo", CollectionCheckpoint(1), max_epochs=2)
    trainer.fit(trained, datamodule=rollout_data("continuing"))
    first = next(row for _, row in trainer.logger.rows if "train/kl_to_reference" in row)
    assert abs(first["train/kl_to_reference"]) < 1e-5, "the reference is the warm start, and not the bare base"
    weights = torch.load(next((tmp_path / "ppo").rglob("last.ckpt")), weights_only=False)["state_dict"]
    kinds = {
        kind for name in weights for kind in ("default", "critic", "reference", "value_head") if kind in name.split(".")
    }
    assert kinds == {"default", "critic", "value_head"}
    assert all(weight.any() for name, weight in weights.items() if "lora_B.critic" in name)
    resumed = module(init_from=str(next((tmp_path / "sft").rglob("last.ckpt"))))
    more = make_trainer(tmp_path / "more", CollectionCheckpoint(1), max_epochs=3)
    more.fit(resumed, datamodule=rollout_data("continuing"), ckpt_path=str(next((tmp_path / "ppo").rglob("last.ckpt"))))
    assert more.current_epoch == 3


@pytest.mark.parametrize("kind", ["mlp", "text", "scoring"])
def test_a_separately_fitted_critic_is_used_in_the_next_collection(folder, kind):
    policy = policy_of(kind, folder)
    rollout = rollout_of(policy, groups=12)
    plain = PPOValueHeadModule(policy).prepare(rollout)
    critic = {name for name, weight in policy.named_parameters() if name.split(".")[0] in ("value_head", "critic")}
    actor = {name: weight.detach().clone() for name, weight in policy.named_parameters() if name not in critic}
    assert len(critic) == len(policy.critic_parameters()) > 0
    module = PPOValueHeadModule(policy, critic=CriticConfig(fit=ValueFit(l2=0.0, iterations=50)))
    batch = module.prepare(rollout)
    for name in ("advantages", "returns", "old_values"):
        assert torch.equal(getattr(batch, name), getattr(plain, name)), "credit rests on the critic as it was"
    mask = batch.response_mask
    errors = [
        float((values - batch.returns)[mask].square().mean()) / 2
        for values in (batch.old_values, policy.evaluate(batch).values.detach())
    ]
    assert errors[1] < 0.9 * errors[0] and module.flush()["train/value_loss"] == pytest.approx(errors[1], rel=1e-3)
    loss = module.training_step(batch)
    gradients = torch.autograd.grad(loss, policy.critic_parameters(), allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in gradients), "the loss leaves it alone"
    assert all(torch.equal(weight, dict(policy.named_parameters())[name]) for name, weight in actor.items())
