"""Reward function: the log-likelihood of an action under a network that was cloned from demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import yaml
from gymnasium import spaces
from torch import Tensor, nn

from lrl.codecs.codec import TextCodec
from lrl.functional.distributed import find_checkpoint, read_checkpoint
from lrl.lm.heads import ActionHead, RunningNorm, mlp, seeded_init
from lrl.registry import register
from lrl.rewards.reward import NativeAction, NetworkReward, Row

_PREFIX = "policy."
"""Prefix of the names of a policy's weights in a checkpoint."""
_MIN_STD = 0.1
"""Minimum standard deviation of a dimension of a Box, in the unit of the actions.

The clone of a deterministic demonstrator has small standard deviations. Without this minimum, nearly all other actions
would have the reward :data:`_MINIMUM`.
"""
_MINIMUM = -50.0
"""Lower bound of the reward, and the reward of an invalid response."""
_SETTINGS = ("hidden_sizes", "activation", "normalise_observations", "observation_clip")
"""Arguments of the policy that determine its actor."""


class ClonedNetwork(nn.Module):
    """The actor of an :class:`~lrl.policies.mlp.MLPPolicy`: normalisation, network and action head.

    Args:
        settings: arguments of the policy, by name.
        weights: weights of the policy, by name.
        action_space: a Discrete space or a Box.

    Raises:
        ValueError: If the weights do not fit the action space.
    """

    def __init__(self, settings: Mapping[str, Any], weights: Mapping[str, Tensor], action_space: gym.Space) -> None:
        super().__init__()
        self.head = ActionHead(action_space, 0.0)
        layers = [weight.shape for name, weight in weights.items() if name.startswith("actor.") and weight.ndim == 2]
        self.size, outputs = layers[0][1], layers[-1][0]
        kind = "vectors" if "head.log_std" in weights else "integers"
        if outputs != self.head.size or self.head.is_box != (kind == "vectors"):
            raise ValueError(f"its actions are {kind} with {outputs} outputs; they must be of {action_space}.")
        self.actor = mlp((self.size, *settings["hidden_sizes"], outputs), settings["activation"])
        normalised = settings["normalise_observations"]
        self.norm = RunningNorm(self.size, settings["observation_clip"]) if normalised else nn.Identity()
        own = ("actor.", "norm.", "head.")
        self.load_state_dict({name: weight for name, weight in weights.items() if name.startswith(own)})

    @torch.no_grad()
    def log_likelihoods(self, observations: Sequence[Any], actions: Sequence[Any]) -> np.ndarray:
        """Return the log-likelihoods of native actions, float64 ``(row,)``.

        For a Discrete space they are log-probabilities. For a Box they are ``-1/2 mean(((action - greedy) / std)^2)``
        over the dimensions: the log-density of a Gaussian around the clone's greedy action, per dimension and without
        its constant. The standard deviations are at least 0.1, in the unit of the actions.

        Args:
            observations: native observations, vectors ``(row, size)``.
            actions: native actions, ``(row,)``.

        Raises:
            ValueError: If observations are not vectors of the network's input size.
        """
        first = np.asarray(observations[0])
        if first.shape != (self.size,) or first.dtype.kind not in "biuf":
            raise ValueError(
                f"the clone reads vectors of {self.size} numbers; an observation is {str(observations[0])[:60]!r}."
            )
        seen = torch.as_tensor(np.asarray(observations, dtype=np.float32))
        with torch.autocast("cpu", enabled=False):  # the rollout may use autocast to 16 bits
            outputs = self.actor(self.norm(seen))
        if self.head.log_std is None:
            distribution = self.head.distribution(outputs)
            return self.head.logprobs_of(distribution, self.head.encode(actions))[:, 0].double().numpy()
        space = self.head.space
        greedy = np.clip(outputs.double().numpy(), space.low.reshape(-1), space.high.reshape(-1))
        std = np.maximum(self.head.log_std.double().exp().numpy(), _MIN_STD)
        taken = np.asarray(actions, dtype=np.float64).reshape(len(actions), -1)
        return -0.5 * np.square((taken - greedy) / std).mean(1)


