"""Commands as a user types them, and what they say to a user's mistake."""

import io
import json
import sys

import pytest
from commands import run_words

from lrl.cli.program import main


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("lrl evaluate --policy random --env_kwargs [1]", "--env_kwargs is '[1]'; it must be a JSON object"),
        ("lrl evaluate --policy random --env_id Nothing-v0", ": --env_id is 'Nothing-v0', which is not registered"),
        (
            'lrl evaluate --policy random --env_id FrozenLake-v1 --env_kwargs {"slip":1}',
            ": --env_kwargs is {'slip': 1}",
        ),
        (
            "lrl evaluate --model assets/tiny-lm --temperature 0.7 --invalid_retries 3 --retry_temperature 0",
            ": invalid_retries.temperature is 0",
        ),
        ("lrl evaluate --policy best", "--policy is 'best'; it must be one of"),
        ("lrl evaluate", "0 of --checkpoint, --model and --policy are given"),
        ("lrl evaluate --policy random --checkpoint nowhere", "2 of --checkpoint, --model and --policy are given"),
        (
            "lrl evaluate --model assets/tiny-lm --choose --response_format think_answer",
            ": --response_format is 'think_answer'; it must be direct",
        ),
        ("lrl evaluate --checkpoint nowhere --env_id CartPole-v1", "--checkpoint is 'nowhere'"),
        ('lrl evaluate --checkpoint nowhere --reset_options {"low":0}', "--reset_options is given without --env_id"),
        ("lrl watch --policy expert --env_id Pendulum-v1", "no expert is known for"),
        ("lrl watch --checkpoint nowhere", "nowhere"),
        ("lrl plot nowhere", "run is 'nowhere', which does not exist"),
        ("python scripts/results.py keep x nowhere --title t --all_started", "nowhere"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_status_2(command, said):
    done = run_words(command.split(" "))
    assert done.returncode == 2 and said in done.stderr


def output_of(command):
    done = run_words(command.split(" "))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_model_chooses_among_the_legal_actions(tmp_path):
    output_of(
        f"lrl evaluate --model assets/tiny-lm --choose --env_id CartPole-v1 --episodes 2 --json {tmp_path}/report.json"
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["invalid_action_rate"] == 0 and report["episodes"] == 2 and report["policy"] == "assets/tiny-lm"


def test_an_episode_is_shown_turn_by_turn(tmp_path):
    video = tmp_path / "episode.gif"
    command = "lrl watch --policy expert --env_id FrozenLake-v1 --seed 3 --turns 2"
    said = output_of(f"{command} --frames {tmp_path / 'frames'} --video {video}")
    assert said.startswith("expert in FrozenLake-v1, seed 3") and said.count("--- turn") == 2
    assert "response: <think></think><answer>LEFT</answer>\naction: LEFT   reward: 0" in said
    assert said.endswith(f"2 turns, return 0, stopped\nvideo: {video}\n") and video.stat().st_size > 0
    assert sorted(path.name for path in (tmp_path / "frames").iterdir()) == ["0000.png", "0001.png"]


def test_the_return_of_a_watched_episode_is_the_sum_of_its_rewards():
    maps = '{"desc":["SFG"],"is_slippery":false}'
    said = output_of(f"lrl watch --policy expert --env_id FrozenLake-v1 --env_kwargs {maps}")
    assert "action: RIGHT   reward: 1" in said and "\n2 turns, return 1, " in said


def test_a_person_plays_by_typing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("turn left\nfly\n\n"))
    monkeypatch.setattr(sys, "argv", ["lrl", "watch", "--human", "--env_id", "lrl/BabyAI-GoToLocal-v0"])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert end.value.code == 0 and said.err.endswith("left\n")
    assert "action: turn left   reward: 0" in said.out and "action: none, the action must be one of" in said.out
    assert said.out.count("Goal:") == 3  # a person sees each observation once


@pytest.mark.slow
def test_results_are_written_to_tensorboard_and_episodes_to_videos(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said = output_of(
        f"lrl evaluate --policy expert --env_id CartPole-v1 --episodes 2 --tensorboard {tmp_path}/tb "
        f"--capture_video {tmp_path}/video --num_videos 1"
    )
    assert f"{tmp_path}/video/seed10000.mp4: 500 turns" in said
    assert [path.name for path in (tmp_path / "video").iterdir()] == ["seed10000.mp4"]
    events = EventAccumulator(f"{tmp_path}/tb").Reload()
    assert [point.value for point in events.Scalars("evaluation/return")] == [500.0]
