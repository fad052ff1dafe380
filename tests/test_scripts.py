"""What scripts say to a user's mistake."""

import runpy
import sys

import pytest


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("evaluate.py --policy random --env_kwargs [1]", "--env_kwargs is '[1]'; it must be a JSON object"),
        ("evaluate.py --policy random --env_id Nothing-v0", "env.id is 'Nothing-v0', which is not registered"),
        ("evaluate.py --policy best", "--policy is 'best'; it must be one of"),
        ("evaluate.py --checkpoint nowhere --env_id CartPole-v1", "--checkpoint is 'nowhere'"),
        ('evaluate.py --checkpoint nowhere --reset_options {"low":0}', "--reset_options is given without --env_id"),
        ("plot.py nowhere", "run is 'nowhere', which does not exist"),
        ("results.py keep x nowhere --title t", "nowhere"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_status_2(command, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", command.split(" "))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(f"scripts/{command.split(' ')[0]}", run_name="__main__")
    assert end.value.code == 2 and said in capsys.readouterr().err