def cloned_network_file(path: str | Path, key: str = "path") -> Path:
    """Return the path of a checkpoint file: the given path, or ``last.ckpt`` in a run directory.

    Args:
        path: a checkpoint or a run directory.
        key: configuration key of the path.

    Raises:
        ValueError: If there is no checkpoint.
    """
    advice = "clone a network with `lrl fit --config half_cheetah/clone_mlp.yaml`"
    return find_checkpoint(path, ("last.ckpt",), key, advice)


def load_cloned_network(
    path: str | Path, action_space: spaces.Box | spaces.Discrete, key: str = "path"
) -> ClonedNetwork:
    """Load a cloned network on the CPU, without gradients.

    Args:
        path: a checkpoint of an :class:`~lrl.policies.mlp.MLPPolicy`, or its run directory.
        action_space: the action space of the environment.
        key: configuration key of the path.

    Raises:
        ValueError: If there is no checkpoint, or if it is damaged, of another policy or of another action space.
    """
    checkpoint: Any = read_checkpoint(cloned_network_file(path, key))
    policy = _policy_config(checkpoint)
    settings = policy.get("init_args", {})
    kind = policy.get("class_path", "").rpartition(".")[2]
    if kind != "MLPPolicy" or any(name not in settings for name in _SETTINGS):
        raise ValueError(f"{key} is {str(path)!r}, which contains no MLPPolicy; it must be a run of clone_mlp.yaml.")
    weights = {
        name.removeprefix(_PREFIX): weight
        for name, weight in checkpoint["state_dict"].items()
        if name.startswith(_PREFIX)
    }
    try:
        with seeded_init(0):  # keeps the state of the run's random number generators
            network = ClonedNetwork(settings, weights, action_space)
    except ValueError as error:
        raise ValueError(f"{key} is {str(path)!r}, which does not fit the environment: {error}") from error
    return network.eval().requires_grad_(False)


def _policy_config(checkpoint: Any) -> Mapping[str, Any]:
    """Return the configuration of the policy in a checkpoint; empty if there is none."""
    text = checkpoint.get("lrl", {}).get("config", "") if isinstance(checkpoint, dict) else ""
    config = yaml.safe_load(text) or {}
    return config.get("model", {}).get("init_args", {}).get("policy") or {}


@register
class CloneLikelihoodReward(NetworkReward):
    """Reward equal to the log-likelihood of an action under a network that was cloned from demonstrations.

    :meth:`ClonedNetwork.log_likelihoods` defines the log-likelihood. In a Box, it is 0 for the clone's greedy action.
    The reward is at least -50, which is also the reward of an invalid response. Unlike
    :class:`~lrl.rewards.behaviour_cloning.BehaviourCloningReward`, it needs no action of the demonstrator, so the rows
    may come from any policy.

    Args:
        path: run directory or checkpoint of a cloned :class:`~lrl.policies.mlp.MLPPolicy`
            (``configs/half_cheetah/clone_mlp.yaml``).
        weight: factor of this reward in the weighted sum.

    Raises:
        ValueError: If there is no checkpoint at ``path``.
    """

    name = "clone_likelihood"

    def __init__(self, path: str, weight: float = 1.0) -> None:
        super().__init__(path, weight, _MINIMUM)
        cloned_network_file(path, "rewards.path")
        self._network: ClonedNetwork | None = None

    def load(self, codec: TextCodec) -> None:
        """Load the clone.

        Raises:
            ValueError: If the checkpoint is damaged, of another policy or of another action space.
        """
        space = codec.action_space
        if not isinstance(space, (spaces.Box, spaces.Discrete)):
            raise ValueError(
                f"env.rewards has a CloneLikelihoodReward, but actions are of {space}; they must be Discrete or a Box."
            )
        self._network = load_cloned_network(self.path, space, "rewards.path")

    def of_actions(self, rows: Sequence[Row], actions: Sequence[NativeAction]) -> np.ndarray:
        """Return the log-likelihoods of native actions, at least -50; float64 ``(row,)``."""
        assert self._network is not None, "connect() must be called before"
        observations = [row.native_observation for row in rows]
        return np.maximum(self._network.log_likelihoods(observations, actions), self.invalid_reward)
