"""Draw few-shot examples: single turns of an expert's episodes, or of a data set's."""

from __future__ import annotations

import numpy as np

from lrl.envs.factory import EnvFactory
from lrl.envs.minari_reader import DatasetReader, download
from lrl.envs.text import text_of
from lrl.functional.random import counter_hash, permutation, seeds
from lrl.policies.actor import Actor
from lrl.policies.baselines import ExpertActor
from lrl.prompts.response_format import get_response_format
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
        ValueError: see :func:`draw_examples` and :func:`draw_stored_examples`.
    """
    prompt = policy.prompt
    if prompt is not None and wants_examples(policy):
        wanted = prompt.num_examples, prompt.response_format
        if prompt.examples_from is None:
            policy.prompt = prompt.with_examples(draw_examples(env, *wanted))
        else:
            policy.prompt = prompt.with_examples(draw_stored_examples(prompt.examples_from, env, *wanted))


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
        raise ValueError(
            f"prompt.num_examples is {num_examples}; it must be 0, or prompt.examples_from a data set: {name} has no "
            "expert."
        ) from error
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


def draw_stored_examples(
    dataset_id: str, env: EnvFactory, num_examples: int, response_format: str
) -> tuple[PastTurn, ...]:
    """Draw turns with different observations from a data set, one per episode if there are enough episodes.

    Args:
        dataset_id: Minari's name of the data set, which is downloaded if it is not local.
        env: the environment of the data set, whose codec writes the texts.
        num_examples: number of turns.
        response_format: format of the responses, which have no reasoning.

    Raises:
        ValueError: the data set cannot be read, is of another environment, or has fewer different observations.
    """
    download(dataset_id)
    reader, codec, render = DatasetReader(dataset_id), env.codec, get_response_format(response_format).render
    reader.check_spaces(*env.spaces, "prompt.examples_from")
    reader.check_own_actions("prompt.examples_from")
    order = permutation(len(reader.lengths), _PURPOSE)
    examples: dict[str, PastTurn] = {}
    for attempt in range(_EPISODES_PER_EXAMPLE * num_examples):
        index = int(order[attempt % len(order)])
        steps = reader.demonstrated_steps(index)
        if not len(steps):
            continue
        episode, step = reader.episode(index), int(steps[int(counter_hash(_PURPOSE, attempt)) % len(steps)])
        text = codec.observation_to_text(episode.observations[step], episode.context)
        examples.setdefault(text, PastTurn(text, render(codec.action_to_text(episode.actions[step]))))
        if len(examples) == num_examples:
            return tuple(examples.values())
    raise ValueError(
        f"prompt.num_examples is {num_examples}; it must be at most {len(examples)}, the number of different "
        f"observations found in {dataset_id!r}."
    )


def _play(runner: EnvRunner, episode: np.ndarray) -> list[PastTurn]:
    """Play one episode, of index ``(1,)``, and return its turns."""
    runner.reset(seeds(_PURPOSE, episode) | _LOWEST_SEED, episode)
    turns: list[PastTurn] = []
    while not runner.ended[0]:
        step = runner.turn(RandomKeys(seed=0, purpose=_PURPOSE, collection=0, env=episode, turn=runner.lengths))
        turns.append(PastTurn(text_of(step.observations[0]), step.decisions.actions[0]))
    return turns
