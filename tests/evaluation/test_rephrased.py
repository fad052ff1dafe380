"""Rephrased prompts: which texts change, that nothing else does, and that the policy is restored afterwards."""

import json

import numpy as np
import pytest

from lrl.cli.evaluate import main
from lrl.codecs.babyai import BabyAICodec
from lrl.codecs.codec import InvalidActionError
from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.exact import exact_evaluation, is_frozen_lake, lakes_of
from lrl.evaluation.load import load_model
from lrl.evaluation.rephrased import Phrasing, RephrasedCodec, read_phrasings, rephrased
from lrl.types import PastTurn, RandomKeys

MAP = ("SFFF", "FHFH", "FFFH", "HFFG")
FROZEN_LAKE, BABYAI = "assets/rephrased/frozen_lake.yaml", "assets/rephrased/babyai.yaml"


def test_an_empty_phrasing_changes_nothing():
    plain = FrozenLakeCodec()
    same = RephrasedCodec(plain, Phrasing())
    assert same.description == plain.description and same.action_texts == plain.action_texts
    assert same.observation_to_text(5, MAP) == plain.observation_to_text(5, MAP)
    assert same.unwrapped is plain and plain.unwrapped is plain


def test_names_change_in_the_description_and_both_ways_of_an_action():
    codec = RephrasedCodec(FrozenLakeCodec(), Phrasing(actions={"LEFT": "WEST", "UP": "NORTH"}))
    assert codec.description.endswith("Actions: WEST, DOWN, RIGHT, NORTH.")
    assert codec.action_texts == ("WEST", "DOWN", "RIGHT", "NORTH")
    assert [codec.text_to_action(text) for text in codec.action_texts] == [0, 1, 2, 3]
    assert [codec.action_to_text(number) for number in range(4)] == list(codec.action_texts)
    assert codec.text_to_action(" north ") == 3
    with pytest.raises(InvalidActionError, match="one of WEST, DOWN, RIGHT, NORTH"):
        codec.text_to_action("LEFT")


def test_names_may_be_swapped():
    codec = RephrasedCodec(FrozenLakeCodec(), Phrasing(actions={"LEFT": "RIGHT", "RIGHT": "LEFT"}))
    assert codec.text_to_action("RIGHT") == 0 and codec.action_to_text(2) == "LEFT"
    assert codec.rephrase_response("<think>LEFT</think><answer>RIGHT</answer>") == (
        "<think>RIGHT</think><answer>LEFT</answer>"
    )


def test_another_order_changes_the_description_only():
    codec = RephrasedCodec(BabyAICodec(), read_phrasings(BABYAI)["order"])
    assert codec.description.endswith("Actions: toggle, drop, pick up, go forward, turn right, turn left.")
    assert codec.action_texts == BabyAICodec().action_texts


def test_names_of_actions_in_the_text_before_their_list_keep_their_places():
    car = GymnasiumEnvs("MountainCar-v0").codec
    assert RephrasedCodec(car, Phrasing(observations={"x": "y"})).description == car.description
    swapped = RephrasedCodec(car, Phrasing(actions={"left": "west", "right": "east"})).description
    assert "the flag on the east hill" in swapped and swapped.endswith("Actions: west, coast, east.")
    order = RephrasedCodec(car, Phrasing(order=("right", "coast", "left"))).description
    assert "the flag on the right hill" in order and order.endswith("Actions: right, coast, left.")


def test_observations_are_replaced_by_regular_expressions_one_after_the_other():
    codec = RephrasedCodec(FrozenLakeCodec(), read_phrasings(FROZEN_LAKE)["words"])
    assert codec.observation_to_text(6, MAP).startswith("You stand in row 1, column 2.\nS F F F\nF H A H\n")
    assert "frozen pond" in codec.description


@pytest.mark.parametrize(("codec", "file"), [(FrozenLakeCodec(), FROZEN_LAKE), (BabyAICodec(), BABYAI)])
def test_the_phrasings_that_ship_differ_from_the_original_and_keep_every_action(codec, file):
    for phrasing in read_phrasings(file).values():
        other = RephrasedCodec(codec, phrasing)
        assert other.description != codec.description
        assert all(name.lower() in other.description.lower() for name in other.action_texts)
        assert len({other.text_to_action(name) for name in other.action_texts}) == len(codec.action_texts)


@pytest.mark.parametrize(
    ("phrasing", "message"),
    [
        (
            Phrasing(actions={"WEST": "LEFT"}),
            "actions names 'WEST', which is not an action; the actions are LEFT, DOWN",
        ),
        (Phrasing(actions={"LEFT": "UP"}), "gives two actions the same name"),
        (Phrasing(order=("LEFT", "UP")), "order is .*; it must name each of LEFT, DOWN, RIGHT, UP once"),
        (Phrasing(observations={"(": ""}), "which is not a regular expression"),
    ],
)
def test_phrasings_that_do_not_fit_raise(phrasing, message):
    with pytest.raises(ValueError, match=message):
        RephrasedCodec(FrozenLakeCodec(), phrasing)


