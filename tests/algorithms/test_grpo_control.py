"""GRPO on small networks with native actions, and credit by turns that share a state."""

import re

import gymnasium as gym
import numpy as np
import pytest
import tiny_runs
import torch
from tiny_runs import from_settings, merged

from lrl.algorithms.grpo import GroupCreditConfig, GRPOModule
from lrl.codecs.spaces import SpaceCodec
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.prompt_env import PromptEnvs, RowSource
from lrl.envs.text import AdvisedObservation
from lrl.functional.groups import GroupedTurns, group_advantages, grouped_gae, step_advantages, turn_numbers
from lrl.policies.mlp import MLPPolicy
from lrl.rewards.behaviour_cloning import BehaviourCloningReward
from lrl.rewards.reward import Row
from lrl.rollouts.runner import observation_key
from lrl.training.collect import CollectionPlan, EpisodeCollector

LAKE = GymnasiumEnvs("FrozenLake-v1", kwargs={"desc": ["SFF", "HFG"], "is_slippery": False})


def turn_advantages(rewards, group, active, **options):
    return step_advantages(GroupedTurns(rewards, turn_numbers(active), group, active), **options)


class Arms(RowSource):
    """Data set without Q-values, in all states of which the same movement is right."""

    spaces = (gym.spaces.Box(-9, 9, (1,), np.float32), gym.spaces.Box(-1, 1, (1,), np.float32))

    @property
    def codec(self):
        return SpaceCodec(*self.spaces)

    def rows(self):
        targets = np.array([[0.5], [-0.25]], dtype=np.float32)
        return [Row(observation=str(target), action=target, native_observation=target) for target in targets]


def module_and_data(env, sizes=None, **settings):
    policy = MLPPolicy(hidden_sizes=(16,), activation="tanh", critic=False, init_seed=0)
    module = from_settings(GRPOModule, policy, **merged({"optimizer": {"lr": 1e-2}}, settings))
    return module, from_settings(RolloutDataModule, env, **{"num_groups": 2, "group_size": 4} | (sizes or {}))


def fitted(folder, env, collections=2, sizes=None, **settings):
    module, data = module_and_data(env, sizes, **settings)
    trainer = tiny_runs.make_trainer(folder, max_epochs=collections, enable_checkpointing=False)
    trainer.fit(module, datamodule=data)
    return module, data, trainer


def collected(env, states, **plan):
    """Return a module that is ready to compute advantages, and a rollout of its policy."""
    module, _ = module_and_data(env)
    module.policy.connect(env.codec)
    module.policy.connect_spaces(*env.spaces)
    module.configure_model()
    plan = CollectionPlan(**{"seed": 3, "collection": 0, "num_groups": 2, "group_size": 4, "states": states} | plan)
    return EpisodeCollector(module.policy, env.make(plan.num_envs, None)).collect(plan)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("kind", ["episode", "turn", "step", "grouped_gae"])
def test_a_network_learns_from_groups_of_episodes_with_discrete_and_continuous_actions(tmp_path, name, kind):
    sizes = {"num_epochs": 2, "num_minibatches": 2, "max_turns": 20}
    settings = {"credit": GroupCreditConfig(kind=kind), "kl": {"coef": 0.1}}
    _, data, trainer = fitted(tmp_path, GymnasiumEnvs(name), sizes=sizes, **settings)
    rollout, groups = data.rollout, data.rollout.inputs["observation"][0].reshape(2, 4, -1)
    assert torch.equal(groups, groups[:, :1].expand_as(groups)) and not torch.equal(groups[0], groups[1])
    assert rollout.response_mask.sum(-1).max() == 1 and rollout.lengths.max() <= 20
    (first, *_) = [row for _, row in trainer.logger.rows if "train/loss" in row]
    assert first["train/ratio_error"] < 1 and first["rollout/group_return_std"] > 0
    assert ("rollout/shared_state_rate" in first) == (kind in ("step", "grouped_gae"))


def test_validation_on_rows_without_q_values_has_no_success_rate(tmp_path):
    module, data = module_and_data(PromptEnvs(Arms(), [BehaviourCloningReward()]), {"validation": {"episodes": 6}})
    trainer = tiny_runs.make_trainer(tmp_path, max_epochs=1, enable_checkpointing=False, limit_val_batches=None)
    trainer.fit(module, datamodule=data)
    (row,) = [row for _, row in trainer.logger.rows if "val/return" in row]
    assert "val/success_rate" not in row and row["val/length"] == 1 and row["val/invalid_action_rate"] == 0


