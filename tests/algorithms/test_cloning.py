"""Behaviour cloning by policies that act natively: a network, and a head on a language model."""

from contextlib import nullcontext
from types import SimpleNamespace

import gymnasium as gym
import minari
import numpy as np
import pytest
import torch
from sft_runs import SaveInside, fit, logged, weights
from tiny_runs import from_settings, make_trainer, merged, save_tiny_model
from torch.nn.parallel import DistributedDataParallel

from lrl.algorithms.ppo import PPOValueHeadModule
from lrl.algorithms.sft import SFTModule
from lrl.codecs.numbers import NumberFormat
from lrl.data.demonstration_tokens import demonstrations_batch
from lrl.data.demonstrations import DemonstrationsDataModule
from lrl.data.minari import MinariDemonstrations
from lrl.data.minari_writer import collect
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.data.run_data import ValidationConfig
from lrl.data.sources import ExpertDemonstrations
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake import ExpertQRows
from lrl.evaluation.episodes import evaluate_policy
from lrl.evaluation.load import load_baseline
from lrl.functional.distributions import Gaussian
from lrl.lm.config import LanguageModelConfig
from lrl.lm.heads import ActionHead, ObservationCriticConfig
from lrl.policies.head import HeadPolicy
from lrl.policies.mlp import MLPPolicy
from lrl.training.optimizer import OptimizerConfig
from lrl.types import NativeTurn, SamplingConfig

NUMBERS = NumberFormat(kind="integers", ranges=[(-2.0, 664.0)])  # 1.5 bins per unit: words from 0 to 3, mostly
ENVS = {
    "discrete": GymnasiumEnvs("CartPole-v1", numbers=NUMBERS, max_episode_steps=15),
    "box": GymnasiumEnvs("Pendulum-v1", numbers=NUMBERS, max_episode_steps=15),
}
EPISODES = 8


