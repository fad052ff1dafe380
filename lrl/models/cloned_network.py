"""The action distribution of a network that was cloned from demonstrations, read from the checkpoint of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import yaml
from torch import Tensor, nn

from lrl.functional.distributed import is_sharded_checkpoint, read_checkpoint
from lrl.models.action_heads import ActionHead
from lrl.models.networks import RunningNorm, mlp, seeded_init
from lrl.moved_names import current_config

_PREFIX = "policy."
"""What the names of a policy's weights begin with in the checkpoint of a run."""


class ClonedNetwork(nn.Module):
    """The actor of an :class:`~lrl.policies.mlp.MLPPolicy`: normalisation, network and action distribution.

    Args:
        settings: arguments of the policy.
        weights: its weights by name.
        action_space: Discrete or Box.

    Raises:
        ValueError: the weights are those of another action space.
    """

    def __init__(self, settings: Mapping[str, Any], weights: Mapping[str, Tensor], action_space: gym.Space) -> None:
        super().__init__()
        self.head = ActionHead(action_space, 0.0)
        layers = [weight.shape for name, weight in weights.items() if name.startswith("actor.") and weight.ndim == 2]
        self.size, outputs = layers[0][1], layers[-1][0]
        valued = settings["critic"] and settings["shared_value_network"]
        if outputs - valued != self.head.size:
            raise ValueError(f"it has {outputs - valued} outputs, but actions are of {action_space}.")
        self.actor = mlp((self.size, *settings["hidden_sizes"], outputs), settings["activation"])
        normalised = settings["normalise_observations"]
        self.norm = RunningNorm(self.size, settings["observation_clip"]) if normalised else nn.Identity()
        own = ("actor.", "norm.", "head.")
        self.load_state_dict({name: weight for name, weight in weights.items() if name.startswith(own)})

    @torch.no_grad()
    def logprobs(self, observations: Sequence[Any], actions: Sequence[Any]) -> np.ndarray:
        """Return the log-likelihoods of native actions, float64 ``(row,)``.

        An action at a bound of a Box has the probability of all that is clipped to it
        (:meth:`~lrl.functional.distributions.Gaussian.clipped_logprobs`), any other one a density.

        Args:
            observations: native observations, ``(row,)``.
            actions: native actions, ``(row,)``, inside the bounds.

        Raises:
            ValueError: observations are not vectors of the size that the network reads.
        """
        seen = torch.as_tensor(np.asarray(observations, dtype=np.float32))
        if seen.shape[1:] != (self.size,):
            raise ValueError(f"the clone reads {self.size} numbers; observations have shape {tuple(seen.shape[1:])}.")
        with torch.autocast("cpu", enabled=False):  # a rollout may be played in 16 bits
            distribution = self.head.distribution(self.actor(self.norm(seen))[:, : self.head.size])
            return self.head.logprobs_of(distribution, self.head.encode(actions))[:, 0].double().numpy()


def cloned_network_file(path: str | Path, key: str = "path") -> Path:
    """Return the checkpoint that is meant by a path: of a run directory ``last.ckpt``.

    Args:
        path: a checkpoint or a run directory.
        key: what the configuration calls it.

    Raises:
        ValueError: there is no checkpoint.
    """
    for file in (Path(path), Path(path) / "checkpoints" / "last.ckpt"):
        if file.is_file() or is_sharded_checkpoint(file):
            return file
    raise ValueError(
        f"{key} is {str(path)!r}, which is neither a checkpoint nor a run directory with one; clone a network with "
        "`lrl fit --config half_cheetah/clone_mlp.yaml`."
    )


def load_cloned_network(path: str | Path, action_space: gym.Space, key: str = "path") -> ClonedNetwork:
    """Load a cloned network on the CPU, without gradients.

    Args:
        path: a checkpoint of an :class:`~lrl.policies.mlp.MLPPolicy`, or its run directory.
        action_space: Discrete or Box.
        key: what the configuration calls the path.

    Raises:
        ValueError: there is no checkpoint, it is damaged or of another policy, or acts in another space.
    """
    checkpoint = read_checkpoint(cloned_network_file(path, key))
    config = current_config(yaml.safe_load(checkpoint.get("lrl", {}).get("config", "")) or {})
    policy = config.get("model", {}).get("init_args", {}).get("policy", {})
    if not policy.get("class_path", "").endswith(".MLPPolicy"):
        raise ValueError(f"{key} is {str(path)!r}, which holds no MLPPolicy; it must be a run of clone_mlp.yaml.")
    weights = {
        name.removeprefix(_PREFIX): weight
        for name, weight in checkpoint["state_dict"].items()
        if name.startswith(_PREFIX)
    }
    try:
        with seeded_init(0):  # the random numbers of the run stay as they are
            network = ClonedNetwork(policy["init_args"], weights, action_space)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{key} is {str(path)!r}, which does not fit the environment: {error}") from error
    return network.eval().requires_grad_(False)