@pytest.mark.parametrize(
    ("content", "message"),
    [("[a]", "must map names"), ("a: {word: b}", "a has 'word': 'b'; it must be"), ("a: b", "a has 'b'")],
)
def test_files_that_are_no_phrasings_raise(tmp_path, content, message):
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_phrasings(str(tmp_path / "a.yaml"))
    with pytest.raises(ValueError, match="there is no such file"):
        read_phrasings(str(tmp_path / "b.yaml"))


@pytest.fixture(scope="module")
def loaded():
    return load_model("assets/tiny-lm", GymnasiumEnvs("FrozenLake-v1"), {"response_format": "direct"}, choose=True)


def chosen(loaded):
    codec = loaded.policy.codec
    texts = [codec.observation_to_text(state, MAP) for state in range(4)]
    keys = RandomKeys(seed=0, purpose="test", collection=0, env=np.arange(4), turn=np.zeros(4, dtype=int))
    return loaded.policy.act(texts, [()] * 4, keys, loaded.policy.sampling_at(1.0))


def test_a_policy_reads_and_writes_other_words_and_is_restored_afterwards(loaded):
    before = chosen(loaded)
    phrasing = read_phrasings(FROZEN_LAKE)["names"]
    with rephrased(loaded, phrasing) as changed:
        assert "Actions: WEST, SOUTH, EAST, NORTH." in changed.policy.prompt_text("x", ())
        assert set(chosen(changed).actions) <= {"WEST", "SOUTH", "EAST", "NORTH"}
        assert is_frozen_lake(changed.env_factory)
        decided = exact_evaluation(changed.policy, lakes_of(changed.env_factory)).decisions[0]
        assert decided.sum() == 11  # every state has a legal action
    after = chosen(loaded)
    assert after.actions == before.actions and np.array_equal(after.logprobs, before.logprobs)


def test_examples_are_rephrased(loaded):
    turn = PastTurn(observation="row 1 column 0\nA", response="LEFT")
    plain = loaded.policy.prompt
    loaded.policy.prompt = plain.with_examples([turn])
    try:
        with rephrased(loaded, Phrasing(actions={"LEFT": "WEST"}, observations={"row 1": "line 1"})) as changed:
            assert changed.policy.prompt.examples == (PastTurn("line 1 column 0\nA", "WEST"),)
        assert loaded.policy.prompt.examples == (turn,)
    finally:
        loaded.policy.prompt = plain


@pytest.mark.parametrize("system", ["", "Answer LEFT or UP."])
def test_what_only_the_system_message_says_is_not_rephrased_where_it_is_fixed(system):
    envs = GymnasiumEnvs("FrozenLake-v1")
    fixed = load_model("assets/tiny-lm", envs, {"response_format": "direct", "system": system}, choose=True)
    with rephrased(fixed, Phrasing(observations={"row": "line"})) as changed:
        assert changed.policy.prompt_text(changed.policy.codec.observation_to_text(0, MAP), ()).count("line 0") == 1
    for phrasing in read_phrasings(FROZEN_LAKE).values():
        refused = pytest.raises(ValueError, match=f"the policy's prompt.system is {system!r}; give a file")
        with refused, rephrased(fixed, phrasing):
            pass


def test_the_view_of_babyai_in_other_words():
    text = "Goal: go to the red ball\nYou see a wall 1 step left\nYou see a red ball 2 steps right and 1 step forward"
    words, positions, colours = (
        RephrasedCodec(BabyAICodec(), phrasing).rephrase_observation(text)
        for phrasing in read_phrasings("assets/rephrased/babyai_view.yaml").values()
    )
    assert words.startswith("Your task is to go to the red ball\nThere is a wall 1 step left\nThere is a red ball")
    assert positions.endswith("You see a wall left 1\nYou see a red ball right 2 and forward 1")
    assert colours == text.replace("red", "orange")


@pytest.mark.slow
def test_the_table_has_a_row_for_every_phrasing(tmp_path, capsys):
    options = ["--model", "assets/tiny-lm", "--choose", "--episodes", "3", "--json", str(tmp_path / "a.json")]
    main("lrl evaluate", [*options, "--rephrase", FROZEN_LAKE])
    printed = capsys.readouterr().out
    assert all(f"model, {name}" in printed for name in ("words", "order", "names"))
    assert printed.count("exact success") == 4
    report = json.loads((tmp_path / "a.json").read_text())
    assert list(report["rephrased"]) == ["words", "order", "names"] and report["rephrased"]["names"]["episodes"] == 3
    with pytest.raises(SystemExit):
        main("lrl evaluate", ["--policy", "random", "--episodes", "2", "--rephrase", FROZEN_LAKE])
    assert "--rephrase needs a policy that reads prompts" in capsys.readouterr().err
