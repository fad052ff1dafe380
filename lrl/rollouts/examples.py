"""Few-shot examples for prompts: single turns from episodes of an expert or of a data set."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

import numpy as np

from lrl.envs.factory import EnvFactory
from lrl.envs.minari_reader import DatasetReader, download
from lrl.envs.text import text_of
from lrl.functional.random import counter_hash, permutation, seeds
from lrl.policies.actor import Actor
from lrl.policies.baselines import ExpertActor
from lrl.prompts import get_response_format
from lrl.rollouts.runner import EnvRunner
from lrl.types import PastTurn, RandomKeys

_PURPOSE = "example"
_LOWEST_SEED = 2**30
"""Smallest seed of the expert's episodes; evaluations use smaller seeds."""
_EPISODES_PER_EXAMPLE = 50
"""Number of episodes per requested example after which the search for new observations stops."""


def wants_examples(policy: Actor) -> bool:
    """Return whether the policy's prompt needs more few-shot examples than it has."""
    return policy.prompt is not None and policy.prompt.num_examples > len(policy.prompt.examples)


def add_examples(policy: Actor, env: EnvFactory) -> None:
    """Add few-shot examples to the policy's prompt if it needs more than it has.

    Args:
        policy: policy whose codec is set; its prompt is replaced.
        env: the training environment, or the evaluation environment if the policy is not trained.

    Raises:
        ValueError: If :func:`draw_examples` finds too few examples.
    """
    prompt = policy.prompt
    if prompt is not None and wants_examples(policy):
        examples = draw_examples(env, prompt.num_examples, prompt.response_format, prompt.examples_from)
        policy.prompt = prompt.with_examples(examples)


def draw_examples(
    env: EnvFactory, num_examples: int, response_format: str, dataset_id: str | None = None
) -> tuple[PastTurn, ...]:
    """Sample turns with different observations; repeated calls return the same turns, on every machine.

    Args:
        env: the environment of the turns.
        num_examples: number of turns to return.
        response_format: format of the responses; their reasoning is empty.
        dataset_id: Minari id of a data set that contains the turns; it is downloaded if it is not local. None plays
            episodes of the environment's expert instead.

    Raises:
        ValueError: If the environment has no expert, if the data set cannot be read or is of another environment, or if
            there are fewer than ``num_examples`` different observations.
    """
    examples: dict[str, PastTurn] = {}
    arguments = env, response_format, _EPISODES_PER_EXAMPLE * num_examples
    with closing(_stored(dataset_id, *arguments) if dataset_id else _played(*arguments)) as turns:
        for turn in turns:
            examples.setdefault(turn.observation, turn)
            if len(examples) == num_examples:
                return tuple(examples.values())
    found_in = repr(dataset_id) if dataset_id else "the expert's episodes"
    raise ValueError(
        f"prompt.num_examples is {num_examples}; it must be at most {len(examples)}, the number of different "
        f"observations found in {found_in}."
    )


def _played(env: EnvFactory, response_format: str, attempts: int) -> Generator[PastTurn]:
    """Yield a random turn from each of ``attempts`` episodes that the expert plays.

    If the environment has splits, the training split is played. The seeds differ from those of evaluations.

    Raises:
        ValueError: If the environment has no expert.
    """
    training_env = env.training_split()
    expert = ExpertActor(response_format=response_format)
    try:
        expert.connect(training_env.codec)
    except ValueError as error:
        raise ValueError(
            "prompt.num_examples is positive; it must be 0, or prompt.examples_from a data set: "
            f"{type(training_env.codec).__name__} has no expert."
        ) from error
    envs = training_env.make(1, response_format)
    try:
        runner = EnvRunner(expert, envs)
        for number in range(attempts):
            episode, turns = np.array([number]), list[PastTurn]()
            runner.reset(seeds(_PURPOSE, episode) | _LOWEST_SEED, episode)
            while not runner.ended[0]:
                keys = RandomKeys(seed=0, purpose=_PURPOSE, collection=0, env=episode, turn=runner.lengths)
                step = runner.turn(keys)
                turns.append(PastTurn(text_of(step.observations[0]), step.decisions.actions[0]))
            yield turns[int(counter_hash(_PURPOSE, number)) % len(turns)]
    finally:
        envs.close()


def _stored(dataset_id: str, env: EnvFactory, response_format: str, attempts: int) -> Generator[PastTurn]:
    """Yield a random turn from each of ``attempts`` episodes of a data set, as texts of the codec of ``env``.

    If there are fewer episodes than ``attempts``, they are used repeatedly. Episodes without demonstrated steps are
    skipped.

    Raises:
        ValueError: If the data set cannot be read, or its spaces or actions differ from those of ``env``.
    """
    download(dataset_id)
    reader, codec, render = DatasetReader(dataset_id), env.codec, get_response_format(response_format).render
    reader.check_spaces(*env.spaces, "prompt.examples_from")
    reader.check_own_actions("prompt.examples_from")
    order = permutation(len(reader.lengths), _PURPOSE)
    for attempt in range(attempts):
        index = int(order[attempt % len(order)])
        steps = reader.demonstrated_steps(index)
        if len(steps):
            episode, step = reader.episode(index), int(steps[int(counter_hash(_PURPOSE, attempt)) % len(steps)])
            text = codec.observation_to_text(episode.observations[step], episode.context)
            yield PastTurn(text, render(codec.action_to_text(episode.actions[step])))
