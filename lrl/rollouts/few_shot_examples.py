"""Draw few-shot examples: single turns of an expert's episodes."""

from __future__ import annotations

import numpy as np

from lrl.envs.factory import EnvFactory
from lrl.envs.text import text_of
from lrl.functional.random import counter_hash, seeds
from lrl.policies.actor import Actor
from lrl.policies.baselines.fixed import ExpertActor
from lrl.rollouts.runner import EnvRunner
from lrl.types import PastTurn, RandomKeys

_PURPOSE = "example"
_LOWEST_SEED = 2**30
"""Evaluations use consecutive seeds from a small number on; examples use the upper half of the training seeds."""
_EPISODES_PER_EXAMPLE = 50
"""Episodes per example after which no further observations are expected."""


def wants_examples(policy: Actor) -> bool:
    """Return whether the policy's prompt lacks some of its few-shot examples."""
    return policy.prompt is not None and policy.prompt.num_examples > len(policy.prompt.examples)


def add_examples(policy: Actor, env: EnvFactory) -> None:
    """Draw few-shot examples for the policy's prompt if it lacks some.

    Args:
        policy: connected.
        env: the environment of its training, or where it acts if it is not trained; see :func:`draw_examples`.

    Raises:
        ValueError: see :func:`draw_examples`.
    """
    prompt = policy.prompt
    if prompt is not None and wants_examples(policy):
        policy.prompt = prompt.with_examples(draw_examples(env, prompt.num_examples, prompt.response_format))


def draw_examples(env: EnvFactory, num_examples: int, response_format: str) -> tuple[PastTurn, ...]:
    """Draw turns with different observations, at most one from each episode of the expert; the same on every machine.

    Args:
        env: the environment; if it has a split, its training levels are used. Episodes are reset with seeds that no
            evaluation uses.
        num_examples: number of turns.
        response_format: format of the expert's responses, which have no reasoning.

    Raises:
        ValueError: the environment has no expert, or its episodes have fewer different observations.
    """
    levels = env.training_split()
    expert = ExpertActor(response_format=response_format)
    try:
        expert.connect(levels.codec)
    except ValueError as error:
        name = type(levels.codec).__name__
        raise ValueError(f"prompt.num_examples is {num_examples}; it must be 0: {name} has no expert.") from error
    envs = levels.make(1, response_format)
    examples: dict[str, PastTurn] = {}
    try:
        runner = EnvRunner(expert, envs)
        for episode in range(_EPISODES_PER_EXAMPLE * num_examples):
            turns = _play(runner, np.array([episode]))
            turn = turns[int(counter_hash(_PURPOSE, episode)) % len(turns)]
            examples.setdefault(turn.observation, turn)
            if len(examples) == num_examples:
                return tuple(examples.values())
    finally:
        envs.close()
    raise ValueError(
        f"prompt.num_examples is {num_examples}; it must be at most {len(examples)}, the number of different "
        "observations in the expert's episodes."
    )


def _play(runner: EnvRunner, episode: np.ndarray) -> list[PastTurn]:
    """Play one episode, of index ``(1,)``, and return its turns."""
    runner.reset(seeds(_PURPOSE, episode) | _LOWEST_SEED, episode)
    turns: list[PastTurn] = []
    while not runner.ended[0]:
        step = runner.turn(RandomKeys(seed=0, purpose=_PURPOSE, collection=0, env=episode, turn=runner.lengths))
        turns.append(PastTurn(text_of(step.observations[0]), step.decisions.actions[0]))
    return turns
