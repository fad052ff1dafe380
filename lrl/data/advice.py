"""Advice of an expert in the states that another policy reaches, which DAgger (arXiv:1011.0686) learns from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from gymnasium.vector import VectorEnv

from lrl.policies.actor import Actor
from lrl.policies.baselines.fixed import ExpertActor
from lrl.prompts.response_format import get_response_format
from lrl.types import RandomKeys


@final
class Advisor:
    """Asks an actor what it would do in states that another one is in. Its advice is greedy.

    Args:
        actor: connected and configured. It acts natively and reads native observations, or is an
            :class:`~lrl.policies.baselines.fixed.ExpertActor`, which reads the text that the policy is shown.
        policy: the actor that plays.

    Raises:
        ValueError: the advisor is neither, or the policy is not shown what the advisor reads.
    """

    def __init__(self, actor: Actor, policy: Actor) -> None:
        if actor.response_format is not None and not isinstance(actor, ExpertActor):
            raise ValueError(
                f"--advisor is a {type(actor).__name__}, which responds in text; it must be expert, or a run that acts "
                "natively."
            )
        if actor.response_format is not None and policy.response_format is None:
            raise ValueError("--advisor is expert, but --policy acts natively; it must be a run that acts natively.")
        self.actor = actor

    def prepare(self, envs: VectorEnv) -> None:
        """Make the environments show what the advisor needs."""
        self.actor.prepare(envs)

    def advise(self, shown: Sequence[Any], native: Sequence[Any], episodes: np.ndarray, turn: np.ndarray) -> list[Any]:
        """Return the advisor's native actions.

        Args:
            shown: what the policy observed, one per row.
            native: the native observations of the same states.
            episodes: indices of the episodes, int64 ``(row,)``.
            turn: indices of the turns in them, int64 ``(row,)``.
        """
        actor, codec = self.actor, self.actor.codec
        assert codec is not None, "connect() comes first"
        observations = native if actor.response_format is None else shown
        keys = RandomKeys(seed=0, purpose="advice", collection=0, env=episodes, turn=turn)
        actions = actor.act(observations, [()] * len(observations), keys, actor.sampling_at(0.0)).actions
        if actor.response_format is None:
            return list(actions)
        extract = get_response_format(actor.response_format).extract
        return [codec.text_to_action(extract(response)) for response in actions]
