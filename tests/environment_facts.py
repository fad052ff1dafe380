"""Facts of environments and the environments themselves, which tests compare."""

import re

from lrl.envs.factory import GymnasiumEnvs
from lrl.search.described import environment_facts


def facts_of(id, **kwargs):
    """Return the facts of an environment, and the environment."""
    native = GymnasiumEnvs(id, kwargs).make_native().unwrapped
    return environment_facts(native), native


def numbers(text):
    """Return all numbers in a text."""
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)]


def last_step(env, act):
    """Play one episode: its rewards, the observations before and after the last step, and whether that terminated."""
    observation, _ = env.reset(seed=0)
    rewards, ended = [], False
    while not ended:
        before = observation
        observation, reward, terminated, truncated, _ = env.step(act(observation))
        rewards.append(reward)
        ended = terminated or truncated
    return rewards, before, observation, terminated
