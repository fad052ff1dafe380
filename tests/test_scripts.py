"""What scripts say to a user's mistake."""

import io
import json
import runpy
import sys

import pytest


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("evaluate.py --policy random --env_kwargs [1]", "--env_kwargs is '[1]'; it must be a JSON object"),
        ("evaluate.py --policy random --env_id Nothing-v0", "env.id is 'Nothing-v0', which is not registered"),
        ("evaluate.py --policy best", "--policy is 'best'; it must be one of"),
        ("evaluate.py", "0 of --checkpoint, --model and --policy are given"),
        ("evaluate.py --policy random --checkpoint nowhere", "2 of --checkpoint, --model and --policy are given"),
        ("evaluate.py --policy mlp", "--policy is 'mlp', which needs weights"),
        (
            "evaluate.py --model assets/tiny-lm --choose --response_format think_answer",
            "prompt.response_format is 'think_answer'; it must be direct",
        ),
        ("evaluate.py --checkpoint nowhere --env_id CartPole-v1", "--checkpoint is 'nowhere'"),
        ('evaluate.py --checkpoint nowhere --reset_options {"low":0}', "--reset_options is given without --env_id"),
        ("watch.py --policy expert --env_id Pendulum-v1", "none is known for"),
        ("watch.py --checkpoint nowhere", "nowhere"),
        ("plot.py nowhere", "run is 'nowhere', which does not exist"),
        ("results.py keep x nowhere --title t", "nowhere"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_status_2(command, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", command.split(" "))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(f"scripts/{command.split(' ')[0]}", run_name="__main__")
    assert end.value.code == 2 and said in capsys.readouterr().err


def run_script(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", command.split(" "))
    runpy.run_path(f"scripts/{command.split(' ')[0]}", run_name="__main__")
    return capsys.readouterr().out


def test_a_model_chooses_among_the_legal_actions(monkeypatch, capsys, tmp_path):
    run_script(
        f"evaluate.py --model assets/tiny-lm --choose --env_id CartPole-v1 --episodes 2 --json {tmp_path}/report.json",
        monkeypatch,
        capsys,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["invalid_action_rate"] == 0 and report["episodes"] == 2 and report["policy"] == "assets/tiny-lm"


def test_an_episode_is_followed_turn_by_turn(monkeypatch, capsys, tmp_path):
    said = run_script(
        f"watch.py --policy expert --env_id FrozenLake-v1 --seed 3 --turns 2 --frames {tmp_path}", monkeypatch, capsys
    )
    assert said.startswith("expert in FrozenLake-v1, seed 3") and said.count("--- turn") == 2
    assert "response: <think></think><answer>LEFT</answer>\naction: LEFT   reward: 0" in said
    assert said.endswith("2 turns, return 0, stopped\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000.png", "0001.png"]


def test_a_person_plays_by_typing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("turn left\nfly\n\n"))
    monkeypatch.setattr(sys, "argv", ["watch.py", "--human", "--env_id", "lrl/BabyAI-GoToLocal-v0"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path("scripts/watch.py", run_name="__main__")
    said = capsys.readouterr()
    assert end.value.code == 0 and said.err.endswith("left\n")
    assert "action: turn left   reward: 0" in said.out and "action: none, the action must be one of" in said.out
    assert said.out.count("Goal:") == 3  # a person sees each observation once


@pytest.mark.slow
def test_figures_go_to_tensorboard_and_episodes_to_videos(monkeypatch, capsys, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said = run_script(
        f"evaluate.py --policy expert --env_id CartPole-v1 --episodes 2 --tensorboard {tmp_path}/tb "
        f"--capture_video {tmp_path}/video --num_videos 1",
        monkeypatch,
        capsys,
    )
    assert f"{tmp_path}/video/seed10000.mp4: 500 turns" in said
    assert [path.name for path in (tmp_path / "video").iterdir()] == ["seed10000.mp4"]
    events = EventAccumulator(f"{tmp_path}/tb").Reload()
    assert [point.value for point in events.Scalars("evaluation/return")] == [500.0]
