"""Reward model: networks that predict the reward of an action in a state, and the reward function that uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lrl.codecs.codec import TextCodec
from lrl.functional.distributed import find_checkpoint, read_checkpoint
from lrl.lm.heads import mlp, seeded_init, vector_size, vectors
from lrl.ranges import NonNegativeFloat, check_arguments
from lrl.registry import register
from lrl.rewards.reward import NativeAction, NetworkReward, Row

_PREFIX = "model."
"""Prefix of the names of the model's weights in a checkpoint."""
_CHUNK = 2**16
"""Number of rows that are converted to double precision at a time."""


class ZScores(nn.Module):
    """Converts vectors to z-scores and back, with a mean and a standard deviation that training does not change.

    Args:
        size: length of the vectors.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    @torch.no_grad()
    def fit(self, vectors: Tensor) -> None:
        """Compute mean and standard deviation of vectors ``(row, size)``; constant components get the deviation 1."""
        chunks, count = vectors.split(_CHUNK), len(vectors)
        mean = sum((chunk.double().sum(0) for chunk in chunks), torch.zeros_like(self.mean).double()) / count
        squares = sum(((chunk.double() - mean).square().sum(0) for chunk in chunks), torch.zeros_like(mean))
        std = (squares / count).sqrt()
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std <= 1e-6 * mean.abs(), torch.ones_like(std), std))

    def forward(self, vectors: Tensor) -> Tensor:
        """Convert vectors ``(..., size)`` to z-scores."""
        return (vectors - self.mean) / self.std

    def inverse(self, scores: Tensor) -> Tensor:
        """Convert z-scores ``(..., size)`` to vectors."""
        return scores * self.std + self.mean


class RewardModel(nn.Module):
    """Predicts the reward of an action in a state by one network or the mean of an ensemble (arXiv:1612.01474).

    Inputs and rewards are converted to z-scores with statistics of the training data (:meth:`fit_statistics`), which
    are saved with the weights.

    Args:
        observation_space: a Box or a Discrete space.
        action_space: a Box or a Discrete space; values of Discrete spaces are encoded one-hot.
        hidden_sizes: sizes of the hidden layers of each network; batch normalisation, ReLU and dropout follow each.
        members: number of networks, which differ in their initial weights.
        dropout: probability of setting a hidden unit to zero in training.

    Raises:
        ValueError: If a space is neither a Box nor Discrete.
    """

    minimum: Tensor
    """The smallest reward of the training data, ``()``."""

    def __init__(
        self,
        observation_space: gym.Space,
        action_space: gym.Space,
        hidden_sizes: Sequence[int] = (256, 256),
        members: int = 1,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.observation_space, self.action_space = observation_space, action_space
        self.about: dict[str, Any] = {
            "observation_space": space_to_dict("observation", observation_space),
            "action_space": space_to_dict("action", action_space),
            "hidden_sizes": [int(size) for size in hidden_sizes],
            "members": int(members),
            "dropout": float(dropout),
        }
        """The arguments as plain values, for checkpoints."""
        size = vector_size(observation_space) + vector_size(action_space)
        self.inputs, self.rewards = ZScores(size), ZScores(1)
        self.register_buffer("minimum", torch.tensor(0.0))
        sizes = (size, *hidden_sizes, 1)
        self.members = nn.ModuleList(mlp(sizes, batch_norm=True, dropout=dropout) for _ in range(members))

    def fit_statistics(self, inputs: Tensor, rewards: Tensor) -> None:
        """Compute the statistics of training data: inputs ``(row, size)`` and rewards ``(row,)``."""
        self.inputs.fit(inputs)
        self.rewards.fit(rewards[:, None])
        self.minimum.copy_(rewards.min())

    def forward(self, inputs: Tensor) -> Tensor:
        """Predict the z-scores ``(member, row)`` of the rewards of inputs ``(row, size)``."""
        scores = self.inputs(inputs)
        return torch.stack([member(scores)[:, 0] for member in self.members])

    def combine(self, scores: Tensor, disagreement_coef: float = 0.0) -> Tensor:
        """Return rewards ``(row,)``: the mean over members minus ``disagreement_coef`` times the standard deviation.

        Args:
            scores: predictions of the members as z-scores, ``(member, row)``.
            disagreement_coef: factor of the population standard deviation over the members, which is in the unit of the
                rewards.
        """
        rewards = self.rewards.inverse(scores)
        return rewards.mean(0) - disagreement_coef * rewards.std(0, correction=0)

    @torch.no_grad()
    def predict(
        self, observations: Sequence[Any], actions: Sequence[Any], disagreement_coef: float = 0.0
    ) -> np.ndarray:
        """Predict rewards, float64 ``(row,)``, in one forward pass without dropout.

        Args:
            observations: native observations, ``(row,)``.
            actions: native actions, ``(row,)``.
            disagreement_coef: see :meth:`combine`.

        Raises:
            ValueError: If observations or actions are not from the spaces that the model was trained on.
        """
        assert not self.training
        inputs = transition_vectors(self.observation_space, self.action_space, observations, actions)
        device = self.minimum.device
        with torch.autocast(device.type, enabled=False):  # the rollout may use autocast to 16 bits
            return self.combine(self(inputs.to(device)), disagreement_coef).double().cpu().numpy()


def transition_vectors(
    observation_space: gym.Space, action_space: gym.Space, observations: Sequence[Any], actions: Sequence[Any]
) -> Tensor:
    """Return the inputs of a reward model, float32 ``(row, size)``: concatenated observations and actions.

    Args:
        observation_space: a Box or a Discrete space, whose values are encoded one-hot.
        action_space: a Box or a Discrete space.
        observations: native observations, ``(row,)``.
        actions: native actions, ``(row,)``.

    Raises:
        ValueError: If observations or actions are not from their space.
    """
    parts = {"observations": (observation_space, observations), "actions": (action_space, actions)}
    for name, (space, values) in parts.items():
        found = np.asarray(values)
        fits = found.shape[1:] == space.shape and found.dtype.kind in "biuf"
        if fits and isinstance(space, spaces.Discrete):
            fits = found.dtype.kind in "iu" and bool(((found >= space.start) & (found < space.start + space.n)).all())
        if not fits:
            seen = f"{found.dtype} of shape {found.shape[1:]}, such as {found.reshape(-1)[:1].tolist()}"
            raise ValueError(f"the reward model was trained on {name} of {space}, but these are {seen}.")
    like = torch.zeros(())
    return torch.cat([vectors(space, values, like) for space, values in parts.values()], 1)


def space_to_dict(name: str, space: gym.Space) -> dict[str, Any]:
    """Convert a space to plain values; the bounds of a Box are omitted, because inputs are normalised.

    Args:
        name: ``observation`` or ``action``, for the error message.
        space: a Box or a Discrete space.

    Raises:
        ValueError: If ``space`` is neither a Box nor a Discrete space.
    """
    if isinstance(space, spaces.Box):
        return {"shape": list(space.shape)}
    if isinstance(space, spaces.Discrete):
        return {"n": int(space.n), "start": int(space.start)}
    raise ValueError(f"the {name} space is {space}; a reward model needs a Box or a Discrete one.")


def space_from_dict(about: Mapping[str, Any]) -> gym.Space:
    """Return the space that :func:`space_to_dict` converted; a Box has infinite bounds."""
    if "shape" in about:
        return spaces.Box(-np.inf, np.inf, tuple(about["shape"]))
    return spaces.Discrete(about["n"], start=about["start"])


def reward_model_file(path: str | Path, key: str = "path") -> Path:
    """Return the path of a checkpoint file: the given path, or ``best.ckpt``, else ``last.ckpt`` in a run directory.

    Args:
        path: a checkpoint or a run directory.
        key: configuration key of the path.

    Raises:
        ValueError: If there is no checkpoint.
    """
    advice = "train a reward model with `lrl fit --config half_cheetah/reward_model.yaml`"
    return find_checkpoint(path, ("best.ckpt", "last.ckpt"), key, advice)


def load_reward_model(path: str | Path, key: str = "path") -> RewardModel:
    """Load a reward model for predictions: on the CPU, without dropout and gradients.

    Args:
        path: a checkpoint or a run directory.
        key: configuration key of the path.

    Raises:
        ValueError: If there is no checkpoint, or if it is damaged, has no reward model, or has weights that do not fit
            its saved settings.
    """
    file = reward_model_file(path, key)
    checkpoint = read_checkpoint(file)
    about = checkpoint.get("lrl", {}).get("reward_model")
    if about is None:
        raise ValueError(
            f"{key} is {str(path)!r}, which contains no reward model; it must be one of RewardModelModule."
        )
    own = {name: space_from_dict(about[name]) for name in ("observation_space", "action_space")}
    with seeded_init(0):  # keeps the state of the run's random number generators
        model = RewardModel(**{**about, **own})
    state = checkpoint["state_dict"]
    given = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items() if name.startswith(_PREFIX)}
    shapes, wanted = ({name: w.shape for name, w in weights.items()} for weights in (given, model.state_dict()))
    wrong = sorted({name for name, _ in shapes.items() ^ wanted.items()})
    if wrong:
        raise ValueError(f"{key} is {str(file)!r}, whose weights {wrong[:3]} do not fit its saved settings.")
    model.load_state_dict(given)
    return model.eval().requires_grad_(False)


@register
class LearnedReward(NetworkReward):
    """Reward that a reward model predicts; an invalid response has a constant reward.

    A policy that maximises this reward exploits the model's errors. Therefore also measure the return of the
    environment itself, and subtract the disagreement of an ensemble (``disagreement_coef``).

    Args:
        path: run directory or checkpoint of :class:`~lrl.algorithms.reward_model.RewardModelModule`; see
            :func:`reward_model_file`.
        invalid: reward of an invalid response. As in the original experiment, the default is the smallest reward of its
            HalfCheetah data; null selects the smallest reward of the data that the model was trained on.
        weight: factor of this reward in the weighted sum.
        disagreement_coef: number of standard deviations over the members of an ensemble to subtract.

    Raises:
        ValueError: If there is no checkpoint at ``path``.
    """

    name = "learned"

    def __init__(
        self, path: str, invalid: float | None = -3.15, weight: float = 1.0, disagreement_coef: NonNegativeFloat = 0.0
    ) -> None:
        check_arguments(LearnedReward.__init__, locals(), "rewards")
        super().__init__(path, weight)
        reward_model_file(path, "rewards.path")
        self.invalid, self.disagreement_coef = invalid, float(disagreement_coef)

    @cached_property
    def model(self) -> RewardModel:
        """The reward model, loaded at the first access.

        Raises:
            ValueError: If the checkpoint is damaged or has no reward model, or if the disagreement of a model with one
                member is to be subtracted.
        """
        model = load_reward_model(self.path, "rewards.path")
        if self.disagreement_coef and len(model.members) == 1:
            raise ValueError(
                f"rewards.disagreement_coef is {self.disagreement_coef:g}, but the model of {self.path!r} has one "
                "member; it must be 0, or the model must be trained with model.init_args.members of at least 2."
            )
        return model

    @property
    def invalid_reward(self) -> float:
        """Reward of an invalid response."""
        return float(self.model.minimum) if self.invalid is None else self.invalid

    def load(self, codec: TextCodec) -> None:
        """Load the model, which does not depend on the environment."""
        _ = self.model

    def of_actions(self, rows: Sequence[Row], actions: Sequence[NativeAction]) -> np.ndarray:
        """Return the predicted rewards minus the disagreement, float64 ``(row,)``.

        Raises:
            ValueError: If observations or actions do not fit the model.
        """
        return self.model.predict([row.native_observation for row in rows], actions, self.disagreement_coef)
