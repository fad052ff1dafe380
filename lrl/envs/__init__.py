"""Environments. Importing this package registers ours with Gymnasium."""

import gymnasium as gym

gym.register(
    id="lrl/FrozenLakeRandomMaps-v0",
    entry_point="lrl.envs.frozen_lake:RandomMapsEnv",
    max_episode_steps=100,
    reward_threshold=0.70,
)
