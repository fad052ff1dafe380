"""One update of a small network against sb3-contrib's TRPO, on one shared batch and from the same weights.

sb3-contrib averages a Gaussian's divergence over the dimensions of an action where the divergence is their sum: its
region is as many times wider as there are dimensions, and so is its damping. Ours is set to match.
"""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces

from lrl.algorithms.trpo import NaturalGradientConfig, TRPOModule
from lrl.functional.trust_region import conjugate_gradient, line_search
from lrl.policies.mlp import MLPPolicy
from lrl.types import TurnBatch

pytestmark = pytest.mark.reference

SPACES = {"gaussian": spaces.Box(-1, 1, (3,), np.float32), "categorical": spaces.Discrete(4)}
TURNS, MAX_KL = 200, 0.01


def theirs_and_ours(kind):
    """Both with the same weights; theirs with the batch in its buffer; ours, the batch."""
    import gymnasium as gym
    from sb3_contrib import TRPO

    observed, acted = spaces.Box(-1, 1, (5,), np.float32), SPACES[kind]

    class Still(gym.Env):
        observation_space, action_space = observed, acted

        def reset(self, **_):
            return np.zeros(5, np.float32), {}

    settings = {
        "cg_max_steps": 15,
        "cg_damping": 0.1,
        "target_kl": MAX_KL,
        "n_critic_updates": 1,
        "learning_rate": 0.0,
        "device": "cpu",
    }
    theirs = TRPO("MlpPolicy", Still(), n_steps=TURNS, batch_size=TURNS, line_search_shrinking_factor=0.8, **settings)
    theirs._setup_learn(TURNS)
    policy = MLPPolicy((64, 64), activation="tanh", init_seed=0)
    policy.connect_spaces(observed, acted)
    policy.configure()
    net = theirs.policy
    linear = [net.mlp_extractor.policy_net[0], net.mlp_extractor.policy_net[2], net.action_net]
    with torch.no_grad():
        policy.actor[-1].weight.mul_(30)  # a policy that is not uniform
        for ours, their in zip((policy.actor[0], policy.actor[2], policy.actor[4]), linear, strict=True):
            their.weight.copy_(ours.weight)
            their.bias.copy_(ours.bias)
        if kind == "gaussian":
            for std in (policy.head.log_std, net.log_std):
                std.copy_(torch.tensor([-0.5, 0.0, 0.3]))
    return theirs, policy, shared_batch(theirs, policy, kind)


def shared_batch(theirs, policy, kind):
    generator = torch.Generator().manual_seed(0)
    seen, advantages = torch.rand(TURNS, 5, generator=generator) * 2 - 1, torch.randn(TURNS, generator=generator)
    actions = (
        torch.randn(TURNS, 3, generator=generator)
        if kind == "gaussian"
        else torch.randint(4, (TURNS,), generator=generator)
    )
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    batch = TurnBatch(
        inputs={"observation": seen, "action": actions},
        response_mask=torch.ones(TURNS, 1, dtype=torch.bool),
        old_logprobs=torch.zeros(TURNS, 1),
        advantages=advantages[:, None],
    )
    batch = batch.replace(old_logprobs=policy.evaluate(batch).logprobs.detach())
    buffer, column = theirs.rollout_buffer, np.zeros(1)
    for turn in range(TURNS):
        action = actions[turn].numpy().reshape(1, -1)
        values, logprobs = torch.zeros(1), batch.old_logprobs[turn]
        buffer.add(seen[turn].numpy()[None], action, column, column, values, logprobs)
    buffer.advantages[:, 0] = advantages.numpy()
    return batch


@pytest.mark.parametrize("fisher", ["gauss_newton", "double_backward"])
@pytest.mark.parametrize("kind", SPACES)
def test_gradient_direction_and_new_weights_are_those_of_sb3_contrib(kind, fisher, monkeypatch):
    from sb3_contrib.common.utils import conjugate_gradient_solver
    from stable_baselines3.common.distributions import kl_divergence

    theirs, policy, batch = theirs_and_ours(kind)
    theirs_search = partial(line_search, backtrack_coeff=0.8, accept_ratio=0.0)
    monkeypatch.setattr("lrl.algorithms.trpo.line_search", theirs_search)
    wider = 3 if kind == "gaussian" else 1
    module = TRPOModule(
        policy,
        max_kl=wider * MAX_KL,
        natural_gradient=NaturalGradientConfig(damping=wider * 0.1, cg_iterations=15, product=fisher),
    )
    parameters = module.actor_parameters()
    _, gradient, _ = module._surrogate_and_gradient([batch], parameters, float(TURNS))
    product = module._fisher_product(batch, parameters)
    direction = conjugate_gradient(product, gradient, 15)

    data = next(theirs.rollout_buffer.get(None))
    actions = data.actions if kind == "gaussian" else data.actions.long().flatten()
    with torch.no_grad():
        old = copy.copy(theirs.policy.get_distribution(data.observations))  # the next call writes into it
    new = theirs.policy.get_distribution(data.observations)
    ratio = torch.exp(new.log_prob(actions) - data.old_log_prob)
    actor, wanted, grad_kl, _ = theirs._compute_actor_grad(
        kl_divergence(new, old).mean(), (data.advantages * ratio).mean()
    )

    torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=1e-4)
    their_product = lambda v: theirs.hessian_vector_product(actor, grad_kl, v)  # noqa: E731
    vector = torch.randn(len(gradient), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(product(vector) / wider, their_product(vector), atol=1e-4, rtol=1e-4)
    their_direction = conjugate_gradient_solver(their_product, wanted, max_iter=15)
    torch.testing.assert_close(direction * wider, their_direction, atol=1e-4, rtol=1e-3)

    before = torch.cat([weight.detach().reshape(-1).clone() for weight in parameters])
    theirs.train()
    module._improve(batch)
    after = torch.cat([weight.detach().reshape(-1) for weight in parameters])
    their_after = torch.cat([weight.detach().reshape(-1) for weight in actor])
    assert (after - before).abs().max() > 1e-3 and module.flush()["train/step_accepted"] == 1
    torch.testing.assert_close(after, their_after, atol=1e-4, rtol=1e-4)
