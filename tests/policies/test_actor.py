"""Tests of the interface of actors, and of the names of weights in checkpoints."""

import numpy as np
import pytest
import torch
from tiny_runs import save_tiny_model, text_policy

from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.episodes import evaluate_policy
from lrl.lm.config import LanguageModelConfig
from lrl.lm.heads import ValueHeadConfig
from lrl.policies.actor import Actor
from lrl.policies.head import HeadPolicy
from lrl.policies.scoring import ScoringPolicy
from lrl.prompts import PromptTemplate
from lrl.types import Decisions


class Alternating(Actor):
    """Actor that alternates between left and right, and keeps the last action in its history."""

    response_format = "direct"

    def act(self, observations, memory, keys, sampling):
        actions = ["RIGHT" if turn % 2 else "LEFT" for turn in keys.turn.tolist()]
        nothing = torch.zeros(len(actions), 1)
        return Decisions(
            actions=actions, inputs={}, response_mask=nothing.bool(), logprobs=nothing, memory=list(memory)
        )


def test_an_evaluation_needs_only_an_actor():
    envs = GymnasiumEnvs("FrozenLake-v1", kwargs={"is_slippery": False}, max_episode_steps=6)
    results = evaluate_policy(Alternating(), envs, episodes=3, seed=0, num_envs=2)
    assert np.array_equal(results.lengths, [6] * 3) and not results.invalid_actions.any()


def test_an_actor_samples_as_in_training_at_another_temperature(tmp_path):
    assert Alternating().sampling_at(0.0).max_new_tokens == 1
    policy = text_policy(save_tiny_model(tmp_path / "tiny"), max_new_tokens=7)
    assert policy.sampling_at(0.5) == type(policy.sampling)(temperature=0.5, max_new_tokens=7)


@pytest.mark.parametrize("kind", ["text", "scoring", "head"])
def test_names_of_weights_in_checkpoints_do_not_change(kind, tmp_path):
    folder = save_tiny_model(tmp_path / "tiny")
    model, prompt, head = LanguageModelConfig(name=folder), PromptTemplate(response_format="direct"), ValueHeadConfig()
    if kind == "head":
        envs = GymnasiumEnvs("CartPole-v1")
        policy = HeadPolicy(model, init_seed=0)
        policy.connect(envs.codec)
        policy.connect_spaces(*envs.spaces)
    else:
        policy = (
            text_policy(folder, value_head=head) if kind == "text" else ScoringPolicy(model, prompt, value_head=head)
        )
        policy.connect(FrozenLakeCodec())
    policy.configure()
    names = {".".join(name.split(".")[:2]) for name in policy.state_dict() if not name.startswith("layers")}
    if kind == "head":
        assert names == {
            "language_model.model",
            "critic.0",
            "critic.2",
            "critic.4",
            "norm.counting",
            "norm.learned",
        } | {"norm.learned_in"}
    else:
        assert names == {"language_model.model", "value_head.layers"}
    assert policy.fingerprint == policy.trunk.language_model.fingerprint != ""
