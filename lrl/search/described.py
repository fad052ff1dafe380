"""Descriptions in words of an environment and of a small policy's parameters, for the prompts of ProPS+."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from gymnasium import spaces

from lrl.codecs.codec import TextCodec
from lrl.codecs.registry import class_names, codec_for, environment_metadata
from lrl.codecs.spaces import Quantity, SpaceCodec, describe_quantities
from lrl.codecs.toy_text import FrozenLakeCodec, get_desc
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.envs.native import close_env
from lrl.search.policies import LinearPolicy, SearchedPolicy, TabularPolicy

_WRITTEN_IN_FULL = 24
"""Maximum number of weights for which each output of a linear policy is written as a sum."""


def task_in_words(policy: SearchedPolicy, env: EnvFactory, max_steps: int | None = None) -> tuple[str, str]:
    """Describe an environment and the parameters of a policy, as the prompt of ProPS+ does.

    An environment is described by its codec instead if ``environment_facts.yaml`` does not contain it, or if its codec
    has another description than the registered codec.

    Args:
        policy: the policy, connected to the spaces of the environment.
        env: factory of the environment.
        max_steps: maximum number of steps of an episode; the environment's own limit may be lower.

    Returns:
        The descriptions of the environment and of the policy.
    """
    codec, context = env.codec, None
    world = environment_in_words(codec)
    if not isinstance(env, GymnasiumEnvs):
        return world, policy_in_words(policy, codec)
    wrapped = env.make_native()
    native = wrapped.unwrapped
    facts = environment_facts(native)
    if facts is not None and world == environment_in_words(codec_for(native)):
        assert wrapped.spec is not None, "the environment is registered"
        cap = min(filter(None, (max_steps, wrapped.spec.max_episode_steps)), default=None)
        world = facts.render(cap, known_start=not env.reset_options)
    if isinstance(codec.unwrapped, FrozenLakeCodec):
        context = codec.context(native)  # all episodes have the same rows and columns, so any map serves
    close_env(wrapped)
    return world, policy_in_words(policy, codec, context)


def environment_in_words(codec: TextCodec) -> str:
    """Return the codec's description of its environment, without the format in which actions are written."""
    return codec.native_description if isinstance(codec, SpaceCodec) else codec.description


def policy_in_words(policy: SearchedPolicy, codec: TextCodec, context: Any = None) -> str:
    """Describe what each parameter of a policy does.

    Args:
        policy: the policy, connected to the spaces of an environment.
        codec: codec of the same environment, which names actions and states.
        context: context of the codec. Without it, states whose text depends on a context are not named.
    """
    if isinstance(policy, LinearPolicy):
        return _linear(policy, codec.action_texts)
    if isinstance(policy, TabularPolicy):
        return _table(policy, codec, context)
    return f"{policy.parameter_space().size} parameters determine it."


def _linear(policy: LinearPolicy, actions: Sequence[str] | None) -> str:
    (inputs, outputs), acted = policy.shape, policy.spaces[1]
    symbol = "score" if isinstance(acted, spaces.Discrete) else "a"
    formulas = [f"{symbol}[{j}] = {_sum(inputs, outputs, j, policy.bias)}" for j in range(outputs)]
    if inputs * outputs > _WRITTEN_IN_FULL:
        general = f"{symbol}[j] = sum over i of s[i] * params[i * {outputs} + j]"
        formulas = [general + f" + params[{inputs * outputs} + j]" * policy.bias + f", j from 0 to {outputs - 1}"]
    text = f"it is linear in the observation s, whose {inputs} numbers are s[0] to s[{inputs - 1}]: "
    text += "; ".join(formulas) + ". "
    if isinstance(acted, spaces.Discrete):
        names = actions or [f"action {int(acted.start) + index}" for index in range(outputs)]
        listed = ", ".join(f"score[{index}] is that of {name}" for index, name in enumerate(names))
        return text + f"The action with the highest score is taken; {listed}."
    bounds = zip(acted.low.ravel(), acted.high.ravel(), strict=True)
    limits = [f"a[{j}] from {low:g} to {high:g}" for j, (low, high) in enumerate(bounds)]
    return text + f"The numbers a are the action, clipped to its range: {', '.join(limits)}."


def _sum(inputs: int, outputs: int, output: int, bias: bool) -> str:
    """Write one output of a linear policy as a sum of products."""
    terms = [f"s[{index}] * params[{index * outputs + output}]" for index in range(inputs)]
    return " + ".join(terms + [f"params[{inputs * outputs + output}]"] * bias)