def test_all_turns_of_an_episode_carry_its_advantage_unless_turns_are_compared(monkeypatch):
    rollout = collected(LAKE, states=True)
    episode = group_advantages(rollout.episode_returns, rollout.group)
    turns = GroupedTurns(rollout.rewards, rollout.state, rollout.group, rollout.active)
    found = {}
    for kind in ("episode", "turn", "step", "grouped_gae"):
        module, _ = module_and_data(LAKE, credit=GroupCreditConfig(kind=kind))
        monkeypatch.setattr(module, "all_gather", lambda own: own)
        monkeypatch.setattr(type(module), "reduce_sum", lambda self, value: value)
        found[kind] = module.advantages(rollout).advantages[..., 0]
    assert torch.equal(found["episode"], episode * rollout.active)
    steps = step_advantages(turns, gamma=0.95)
    assert steps.any()
    torch.testing.assert_close(found["step"], episode * rollout.active + steps)
    torch.testing.assert_close(
        found["grouped_gae"], grouped_gae(turns, rollout.terminated, gamma=0.95, gae_lambda=0.95)
    )
    by_turn = turn_advantages(rollout.rewards, rollout.group, rollout.active, gamma=0.95)
    assert by_turn.any() and not torch.equal(by_turn, found["step"])
    torch.testing.assert_close(found["turn"], by_turn)
    assert not found["step"][~rollout.active].any()


def test_turns_are_compared_with_the_discount_and_the_scale_of_the_module(monkeypatch):
    rollout = collected(GymnasiumEnvs("CartPole-v1"), states=False)
    torch.manual_seed(0)
    rollout = rollout.replace(rewards=torch.randn_like(rollout.rewards) * rollout.active)
    credit, doubled = GroupCreditConfig(kind="turn", gamma=0.5), []
    module, _ = module_and_data(LAKE, credit=credit, advantage_scale="batch_std")
    monkeypatch.setattr(module, "all_gather", lambda own: own)
    monkeypatch.setattr(type(module), "reduce_sum", lambda self, value: doubled.append(value) or value)
    found = module.advantages(rollout).advantages[..., 0]
    turns = (rollout.rewards, rollout.group, rollout.active)
    expected = turn_advantages(*turns, gamma=0.5, scale="batch_std")
    torch.testing.assert_close(found, expected)
    assert doubled  # sums of all ranks were asked for
    for other in ({"gamma": 0.95}, {"scale": "none"}):
        options = {"gamma": 0.5, "scale": "batch_std"} | other
        assert (turn_advantages(*turns, **options) - expected).abs().max() > 1e-2


def test_states_are_numbered_on_request_and_equal_for_equal_observations():
    assert collected(LAKE, states=False).state is None
    rollout = collected(LAKE, states=True)
    position = rollout.inputs["observation"].argmax(-1)  # one-hot
    seen = {(int(p), int(key)) for p, key in zip(position[rollout.active], rollout.state[rollout.active], strict=True)}
    assert len(seen) == len({p for p, _ in seen}) == len({key for _, key in seen}) > 2
    assert not rollout.state[~rollout.active].any()
    drifting = collected(GymnasiumEnvs("CartPole-v1"), states=True)
    assert len(drifting.state[0].unique()) == 2  # one for each group


def test_the_hash_of_an_observation_is_unique_and_never_changes():
    assert observation_key("row 0") == observation_key(AdvisedObservation("row 0", 3)) == -9124823809885225612
    alike = [np.array([0.0, 1.0]), np.array([-0.0, 1.0])]
    assert observation_key(alike[0]) == observation_key(alike[1]) != observation_key(np.array([1.0, 0.0]))
    nested = {"b": np.zeros(2), "a": (np.int64(3), "x")}
    assert observation_key(nested) == observation_key(dict(reversed(nested.items())))
    assert observation_key(("ab", "c")) != observation_key(("a", "bc"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gamma": 0.9}, "model.credit.gamma is 0.9; it must be left out, because episode credit ignores it."),
        ({"kind": "step", "gae_lambda": 0.5}, "model.credit.gae_lambda is 0.5; it must be left out, because step"),
        ({"kind": "turn", "gae_lambda": 0.5}, "model.credit.gae_lambda is 0.5; it must be left out, because turn"),
        ({"kind": "token"}, "model.credit.kind is 'token'; it must be one of episode, turn, step, grouped_gae."),
        ({"kind": "step", "gamma": 1.5}, "model.credit.gamma is 1.5; it must be in [0, 1]."),
    ],
)
def test_settings_without_effect_raise_their_name(settings, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        GroupCreditConfig(**settings)


@pytest.mark.learning
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", ["turn", "step", "grouped_gae"])
def test_a_small_lake_is_crossed_and_with_flipped_advantages_it_is_not(tmp_path, monkeypatch, kind, sign):
    estimate = GroupCreditConfig.estimate
    monkeypatch.setattr(GroupCreditConfig, "estimate", lambda *args: sign * estimate(*args))
    sizes = {"num_groups": 1, "group_size": 32, "num_epochs": 4}
    _, data, _ = fitted(tmp_path, LAKE, 15, sizes, optimizer={"lr": 3e-2}, credit=GroupCreditConfig(kind=kind))
    assert data.rollout.episode_returns.mean() > 0.9 if sign > 0 else data.rollout.episode_returns.mean() < 0.1
