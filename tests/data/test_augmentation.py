"""Augmented demonstrations are correct demonstrations."""

import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from lrl.codecs.babyai import COLORS, HELD_OUT, BabyAICodec
from lrl.codecs.numbers import NumberFormat
from lrl.data.sources import BabyAISymmetry, GaussianNoise
from lrl.envs.factory import GymnasiumEnvs

CODEC = BabyAICodec()
MIRROR = {"left": "right", "right": "left"}


def episode(name, seed):
    """Native observations and actions of minigrid's bot."""
    env = GymnasiumEnvs(f"lrl/BabyAI-{name}Local-v0", {"num_distractors": 5}).make_native()
    seen, _ = env.reset(seed=seed)
    observations, actions, ended = [], [], False
    while not ended:
        observations.append(seen)
        actions.append(env.unwrapped.expert_action())
        seen, _, terminated, truncated, _ = env.step(actions[-1])
        ended = terminated or truncated
    return observations, actions


def words(observation):
    return CODEC.observation_to_text(observation)


def swapped(text, names):
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)


def unmirrored(seed):
    """Return a random number generator with which no episode is mirrored."""
    return SimpleNamespace(permutation=np.random.default_rng(seed).permutation, integers=lambda high: 0)


def renaming(before, after):
    """Return the map of renamed words, over the missions and views of an episode."""
    names = {}
    for old, new in zip(before, after, strict=True):
        things = [re.findall(r"\w+", line) for line in (old["mission"], new["mission"])]
        for one, other in zip(*things, strict=True):
            assert names.setdefault(one, other) == other
    return names


@pytest.mark.parametrize("name", ["GoTo", "Pickup", "PutNext", "PickUpSeqGoTo", "Open"])
def test_an_augmented_episode_differs_only_in_names(name):
    symmetry = BabyAISymmetry()
    for seed in range(8):
        observations, actions = episode(name, seed)
        changed, same = symmetry.augment(observations, actions, unmirrored(seed))
        assert same == actions
        renaming(observations, changed)
        for old, new in zip(observations, changed, strict=True):
            places = [re.sub(rf"\b({'|'.join(COLORS)}|key|ball|box)\b", "_", words(one)) for one in (old, new)]
            assert places[0] == places[1], "things stay where they are, and walls are walls"
        found = re.findall(rf"({'|'.join(COLORS)}) (\w+)", changed[0]["mission"])
        assert not set(found) & HELD_OUT


def test_mission_and_view_are_renamed_consistently():
    observations, actions = episode("Pickup", 3)
    thing = " ".join(observations[0]["mission"].split()[-2:])
    changed, _ = BabyAISymmetry().augment(observations, actions, unmirrored(1))
    other = " ".join(changed[0]["mission"].split()[-2:])
    assert other != thing
    for old, new in zip(observations, changed, strict=True):
        assert words(old).count(thing) == words(new).count(other)


def test_the_mirror_image_swaps_left_and_right():
    mirrored = 0
    for seed in range(12):
        observations, actions = episode("GoTo", seed)
        plain, _ = BabyAISymmetry().augment(observations, actions, unmirrored(seed))
        changed, turned = BabyAISymmetry().augment(observations, actions, np.random.default_rng(seed))
        if turned == actions and all(map(np.array_equal, (o["image"] for o in plain), (o["image"] for o in changed))):
            continue
        mirrored += 1
        assert turned == [{0: 1, 1: 0}.get(action, action) for action in actions]
        for old, new in zip(plain, changed, strict=True):
            lines = Counter(swapped(words(old), MIRROR).split("\n"))
            assert lines == Counter(words(new).split("\n"))
    assert 2 <= mirrored <= 10


def test_missions_name_everything_except_held_out_pairs():
    observations, actions = episode("GoTo", 0)
    named = set()
    for draw in range(300):
        changed, _ = BabyAISymmetry().augment(observations, actions, np.random.default_rng(draw))
        named.add(tuple(changed[0]["mission"].split()[-2:]))
    assert named == {(color, kind) for color in COLORS for kind in ("key", "ball", "box")} - HELD_OUT


def test_augmentation_leaves_its_input_unchanged():
    observations, actions = episode("GoTo", 1)
    kept = [(one["image"].copy(), one["mission"]) for one in observations]
    BabyAISymmetry().augment(observations, actions, np.random.default_rng(0))
    for one, (image, mission) in zip(observations, kept, strict=True):
        assert np.array_equal(one["image"], image) and one["mission"] == mission


def noise(deviation, env="HalfCheetah-v5"):
    made = GaussianNoise(actions=deviation)
    made.connect(GymnasiumEnvs(env).spaces[1])
    return made


def test_noise_is_on_the_actions_alone_with_the_deviation_that_is_configured():
    observations = [np.full(3, float(step), dtype=np.float32) for step in range(4000)]
    actions = [np.full(6, 0.25, dtype=np.float32)] * 4001  # the last one was advised
    seen, changed = noise(0.03).augment(observations, actions, np.random.default_rng(0))
    np.testing.assert_array_equal(seen, observations)
    assert len(changed) == 4001 and changed[0].dtype == np.float32
    errors = np.array(changed) - np.array(actions)
    np.testing.assert_allclose(errors.std(0), 0.03, rtol=0.05)
    np.testing.assert_allclose(errors.mean(0), 0.0, atol=0.002)
    assert abs(np.corrcoef(errors.T)[0, 1]) < 0.05 and abs(np.corrcoef(errors[:-1, 0], errors[1:, 0])[0, 1]) < 0.05


@pytest.mark.parametrize("kind", ["integers", "decimals"])
def test_a_torque_at_its_bound_is_written_there_in_half_of_the_copies(kind):
    codec = GymnasiumEnvs("HalfCheetah-v5", numbers=NumberFormat(kind=kind)).codec
    actions = [np.full(6, 1.0, dtype=np.float32)] * 500
    changed = noise(0.03).augment([], actions, np.random.default_rng(1))[1]
    numbers = np.array([re.findall(r"[\d.]+", text) for text in map(codec.action_to_text, changed)]).astype(float)
    bound, deviation = {"integers": (999, 15), "decimals": (1.0, 0.03)}[kind]
    assert numbers.shape == (500, 6) and numbers.max() == bound
    assert 0.45 < (numbers == bound).mean() < 0.55
    assert 0.80 < (numbers >= bound - deviation).mean() < 0.88, "a half and .34"


@pytest.mark.parametrize("deviation", [0.0, float("inf")])
def test_noise_is_positive_and_finite(deviation):
    with pytest.raises(ValueError, match=r"demonstrations.augmentation.actions is .*; it must be (positive|finite)"):
        GaussianNoise(actions=deviation)


@pytest.mark.parametrize("env", ["CartPole-v1", "FrozenLake-v1"])
def test_actions_without_neighbours_get_no_noise(env):
    with pytest.raises(ValueError, match=r"augmentation is GaussianNoise, .*but the action space is Discrete"):
        noise(0.03, env)
