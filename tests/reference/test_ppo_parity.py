"""Advantages and returns against Stable-Baselines3's rollout buffer, on the same numbers."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from lrl.functional.advantages import CreditConfig, whiten
from lrl.types import Rollout

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["turn", "token", "nested"])
def test_advantages_are_those_of_stable_baselines(seed, kind):
    from stable_baselines3.common.buffers import RolloutBuffer

    steps, envs, gamma, gae_lambda = 20, 4, 0.97, 0.9
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, steps, envs)).astype(np.float32)
    ends = rng.random((steps, envs)) < 0.15
    final = rng.normal(size=envs).astype(np.float32)
    buffer = RolloutBuffer(
        steps, spaces.Box(-1, 1, (1,)), spaces.Discrete(2), gamma=gamma, gae_lambda=gae_lambda, n_envs=envs
    )
    begins = np.ones(envs)
    for time in range(steps):
        zeros = np.zeros((envs, 1))
        buffer.add(zeros, zeros, rewards[time], begins, torch.tensor(values[time]), torch.zeros(envs))
        begins = ends[time]
    buffer.compute_returns_and_advantage(torch.tensor(final), ends[-1])

    last = torch.zeros(steps, envs)
    last[-1] = torch.tensor(final)
    rewards, values, terminated = torch.tensor(rewards), torch.tensor(values), torch.tensor(ends)
    mask, cut = torch.ones(steps, envs, 1, dtype=torch.bool), torch.zeros(steps, envs, dtype=torch.bool)
    cut[-1] = ~terminated[-1]
    rollout = Rollout(
        inputs={},
        response_mask=mask,
        logprobs=torch.zeros(steps, envs, 1),
        rewards=rewards,
        terminated=terminated,
        truncated=cut,
        active=torch.ones(steps, envs, dtype=torch.bool),
        turn=torch.zeros(steps, envs, dtype=torch.int64),
        group=torch.arange(envs),
        observations=[],
        responses=[],
        metrics={},
        values=values[..., None],
        final_values=last,
    )
    credit = CreditConfig(kind=kind, gamma=gamma, gae_lambda=gae_lambda, normalise=False).estimate(rollout)
    advantages, returns = credit.advantages, credit.returns
    np.testing.assert_allclose(advantages[..., 0], buffer.advantages, atol=1e-5)
    np.testing.assert_allclose(returns[..., 0], buffer.returns, atol=1e-5)
    theirs = (buffer.advantages - buffer.advantages.mean()) / (buffer.advantages.std(ddof=1) + 1e-8)
    np.testing.assert_allclose(whiten(advantages, mask)[..., 0], theirs, atol=1e-5)