@pytest.fixture(scope="module", autouse=True)
def datasets(tmp_path_factory):
    """Record episodes of random networks; many actions of the Box are at its bounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(tmp_path_factory.mktemp("minari")))
        for kind, env in ENVS.items():
            policy = configured(MLPPolicy(hidden_sizes=(8,), init_seed=1), env)
            with torch.no_grad():
                policy.actor[-1].weight.mul_(300)
            collect(policy, env, f"lrl/{kind}-v0", EPISODES, 0, 4, name="network", commit="")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def configured(policy, env):
    policy.connect(env.codec)
    policy.connect_spaces(*env.spaces)
    policy.configure()
    return policy


def network(**changes):
    settings = {"hidden_sizes": (8,), "normalise_observations": True, "critic": False, "init_seed": 0}
    return MLPPolicy(**settings | changes)


def head(folder, **changes):
    return HeadPolicy(
        LanguageModelConfig(name=folder), **{"hidden_sizes": (8,), "critic": None, "init_seed": 0} | changes
    )


def sft(policy, **changes):
    return from_settings(
        SFTModule, policy, **merged({"optimizer": {"lr": 1e-2, "schedule": "constant", "warmup": 0.0}}, changes)
    )


def data(kind, held_out=False, source=None, **changes):
    train = source or MinariDemonstrations(f"lrl/{kind}-v0", validation_share=0.25)
    other = MinariDemonstrations(f"lrl/{kind}-v0", "validation", validation_share=0.25) if held_out else None
    settings = {"batch_size": 16, "validation": {"episodes": 0}, "validation_demonstrations": other} | changes
    return from_settings(DemonstrationsDataModule, train, ENVS[kind], **settings)


def stored(kind, split="train"):
    """Return observations ``(row, size)`` and actions ``(row, ...)`` of a split, read by Minari itself."""
    episodes = minari.load_dataset(f"lrl/{kind}-v0")
    chosen = MinariDemonstrations(f"lrl/{kind}-v0", split, validation_share=0.25)._select()[0].tolist()
    rows = [(episodes[index].observations[:-1], episodes[index].actions) for index in chosen]
    return tuple(np.concatenate(column) for column in zip(*rows, strict=True))


def first_loss(kind, observations, actions):
    """Return the mean negative log-likelihood of an untrained network, by a loop over rows and dimensions."""
    policy, total = configured(network(), ENVS[kind]), 0.0
    mean, std = observations.mean(0), observations.std(0) + 1e-8
    seen = torch.tensor((observations - mean) / std, dtype=torch.float32).clamp(-10, 10)
    for row, action in zip(policy.actor(seen).tolist(), actions, strict=True):
        if kind == "discrete":
            total -= float(torch.log_softmax(torch.tensor(row), 0)[int(action)])
            continue
        normal = torch.distributions.Normal(row[0], 1.0)
        at_high, at_low = action[0] >= 2, action[0] <= -2
        chance = 1 - normal.cdf(torch.tensor(2.0)) if at_high else normal.cdf(torch.tensor(-2.0))
        total -= float(chance.log() if at_high or at_low else normal.log_prob(torch.tensor(action[0])))
    return total / len(actions)


@pytest.mark.parametrize("kind", ENVS)
def test_the_loss_is_the_likelihood_of_what_the_environment_received(kind, tmp_path):
    observations, actions = stored(kind)
    if kind == "box":
        assert 0.1 < (np.abs(actions) == 2).mean() < 0.9
    size = len(observations)
    trainer = fit(sft(network()), tmp_path, data(kind, batch_size=size), max_epochs=1)
    assert logged(trainer, "train/loss") == pytest.approx([first_loss(kind, observations, actions)], rel=1e-5)
    assert logged(trainer, "clock/tokens") == [size]


@pytest.mark.parametrize("kind", ENVS)
def test_observations_are_normalised_by_the_statistics_of_the_training_demonstrations(kind, tmp_path):
    observations, _ = stored(kind)
    module = sft(network())
    fit(module, tmp_path, data(kind), max_epochs=2)
    count, mean, squares = module.policy.norm.counting
    assert (count == len(observations)).all()
    np.testing.assert_allclose(mean, observations.astype(np.float64).mean(0), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(squares / count, observations.astype(np.float64).var(0), rtol=1e-5)


def test_statistics_do_not_depend_on_how_many_demonstrations_are_read_at_a_time(tmp_path, monkeypatch):
    whole, pieces = sft(network()), sft(network())
    fit(whole, tmp_path, data("box"), max_epochs=1)
    monkeypatch.setattr("lrl.algorithms.sft._STATISTICS_BATCH", 7)
    fit(pieces, tmp_path, data("box"), max_epochs=1)
    torch.testing.assert_close(pieces.policy.norm.counting, whole.policy.norm.counting)


def test_a_run_that_starts_from_a_clone_keeps_its_statistics(tmp_path):
    trainer = fit(sft(network()), tmp_path, data("box"), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "clone.ckpt")
    again = sft(network(), init_from=str(tmp_path / "clone.ckpt"))
    fit(again, tmp_path, data("box", source=MinariDemonstrations("lrl/box-v0", num_rows=20)), max_epochs=1)
    assert torch.equal(again.policy.norm.counting, trainer.lightning_module.policy.norm.counting)


def test_ppo_starts_from_a_clone_without_a_critic(tmp_path):
    trainer = fit(sft(network()), tmp_path, data("discrete"), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "clone.ckpt")
    module = PPOValueHeadModule(
        network(critic=True), optimizer=OptimizerConfig(lr=1e-9), init_from=str(tmp_path / "clone.ckpt")
    )
    rollouts = RolloutDataModule(ENVS["discrete"], num_envs=2, num_steps=4, validation=ValidationConfig(episodes=0))
    make_trainer(tmp_path, max_epochs=1, enable_checkpointing=False).fit(module, datamodule=rollouts)
    torch.testing.assert_close(module.policy.actor[0].weight, trainer.lightning_module.policy.actor[0].weight)
    assert module.policy.critic is not None


@pytest.mark.parametrize("kind", ENVS)
def test_the_held_out_loss_is_the_mean_over_held_out_actions(kind, tmp_path):
    source = data(kind, held_out=True)
    trainer = fit(sft(network()), tmp_path, source, max_epochs=2, limit_val_batches=None)
    observations, actions = stored(kind, "validation")
    turns = [NativeTurn(*row) for row in zip(observations, actions, strict=True)]
    policy = trainer.lightning_module.policy
    assert sum(map(len, source.validation_batches())) == len(turns)
    inputs = policy.encode_turns(turns)
    distribution = policy.head.distribution(policy(policy.norm(inputs["observation"])))
    nll = -float(policy.head.logprobs_of(distribution, inputs).mean().detach())
    assert logged(trainer, "val/loss")[-1] == pytest.approx(nll, rel=1e-5)


def test_the_held_out_density_is_that_of_the_gaussian_before_clipping(tmp_path):
    trainer = fit(sft(network()), tmp_path, data("box", held_out=True), max_epochs=2, limit_val_batches=None)
    policy, total = trainer.lightning_module.policy, 0.0
    observations, actions = stored("box", "validation")
    means = policy(policy.norm(torch.as_tensor(observations))).detach()
    std = float(policy.head.log_std.detach().exp())
    for mean, action in zip(means, actions, strict=True):
        total += float(torch.distributions.Normal(float(mean), std).log_prob(torch.tensor(float(action[0]))))
    assert logged(trainer, "val/log_likelihood")[-1] == pytest.approx(total / len(actions), rel=1e-5)
    assert logged(trainer, "val/log_likelihood")[-1] != pytest.approx(-logged(trainer, "val/loss")[-1], rel=1e-3)
    trainer = fit(sft(network()), tmp_path, data("discrete", held_out=True), max_epochs=1, limit_val_batches=None)
    assert logged(trainer, "val/loss") and not logged(trainer, "val/log_likelihood")


class Replica(DistributedDataParallel):
    """Stub of the wrapper that Lightning puts around a module, without processes."""

    def __init__(self, find_unused_parameters):
        torch.nn.Module.__init__(self)
        self.find_unused_parameters = find_unused_parameters


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("network", {"critic": True}, "model.policy has a critic, .* is ddp, .*; critic or value_head must not be set"),
        ("network", {"critic": False}, None),
        ("head", {"critic": ObservationCriticConfig()}, "model.policy has a critic"),
        ("head", {"critic": None}, None),
    ],
)
def test_a_critic_under_ddp_raises_one_sentence(folder, kind, settings, said):
    policy = network(**settings) if kind == "network" else head(folder, **settings)
    module = sft(configured(policy, ENVS["discrete"]))
    module._trainer = SimpleNamespace(strategy=None, model=Replica(find_unused_parameters=True), optimizers=[])
    module.on_fit_start()
    module._trainer.model = Replica(find_unused_parameters=False)
    with pytest.raises(ValueError, match=said) if said else nullcontext():
        module.on_fit_start()


def test_statistics_from_init_from_are_kept(folder, tmp_path):
    """The critic's statistics of observations are computed again; those of the whitened states are loaded."""
    whitened = {"freeze_trunk": True, "whiten_states": 1e-2}
    trainer = fit(sft(head(folder, **whitened)), tmp_path, data("box"), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "clone.ckpt")
    again = sft(head(folder, critic=ObservationCriticConfig(), **whitened), init_from=str(tmp_path / "clone.ckpt"))
    fit(again, tmp_path, data("box", source=MinariDemonstrations("lrl/box-v0", num_rows=20)), max_epochs=1)
    policy, before = again.policy, trainer.lightning_module.policy
    assert (policy.norm.counting[0] == 20).all() and not policy.empty_statistics
    assert torch.equal(policy.whitening.counting, before.whitening.counting)
    assert torch.equal(policy.whitening.matrix, before.whitening.matrix)


