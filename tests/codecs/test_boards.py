"""Tests of the codecs of boards."""

import numpy as np
import pytest

from lrl.codecs.boards import BOARDS, PlainBoardCodec, RagenBoardCodec
from lrl.codecs.codec import InvalidActionError
from lrl.envs.factory import GymnasiumEnvs

CODECS = [codec(board) for codec in (RagenBoardCodec, PlainBoardCodec) for board in BOARDS]
NAMES = [f"{type(codec).__name__}-{board}" for codec, board in zip(CODECS, [*BOARDS] * 2, strict=True)]


def observation(board, rows):
    """Return the one-hot observation of rows of RAGEN's symbols."""
    symbols = "".join(symbol for symbol, _, _ in BOARDS[board].kinds)
    return np.eye(len(symbols), dtype=np.uint8)[[[symbols.index(symbol) for symbol in row] for row in rows]]


ROOM = ["######", "#_O__#", "#_X√P#", "####_#", "######", "######"]
LAKE = ["__O_", "P___", "_O__", "___G"]


def test_texts_of_sokoban_are_those_of_ragen_and_plain_ones():
    seen = observation("sokoban", ROOM)
    assert RagenBoardCodec("sokoban").observation_to_text(seen) == "State:\n" + "\n".join(ROOM)
    assert PlainBoardCodec("sokoban").observation_to_text(seen) == (
        "row 2 column 4\nW W W W W W\nW F T F F W\nW F B D A W\nW W W W F W\nW W W W W W\nW W W W W W"
    )
    on_target = observation("sokoban", ["####", "#XS#", "####"])
    assert RagenBoardCodec("sokoban").observation_to_text(on_target) == "State:\n####\n#XS#\n####"
    assert PlainBoardCodec("sokoban").observation_to_text(on_target) == "row 1 column 2\nW W W W\nW B Y W\nW W W W"


@pytest.mark.parametrize("codec", [RagenBoardCodec("sokoban"), PlainBoardCodec("sokoban")])
def test_the_summary_of_a_text_is_the_place_of_the_player(codec):
    assert codec.summary(codec.observation_to_text(observation("sokoban", ROOM))) == "row 2 column 4"


def test_texts_of_frozen_lake_are_those_of_ragen_and_plain_ones():
    seen = observation("frozen_lake", LAKE)
    assert RagenBoardCodec("frozen_lake").observation_to_text(seen) == "State:\n__O_\nP___\n_O__\n___G"
    assert PlainBoardCodec("frozen_lake").observation_to_text(seen) == (
        "row 1 column 0\nF F H F\nA F F F\nF H F F\nF F F G"
    )
    ended = [observation("frozen_lake", [f"{player}_", "_O"]) for player in "X√"]
    assert [RagenBoardCodec("frozen_lake").observation_to_text(one) for one in ended] == [
        "State:\nX_\n_O",
        "State:\n√_\n_O",
    ]


def test_descriptions_list_symbols_and_actions_as_ragen_does():
    assert RagenBoardCodec("sokoban").description.split("\n")[1:] == [
        "The meaning of each symbol in the state is:",
        "#: wall, _: empty, O: target, √: box on target, X: box, P: player, S: player on target",
        "Your available actions are:",
        "Up, Down, Left, Right",
        "You take one action per turn.",
    ]
    lake = RagenBoardCodec("frozen_lake", is_slippery=True).description
    assert "P: player, _: empty, O: hole, G: goal, X: player in hole, √: player on goal" in lake
    assert "Left, Down, Right, Up" in lake and "slippery" in lake
    assert "slippery" not in RagenBoardCodec("frozen_lake").description
    assert "A is you, F is empty" in PlainBoardCodec("frozen_lake").description


@pytest.mark.parametrize("codec", CODECS, ids=NAMES)
def test_observations_and_actions_survive_a_round_trip(codec):
    id = "Sokoban2Boxes" if codec.board is BOARDS["sokoban"] else "RagenFrozenLake"
    env = GymnasiumEnvs(f"lrl/{id}-v0").make_native()
    rng = np.random.default_rng(0)
    for seed in range(20):
        seen, _ = env.reset(seed=seed)
        ended = False
        while not ended:
            text = codec.observation_to_text(seen)
            np.testing.assert_array_equal(codec.text_to_observation(text), seen)
            seen, _, terminated, truncated, _ = env.step(int(rng.integers(4)))
            ended = terminated or truncated
        np.testing.assert_array_equal(codec.text_to_observation(codec.observation_to_text(seen)), seen)
    for action, text in enumerate(codec.action_texts):
        assert codec.action_to_text(action) == text
        assert codec.text_to_action(text) == codec.text_to_action(f" {text.swapcase()}\n") == action


@pytest.mark.parametrize("text", ["", "||", "Push", "Push || Right", "0", "Right Right"])
def test_any_other_action_is_invalid(text):
    with pytest.raises(InvalidActionError, match="Up, Down, Left, Right"):
        RagenBoardCodec("sokoban").text_to_action(text)
    with pytest.raises(InvalidActionError, match="UP, DOWN, LEFT, RIGHT"):
        PlainBoardCodec("sokoban").text_to_action(text)


def test_the_first_action_of_a_sequence_is_taken_in_ragens_format_only():
    assert RagenBoardCodec("sokoban").text_to_action("Right || Up || Fly") == 3
    assert RagenBoardCodec("sokoban").text_to_action("|| down ||") == 1
    with pytest.raises(InvalidActionError):
        PlainBoardCodec("sokoban").text_to_action("RIGHT || UP")


def test_invalid_settings_and_texts_raise():
    with pytest.raises(ValueError, match="codec.board is 'chess'; it must be one of frozen_lake, sokoban"):
        RagenBoardCodec("chess")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="codec.is_slippery is true for codec.board 'sokoban'; it must be false"):
        PlainBoardCodec("sokoban", is_slippery=True)
    with pytest.raises(ValueError, match=r"shape \(4, 4, 6\); it must have shape \(rows, columns, 7\)"):
        PlainBoardCodec("sokoban").observation_to_text(np.zeros((4, 4, 6)))
    with pytest.raises(ValueError, match="the observation contains no player"):
        PlainBoardCodec("sokoban").observation_to_text(observation("sokoban", ["##", "#_"]))
    for text in ("State:\n##\n#", "State:\n##\n#?", "State:"):
        with pytest.raises(ValueError, match="must be a rectangle"):
            RagenBoardCodec("sokoban").text_to_observation(text)