def _table(policy: TabularPolicy, codec: TextCodec, context: Any) -> str:
    observed, acted = policy.spaces
    first = int(observed.start)
    meaning = _meanings(int(acted.start), codec.action_texts or ())
    text = f"it is a table: params[i] is the action in state i{f' + {first}' if first else ''}. Actions: {meaning}."
    if codec.needs_context and context is None:
        return text
    texts = [codec.observation_to_text(state, context) for state in range(first, first + int(observed.n))]
    states = [codec.summary(state) for state in texts] if codec.needs_context else texts
    if all(state.isdigit() for state in states):
        return text
    return f"{text} States: {_meanings(first, states)}."


def _meanings(first: int, names: Sequence[str]) -> str:
    """List numbers with their names, or numbers alone where these are the names."""
    numbered = [(str(number), name) for number, name in enumerate(names, first)]
    if all(number == name for number, name in numbered):
        return ", ".join(names)
    return "; ".join(f"{number} is {name}" for number, name in numbered)


# Facts of known environments, from the templates in environment_facts.yaml.


@dataclass(frozen=True, kw_only=True)
class EnvironmentFacts:
    """Facts about an environment; each field contains one or more sentences."""

    world: str
    """The environment and the goal."""
    observation: str
    """The numbers or the index of an observation."""
    actions: str
    """The legal actions."""
    reward: str
    """The reward of a step."""
    end: str
    """When an episode ends before its time limit."""
    start: str = ""
    """How an episode starts if the reset has no options."""
    noise: str = "Nothing else is random."
    """What is random after the start."""

    def render(self, max_steps: int | None, known_start: bool = True) -> str:
        """Return the description of the environment, with one line for each fact.

        Args:
            max_steps: number of steps after which an episode is truncated; None for no limit.
            known_start: whether episodes start as :attr:`start` says.
        """
        cut = "" if max_steps is None else f"It is cut after {max_steps} steps."
        start = self.start if known_start else "options of the reset set the start."
        facts = {
            "Observation": self.observation,
            "Actions": self.actions,
            "Reward of a step": self.reward,
            "End of an episode": f"{self.end} {cut}",
            "Randomness": f"{start} {self.noise}",
        }
        return "\n".join([self.world, *(f"{name}: {_sentence(fact)}" for name, fact in facts.items())])


def environment_facts(native: Any) -> EnvironmentFacts | None:
    """Return the facts of a native environment without wrappers; None if the environment is not known.

    Subclasses of known environments are not known, because they may differ.
    """
    templates = _templates().get(class_names(native)[0])
    if templates is None:
        return None
    values = _common_values(native) | _VALUES.get(type(native).__name__, lambda _: {})(native)
    arguments, write = _arguments(native), _Writer()
    chosen = {
        fact: text if isinstance(text, str) else text["then" if arguments[text["if"]] else "else"]
        for fact, text in templates.items()
    }
    texts = {fact: write.format(text, env=native, arg=arguments, **values) for fact, text in chosen.items()}
    return EnvironmentFacts(**texts)


@cache
def _templates() -> dict[str, dict[str, Any]]:
    file = Path(__file__).with_name("environment_facts.yaml")
    return yaml.safe_load(file.read_text(encoding="utf-8"))


class _Writer(string.Formatter):
    """Formatter with the conversion ``!w``, which writes a weight as a factor, and a weight of 1 as nothing."""

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        """Return a value after a conversion; ``w`` is this class's own."""
        if conversion == "w":
            return "" if value == 1 else f"{value:g} * "
        return super().convert_field(value, conversion)  # pyright: ignore[reportArgumentType]


def _arguments(native: Any) -> dict[str, Any]:
    """Return the arguments that an environment was created with, defaults included, by name."""
    found: dict[str, Any] = {}
    for base in reversed(type(native).__mro__):  # a class overrides the defaults of its base classes
        found |= {name: one.default for name, one in inspect.signature(base.__init__).parameters.items()}
    return found | ({} if native.spec is None else native.spec.kwargs)


def _sentence(text: str) -> str:
    """Return the text with a capital first letter, unless it begins with a number or the name of a variable."""
    stripped = text.strip()
    return stripped[:1].upper() + stripped[1:] if stripped[:2].isalpha() else stripped


