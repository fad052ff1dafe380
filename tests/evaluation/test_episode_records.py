"""One episode, turn by turn."""

from dataclasses import replace

import imageio.v3
import numpy as np
import pytest
from PIL import Image, ImageSequence

from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.evaluation.episode_records import check_video, record_video, watch_episode, write_video
from lrl.evaluation.episodes import evaluate_policy
from lrl.evaluation.load import load_baseline
from lrl.policies.baselines import FixedActor
from lrl.policies.mlp import MLPPolicy

SEED = 20


# imageio-ffmpeg leaves its pipe to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize("name", ["random", "expert"])
@pytest.mark.parametrize("id", ["FrozenLake-v1", "CartPole-v1"])
def test_the_watched_episode_is_the_evaluated_one(name, id):
    loaded = load_baseline(name, GymnasiumEnvs(id))
    results = evaluate_policy(loaded.policy, loaded.env_factory, 6, SEED, 4)
    for index in (0, 5):
        turns = list(watch_episode(loaded.policy, loaded.env_factory, index, SEED))
        assert [turn.number for turn in turns] == list(range(results.lengths[index]))
        assert sum(turn.reward for turn in turns) == results.returns[index]
        assert turns[-1].success == results.successes[index]
        assert turns[-1].terminated or turns[-1].truncated
        assert not any(turn.terminated or turn.truncated for turn in turns[:-1])


def test_a_network_acts_natively_and_is_shown_in_text():
    envs = GymnasiumEnvs("CartPole-v1")
    policy = MLPPolicy((4,), init_seed=0)
    policy.connect(envs.codec)
    policy.connect_spaces(*envs.spaces)
    policy.configure()
    results = evaluate_policy(policy, envs, 3, SEED, 2)
    turns = list(watch_episode(policy, envs, 2, SEED))
    assert len(turns) == results.lengths[2] and sum(turn.reward for turn in turns) == results.returns[2]
    assert {turn.action for turn in turns} <= {"left", "right"}
    assert all(turn.observation.startswith("<observation>") and not turn.response for turn in turns)


class Stubborn(FixedActor):
    probability = 1.0

    def choose(self, observations, keys):
        return ["SIDEWAYS" if keys.turn[0] % 2 else " down "]


def test_a_watched_turn_shows_the_reason_of_an_invalid_response():
    envs = GymnasiumEnvs("FrozenLake-v1", invalid_penalty=-0.5)
    policy = Stubborn("direct")
    policy.connect(envs.codec)
    first, second = [turn for turn, _ in zip(watch_episode(policy, envs, 0, SEED), range(2))]
    assert (first.response, first.action, first.reason, first.reward) == (" down ", "DOWN", "", 0.0)
    assert (second.response, second.action, second.reward) == ("SIDEWAYS", "", -0.5)
    assert "LEFT, DOWN, RIGHT, UP" in second.reason


def test_the_drawing_is_of_the_state_before_the_action():
    loaded = load_baseline("expert", GymnasiumEnvs("FrozenLake-v1"))
    turns = list(watch_episode(loaded.policy, loaded.env_factory, 0, SEED, render_mode="ansi"))
    assert "\x1b[41mS\x1b[0mFFF" in turns[0].picture
    for turn in turns:  # the letter in the cursor's place is where the observation says
        row, column = int(turn.observation.split()[1]), int(turn.observation.split()[3])
        drawn = [line for line in turn.picture.splitlines() if line and not line.startswith("  (")]
        assert drawn[row].index("\x1b[41m") == column


def test_a_video_has_the_state_before_each_turn_and_the_last_state(tmp_path):
    loaded = load_baseline("random", GymnasiumEnvs("CartPole-v1"))
    turns = record_video(loaded.policy, loaded.env_factory, 0, SEED, tmp_path / "deep" / "episode.mp4")
    frames = imageio.v3.imread(tmp_path / "deep" / "episode.mp4")
    assert len(frames) == turns + 1 == len(list(watch_episode(loaded.policy, loaded.env_factory, 0, SEED))) + 1
    assert frames.shape[1:] == (400, 600, 3) and frames[0].std() > 0
    assert record_video(loaded.policy, loaded.env_factory, 0, SEED, tmp_path / "episode.gif") == turns
    with Image.open(tmp_path / "episode.gif") as gif:  # equal frames in a row are one frame that is shown for longer
        assert sum(frame.info["duration"] for frame in ImageSequence.Iterator(gif)) == 20 * (turns + 1)


def test_the_last_picture_is_of_the_state_that_ended_the_episode():
    loaded = load_baseline("expert", GymnasiumEnvs("FrozenLake-v1", kwargs={"desc": ["SFG"], "is_slippery": False}))
    turns = list(watch_episode(loaded.policy, loaded.env_factory, 0, SEED, render_mode="ansi"))
    assert [turn.last_picture is None for turn in turns] == [True, False]
    assert "\x1b[41mG" in turns[-1].last_picture


def test_a_video_of_odd_size_is_written(tmp_path):
    frames = [np.full((51, 33, 3), 40 * n, np.uint8) for n in range(5)]
    loaded = load_baseline("random", GymnasiumEnvs("CartPole-v1"))
    turn = next(watch_episode(loaded.policy, loaded.env_factory, 0, SEED))
    write_video([replace(turn, picture=frame) for frame in frames], tmp_path / "odd.mp4", loaded.env_factory)
    assert len(imageio.v3.imread(tmp_path / "odd.mp4")) == 5


def test_the_type_of_a_video_is_checked(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.mp4 or \.gif; .*episode\.avi does not"):
        check_video(tmp_path / "episode.avi")


class NoEnvs(EnvFactory):
    codec = None

    def make(self, num_envs, response_format):
        raise AssertionError("nothing is made that cannot be drawn")


def test_environments_that_cannot_be_rendered_raise_one_sentence():
    loaded = load_baseline("random", GymnasiumEnvs("FrozenLake-v1"))
    with pytest.raises(ValueError, match="as sketch; its render modes are human, ansi, rgb_array"):
        next(watch_episode(loaded.policy, loaded.env_factory, 0, SEED, render_mode="sketch"))
    with pytest.raises(ValueError, match="NoEnvs cannot be rendered"):
        next(watch_episode(loaded.policy, NoEnvs(), 0, SEED, render_mode="ansi"))