@pytest.mark.parametrize("kind", ENVS)
def test_a_pass_visits_every_step_once(kind):
    source = data(kind, batch_size=1)
    source.connect(configured(network(), ENVS[kind]))
    seen = torch.cat([source.batch(3, index).inputs["observation"] for index in range(source.num_batches())])
    expected = torch.as_tensor(stored(kind)[0])
    assert len(seen) == len(expected)
    assert torch.equal(seen.unique(dim=0), expected.unique(dim=0))
    assert not torch.equal(seen, expected)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_clone_resumed_inside_a_pass_ends_bit_identical(tmp_path, accumulate):
    settings = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    inside = SaveInside(tmp_path)
    whole = fit(sft(network(), log_every=2), tmp_path, data("box"), [inside], **settings)
    resumed = fit(sft(network(), log_every=2), tmp_path, data("box"), ckpt_path=inside.saved[1], **settings)
    assert torch.equal(weights(resumed.lightning_module), weights(whole.lightning_module))
    assert resumed.logger.rows == whole.logger.rows[-len(resumed.logger.rows) :]


@pytest.mark.parametrize("kind", ENVS)
def test_a_head_learns_from_the_text_of_the_observations(folder, tmp_path, kind):
    trainer = fit(sft(head(folder)), tmp_path, data(kind, held_out=True), max_epochs=4, limit_val_batches=None)
    losses = logged(trainer, "val/loss")
    assert losses[-1] < losses[0]


def test_a_frozen_trunk_reads_each_text_once(folder, tmp_path, monkeypatch):
    policy, read = head(folder, freeze_trunk=True, whiten_states=1e-2), []
    states = HeadPolicy._states

    def noted(self, inputs, reference=False):
        if "states" not in inputs:
            rows = zip(inputs["text_ids"], inputs["text_mask"], strict=True)
            read.extend({tuple(ids[mask].tolist()) for ids, mask in rows})  # a set: rows left over repeat a text
        return states(self, inputs, reference)

    monkeypatch.setattr(HeadPolicy, "_states", noted)
    monkeypatch.setattr("lrl.policies.head.place_matters", lambda *_: False)
    module, source = sft(policy), data("box")
    fit(module, tmp_path, source, max_epochs=3)
    texts = {tuple(policy.encode_observation(row)) for row in stored("box")[0]}
    assert sorted(read) == sorted(texts)
    count, mean = policy.whitening.counting[:2]
    assert (count == len(stored("box")[0])).all() and mean.abs().max() > 0


