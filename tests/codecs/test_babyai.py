"""Tests of the BabyAI codec."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest

import lrl.envs  # noqa: F401 (registers the environments)
from lrl.codecs import babyai
from lrl.codecs.babyai import BabyAICodec, describe_view
from lrl.codecs.codec import InvalidActionError
from lrl.codecs.registry import codec_for
from lrl.prompts import RESPONSE_FORMATS

GOLDEN = Path(__file__).parents[1] / "golden" / "babyai.txt"
COLORS = {color[0]: index for index, color in enumerate(babyai.COLORS[:5])} | {"e": 5}
THINGS = {"k": (5, 0), "b": (6, 0), "x": (7, 0), "O": (4, 0), "C": (4, 1), "L": (4, 2)}
PLAIN = {"?": (0, 0, 0), ".": (1, 0, 0), "A": (1, 0, 0), "#": (2, 5, 0)}


class Scene(NamedTuple):
    """A view and its expected sentences."""

    name: str
    image: np.ndarray
    sentences: list[str]


def cell(token: str) -> tuple[int, int, int]:
    if token in PLAIN:
        return PLAIN[token]
    kind, state = THINGS[token[1]]
    return kind, COLORS[token[0]], state


def scene(text: str) -> Scene:
    name, *lines = [line for line in text.splitlines() if line]
    rows = [line.split() for line in lines if line[0] not in "+>"]
    assert all(len(row) == 7 for row in rows) and rows[-1][3] == "A", name
    image = np.zeros((7, 7, 3), dtype=np.uint8)
    for row, tokens in enumerate(rows, 7 - len(rows)):
        for column, token in enumerate(tokens):
            image[column, row] = cell(token)
    for line in lines:
        if line[0] == "+":
            image[3, 6] = cell(line[2:])
    return Scene(name, image, [line[2:] for line in lines if line[0] == ">"])


SCENES = [scene(part) for part in GOLDEN.read_text().split("\n= ")[1:]]


@pytest.mark.parametrize("scene", SCENES, ids=[scene.name for scene in SCENES])
def test_a_scene_has_the_expected_text(scene: Scene) -> None:
    assert describe_view(scene.image) == scene.sentences


def test_at_least_forty_golden_scenes_cover_all_colours_objects_and_states() -> None:
    assert len(SCENES) >= 40
    said = "\n".join(sentence for scene in SCENES for sentence in scene.sentences)
    for word in (*babyai.COLORS, "key", "ball", "box", *babyai.DOOR_STATES):
        assert word in said
    for steps in ("1 step", *(f"{n} steps" for n in range(2, 7))):
        assert f"You see a wall {steps} forward" in said


def test_colours_objects_and_states_have_the_indices_of_minigrid() -> None:
    from minigrid.core import constants

    assert {name: index for index, name in enumerate(babyai.COLORS)} == constants.COLOR_TO_IDX
    assert {name: index for index, name in enumerate(babyai.OBJECTS)} == constants.OBJECT_TO_IDX
    assert {name: index for index, name in enumerate(babyai.DOOR_STATES)} == constants.STATE_TO_IDX


def test_the_goal_is_the_first_line_of_every_observation() -> None:
    observation = {"image": SCENES[1].image, "direction": 0, "mission": "go to the red ball"}
    text = BabyAICodec().observation_to_text(observation)
    assert text == "Goal: go to the red ball\nYou see a wall 1 step forward"


def test_every_action_text_is_read_back_exactly() -> None:
    codec = BabyAICodec()
    assert codec.action_texts == ("turn left", "turn right", "go forward", "pick up", "drop", "toggle")
    for action, text in enumerate(codec.action_texts):
        assert codec.text_to_action(codec.action_to_text(action)) == action
        assert text in codec.description


@pytest.mark.parametrize(
    "text", ["", "Turn left", "turn  left", " drop", "DROP", "left", "0", "done", "drop.", "ｄｒｏｐ"]
)
def test_any_other_text_raises_an_error_that_lists_the_legal_actions(text: str) -> None:
    with pytest.raises(InvalidActionError, match="turn left, turn right, go forward, pick up, drop, toggle"):
        BabyAICodec().text_to_action(text)


def test_random_text_raises_only_invalid_action_errors() -> None:
    rng, codec = random.Random(0), BabyAICodec()
    for _ in range(2000):
        text = "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(20)))
        for form in RESPONSE_FORMATS.values():
            for response in (text, form.render(text), form.render("drop", text)):
                try:
                    assert codec.text_to_action(form.extract(response)) in range(6)
                except InvalidActionError as error:
                    assert str(error)


def test_levels_of_minigrid_use_the_codec_and_have_no_expert() -> None:
    codec = codec_for(gym.make("minigrid:MiniGrid-Empty-5x5-v0", disable_env_checker=True))
    assert isinstance(codec, BabyAICodec) and not codec.has_expert


def test_images_with_a_wrong_shape_or_an_unknown_cell_raise() -> None:
    with pytest.raises(ValueError, match=r"observation.image has shape \(5, 5, 3\); it must be \(7, 7, 3\)"):
        describe_view(np.zeros((5, 5, 3), dtype=np.uint8))
    image = np.ones((7, 7, 3), dtype=np.uint8)
    image[2, 2] = 77, 0, 0
    with pytest.raises(ValueError, match=r"contains the cell \[77, 0, 0\]"):
        describe_view(image)


@pytest.mark.parametrize(
    ("lines", "summary"),
    [
        (
            ["Goal: go to the red ball", "You see a red ball 2 steps left and 1 step forward"],
            "red ball 2 left 1 forward",
        ),
        (["Goal: pick up a red ball", "You see a red ball 1 step forward"], "red ball 1 forward"),
        (
            ["Goal: go to a red ball", "You see a red box 1 step forward", "You see a blue ball 2 steps right"],
            "no red ball",
        ),
        (["Goal: go to a key", "You see a red key 3 steps left", "You see a grey key 2 steps left"], "key 2 left"),
        (
            ["Goal: open the grey door", "You carry a grey key", "You see a locked grey door 1 step left"],
            "grey door 1 left",
        ),
        (["Goal: put the red box next to a key", "You carry a red box", "You see a key 1 step left"], "carry red box"),
        (["Goal: pick up a red ball"], "no red ball"),
        (["Goal: put a ball next to a key", "You carry a blue ball"], "carry ball"),
    ],
)
def test_summary_is_the_position_of_the_goal_object(lines, summary):
    assert BabyAICodec().summary("\n".join(lines)) == summary
    assert len(summary.split()) <= 7


@pytest.mark.parametrize(
    ("line", "ahead"),
    [
        ("You see a red ball 1 step forward", "ball"),
        ("You see a wall 1 step forward", "wall"),
        ("You see a open grey door 1 step forward", "door"),
        ("You see a red ball 2 steps left and 1 step forward", "nothing"),
        ("You see a red ball 11 steps forward", "nothing"),
        ("You see a wall 1 step left", "nothing"),
        ("You carry a red ball", "nothing"),
    ],
)
def test_ahead_names_what_is_in_the_next_cell(line, ahead):
    assert BabyAICodec().ahead(f"Goal: go to the red ball\n{line}\nYou see a blue key 2 steps forward") == ahead


def test_symbolic_observations_have_the_content_of_the_text() -> None:
    settings = {"tasks": ["goto", "pickup"], "num_distractors": [0, 3, 5]}
    worded = gym.make("lrl/BabyAI-MixedTrainLocal-v0", **settings)
    symbolic = gym.make("lrl/BabyAI-MixedTrainLocal-v0", symbolic=True, **settings)
    vectors = set()
    for seed in range(30):
        observation, vector = worded.reset(seed=seed)[0], symbolic.reset(seed=seed)[0]
        assert symbolic.observation_space.contains(vector)
        assert BabyAICodec().observation_to_text(vector) == BabyAICodec().observation_to_text(observation)
        vectors.add(vector.tobytes())
    assert len(vectors) == 30


@pytest.mark.parametrize("symbolic", [False, True])
def test_observations_may_contain_the_last_actions(symbolic):
    settings = {"num_distractors": 3, "symbolic": symbolic}
    plain = gym.make("lrl/BabyAI-GoToLocal-v0", **settings)
    env = gym.make("lrl/BabyAI-GoToLocal-v0", last_actions=2, **settings)
    text = BabyAICodec().observation_to_text
    for _ in range(2):  # a second episode begins without last actions
        before, observation = plain.reset(seed=1)[0], env.reset(seed=1)[0]
        assert env.observation_space.contains(observation) and text(observation) == text(before)
        for action, names in ((0, "turn left"), (3, "turn left, pick up"), (5, "pick up, toggle")):
            before, observation = plain.step(action)[0], env.step(action)[0]
            assert env.observation_space.contains(observation)
            assert text(observation) == text(before).replace("\n", f"\nYou chose {names}\n", 1)