def _common_values(native: Any) -> dict[str, Any]:
    """Return the values of templates that the spaces and the metadata of an environment determine."""
    known, box = environment_metadata(native), native.action_space
    if isinstance(box, spaces.Box):
        listed = describe_quantities(known.action or ())
        actions = f"the numbers are, in order: {listed}; each is from {box.low[0]:g} to {box.high[0]:g}"
        assert np.ptp(box.low) == np.ptp(box.high) == 0, "all numbers of an action have the same range"
    else:
        actions = ", ".join(f"{number} is {name}" for number, name in enumerate(codec_for(native).action_texts or ()))
    return {
        "description": known.task or known.description,
        "observed": _observed_numbers(native.observation_space, known.observation) if known.observation else "",
        "actions": actions,
    }


def _observed_numbers(box: spaces.Box, quantities: Sequence[Quantity]) -> str:
    """List the numbers of an observation, with the bounds of their space if these are finite."""
    listed = [
        one._replace(range=(low, high) if np.isfinite((low, high)).all() else None)
        for one, low, high in zip(quantities, box.low.tolist(), box.high.tolist(), strict=True)
    ]
    return f"the numbers are, in order: {describe_quantities(listed)}."


def _slips(chance: float) -> str:
    """Describe the noise of moves that go in the direction of the action with a probability, else to a side."""
    straight, aside = (Fraction(part).limit_denominator(1000) for part in (chance, (1 - chance) / 2))
    return (
        f"Moves slip: with probability {straight} the move goes in the direction of the action, and in each of the two "
        f"directions at right angles to it with probability {aside}. Nothing else is random."
    )


def _frozen_lake_values(native: Any) -> dict[str, Any]:
    arguments, start = _arguments(native), ""
    if type(native).__name__ == "RandomMapsEnv":
        places = "The start is at the top left, the goal at the bottom right."
        start = "each episode has another random map, of which only your own cell is observed."
    elif arguments["desc"] is None and arguments["map_name"] is None:
        places, start = "The places of the holes are random and not known.", "The start is the cell S."
    else:
        cells = "".join(get_desc(native))
        starts, goals = ([str(i) for i, cell in enumerate(cells) if cell == letter] for letter in "SG")
        places = f"{_states('start S', starts)} {_states('goal G', goals)} Where the holes are is not told."
        start = "" if len(starts) == 1 else "the start is a random one of the cells S."
    still = "Nothing else is random." if start else "Nothing is random."
    noise = _slips(arguments["success_rate"]) if arguments["is_slippery"] else still
    return {"places": places, "start": start, "noise": noise}


def _states(name: str, found: list[str]) -> str:
    if len(found) == 1:
        return f"The {name} is state {found[0]}."
    return f"The {name} is any of the states {', '.join(found)}."


def _cliff_walking_values(native: Any) -> dict[str, Any]:
    rows, columns = native.shape
    first, goal = columns * (rows - 1), columns * rows - 1
    return {
        "rows": rows, "columns": columns, "last_row": rows - 1, "last_column": columns - 1,
        "first": first, "goal": goal, "cliff": (first + 1, goal - 1),
        "noise": _slips(1 / 3) if _arguments(native)["is_slippery"] else "Nothing is random.",
    }  # fmt: skip


def _track_values(native: Any) -> dict[str, Any]:
    return {"track": native.model.joint("slider").range}


def _leg_values(native: Any) -> dict[str, Any]:
    """Return when a body on legs has fallen, and which steps get no bonus because of it, in words."""
    arguments = _arguments(native)
    (lowest, highest), (back, front) = arguments["healthy_z_range"], arguments["healthy_angle_range"]
    height = f"{lowest:g} m or less" + f", or {highest:g} m or more" * bool(np.isfinite(highest))
    fallen = f"the height is {height}; or the pitch is {back:g} or less, or {front:g} or more"
    if type(native).__name__ == "HopperEnv":
        low, high = arguments["healthy_state_range"]
        fallen += f"; or another angle or a velocity is {low:g} or less, or {high:g} or more"
    ends = arguments["terminate_when_unhealthy"]
    steps = "the step that ends the episode early" if ends else f"steps after which {fallen}"
    return {"fallen": fallen, "fallen_steps": steps}


_VALUES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "FrozenLakeEnv": _frozen_lake_values,
    "RandomMapsEnv": _frozen_lake_values,
    "CliffWalkingEnv": _cliff_walking_values,
    "InvertedPendulumEnv": _track_values,
    "InvertedDoublePendulumEnv": _track_values,
    "HopperEnv": _leg_values,
    "Walker2dEnv": _leg_values,
}
"""Functions from a native environment to further values of its templates, by the name of its class."""