def test_cached_states_equal_computed_ones(folder, tmp_path):
    kept = fit(sft(head(folder, freeze_trunk=True)), tmp_path, data("box"), max_epochs=2).lightning_module
    policy = head(folder, freeze_trunk=True)
    policy._state_cache = type(policy._state_cache)(0)
    assert torch.equal(weights(fit(sft(policy), tmp_path, data("box"), max_epochs=2).lightning_module), weights(kept))
    turns = [NativeTurn(*row) for row in zip(*stored("box"), strict=True)]
    batch = made_batch(kept.policy, turns)
    alone = kept.policy.evaluate(batch).logprobs
    states = kept.policy._states(batch.inputs)
    together = kept.policy.evaluate(batch.replace(inputs={**batch.inputs, "states": states})).logprobs
    torch.testing.assert_close(alone, together)


def made_batch(policy, turns):
    return demonstrations_batch(policy.encode_turns(turns), torch.ones(len(turns), 1, dtype=torch.bool))


def test_whitening_of_a_trained_trunk_uses_the_states_of_its_start(folder, tmp_path):
    module = sft(head(folder, whiten_states=1e-2), optimizer={"lr": 1e-9})
    fit(module, tmp_path, data("box"), max_epochs=1)
    policy = module.policy
    batch = made_batch(policy, [NativeTurn(*row) for row in zip(*stored("box"), strict=True)])
    states = policy._states(batch.inputs).detach().double()
    torch.testing.assert_close(policy.whitening.counting[1], states.mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"source": ExpertDemonstrations(ExpertQRows())}, "a MLPPolicy, which learns from native .* contain texts"),
        ({"loss_on": "all"}, "data.loss_on is 'all', which a MLPPolicy does not support; it must be completion"),
        ({"token_cache": "tokens"}, "data.token_cache is .tokens., but a MLPPolicy learns from native actions"),
    ],
)
def test_demonstrations_that_a_network_cannot_read_raise_one_sentence(tmp_path, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        fit(sft(network()), tmp_path, data("discrete", **changes))


def test_discrete_actions_count_from_the_start_of_their_space():
    inputs = ActionHead(gym.spaces.Discrete(3, start=5), 0.0).encode([5, np.int64(7)])
    assert inputs["action"].tolist() == [0, 2]


def fitted(actions, features, likelihood):
    """Return weights and log-std of the linear Gaussian with the highest likelihood."""
    weight, log_std = torch.zeros(2, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, log_std], max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = -likelihood(Gaussian((features @ weight)[:, None], log_std), actions[:, None]).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight.detach().flatten().tolist(), float(log_std.detach())


def test_the_likelihood_of_clipping_finds_the_policy_that_was_clipped_and_the_density_does_not():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(4000, 2, generator=generator)
    means, low, high = features @ torch.tensor([[1.5], [-0.8]]), torch.tensor([-1.0]), torch.tensor([1.0])
    actions = (means + 0.4 * torch.randn(4000, 1, generator=generator)).clamp(-1, 1)
    assert (actions.abs() == 1).float().mean() > 0.4
    weight, log_std = fitted(actions, features, lambda gaussian, acts: gaussian.clipped_logprobs(acts, low, high))
    assert weight == pytest.approx([1.5, -0.8], abs=0.05) and log_std == pytest.approx(np.log(0.4), abs=0.05)
    weight, _ = fitted(actions, features, lambda gaussian, acts: gaussian.logprobs(acts))
    assert weight[0] < 0.8


@pytest.mark.learning
def test_a_network_clones_the_controller_of_cartpole(tmp_path):
    env = GymnasiumEnvs("CartPole-v1")
    collect(load_baseline("expert", env).policy, env, "lrl/controller-v0", 16, 0, 16, name="expert", commit="")
    source = MinariDemonstrations("lrl/controller-v0", split="all")
    module = sft(network(hidden_sizes=(64, 64)), optimizer={"lr": 3e-3, "schedule": "cosine"})
    fit(
        module,
        tmp_path,
        DemonstrationsDataModule(source, env, 256, validation=ValidationConfig(episodes=0)),
        max_epochs=6,
    )
    results = evaluate_policy(module.policy, env, 10, 10_000, 10, SamplingConfig(temperature=0))
    assert results.means()["return"] >= 475
