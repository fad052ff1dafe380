"""Tests of the random and the constant actor."""

import numpy as np
import pytest

from lrl.codecs.codec import TextCodec
from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.policies.baselines import ConstantActor, FixedActor, RandomActor
from lrl.prompts import get_response_format
from lrl.types import RandomKeys


def keys(rows: int, turn: int = 0) -> RandomKeys:
    return RandomKeys(seed=3, purpose="evaluation", collection=0, env=np.arange(rows), turn=np.full(rows, turn))


def said(policy: FixedActor, observations: list[str]) -> list[str]:
    policy.connect(FrozenLakeCodec())
    decisions = policy.act(observations, [()] * len(observations), keys(len(observations)), policy.sampling)
    assert decisions.response_mask.shape == decisions.logprobs.shape == (len(observations), 1)
    return [get_response_format(policy.response_format).extract(text) for text in decisions.actions]


def test_the_random_actor_takes_every_action_equally_often() -> None:
    texts = said(RandomActor(), [""] * 4000)
    counts = [texts.count(text) for text in FrozenLakeCodec().action_texts]
    assert sum(counts) == 4000 and all(abs(count - 1000) < 100 for count in counts)


def test_random_actions_depend_only_on_the_keys() -> None:
    policy = RandomActor("direct")
    policy.connect(FrozenLakeCodec())
    together = policy.act([""] * 6, [()] * 6, keys(6), policy.sampling).actions
    for row in range(6):
        alone = RandomKeys(seed=3, purpose="evaluation", collection=0, env=np.array([row]), turn=np.zeros(1))
        assert policy.act([""], [()], alone, policy.sampling).actions[0] == together[row]
    assert list(together) != list(policy.act([""] * 6, [()] * 6, keys(6, turn=1), policy.sampling).actions)


@pytest.mark.parametrize("name", ["direct", "think_answer", "final_answer"])
def test_the_constant_actor_writes_its_action_in_every_format(name: str) -> None:
    assert said(ConstantActor("right", response_format=name), ["", ""]) == ["RIGHT", "RIGHT"]
    assert said(ConstantActor(response_format=name), [""]) == ["LEFT"]


def test_a_constant_action_that_does_not_exist_raises() -> None:
    with pytest.raises(ValueError, match=r"policy\.action is 'JUMP', which is not legal: .* one of LEFT"):
        said(ConstantActor("JUMP"), [""])


class FreeTextCodec(TextCodec):
    """Codec without a finite action space that does not say how actions are drawn."""

    description = "Write anything."
    action_texts = None

    def observation_to_text(self, observation, context=None):
        return str(observation)

    def text_to_action(self, text):
        return text

    def action_to_text(self, action):
        return action


@pytest.mark.parametrize(
    ("actor", "name"), [(RandomActor(), "random_action_text"), (ConstantActor(), "default_action_text")]
)
def test_a_codec_that_does_not_know_the_action_of_an_actor_raises(actor: FixedActor, name: str) -> None:
    def play(actor: FixedActor) -> None:
        actor.connect(FreeTextCodec())
        actor.choose([""], keys(1))

    with pytest.raises(ValueError, match=f"codec is FreeTextCodec, whose action_texts are None; .* override {name}"):
        play(actor)
