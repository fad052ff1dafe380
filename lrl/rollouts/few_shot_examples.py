"""Few-shot examples: single turns out of an expert's episodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from lrl.envs.factory import EnvFactory
from lrl.envs.text import text_of
from lrl.functional.random import counter_hash, seeds
from lrl.policies.actor import Actor
from lrl.policies.baselines.fixed import ExpertActor
from lrl.types import PastTurn, RandomKeys

_PURPOSE = "example"
_LOWEST_SEED = 2**30
"""Evaluations count their seeds up from a small number; examples come from the upper half of the training seeds."""
_EPISODES_PER_EXAMPLE = 50


def wants_examples(policy: Actor) -> bool:
    """Whether the policy's prompt has examples to be drawn."""
    return policy.prompt is not None and policy.prompt.num_examples > len(policy.prompt.examples)


def add_examples(policy: Actor, env: EnvFactory) -> None:
    """Put drawn examples into a policy's prompt, if it wants some.

    Args:
        policy: connected.
        env: where it is trained, or where it acts if it is not; see :func:`draw_examples`.

    Raises:
        ValueError: see :func:`draw_examples`.
    """
    prompt = policy.prompt
    if prompt is not None and wants_examples(policy):
        policy.prompt = prompt.with_examples(draw_examples(env, prompt.num_examples, prompt.response_format))


def draw_examples(env: EnvFactory, num_examples: int, response_format: str) -> tuple[PastTurn, ...]:
    """Turns with different observations, one out of each of as many episodes of the expert; the same on every machine.

    Args:
        env: the environment; of one with a split the training levels are taken. Episodes are reset with seeds that no
            evaluation counts up to.
        num_examples: how many.
        response_format: in which the expert answers, without reasoning.

    Raises:
        ValueError: the environment has no expert, or its episodes do not hold that many different observations.
    """
    levels = env.training_levels()
    expert = ExpertActor(response_format=response_format)
    try:
        expert.connect(levels.codec)
    except ValueError as error:
        name = type(levels.codec).__name__
        raise ValueError(f"prompt.num_examples is {num_examples}; it must be 0: {name} has no expert.") from error
    envs = levels.make(1, response_format)
    examples: dict[str, PastTurn] = {}
    try:
        expert.prepare(envs)
        for episode in range(_EPISODES_PER_EXAMPLE * num_examples):
            turns = list(_episode(envs, expert, episode))
            turn = turns[int(counter_hash(_PURPOSE, episode)) % len(turns)]
            examples.setdefault(turn.observation, turn)
            if len(examples) == num_examples:
                return tuple(examples.values())
    finally:
        envs.close()
    raise ValueError(f"prompt.num_examples is {num_examples}; the expert met only {len(examples)} different states.")


def _episode(envs: gym.vector.VectorEnv, expert: ExpertActor, episode: int) -> Iterator[PastTurn]:
    index = np.array([episode])
    seed: Any = [int(seeds(_PURPOSE, episode)) | _LOWEST_SEED]
    observations, _ = envs.reset(seed=seed, options={"episode": index})
    ended = False
    while not ended:
        keys = RandomKeys(seed=0, purpose=_PURPOSE, collection=0, env=index, turn=np.zeros(1, dtype=np.int64))
        (response,) = expert.act(observations, [()], keys).actions
        yield PastTurn(text_of(observations[0]), response)
        observations, _, terminated, truncated, _ = envs.step((response,))
        ended = bool(terminated[0] or truncated[0])
