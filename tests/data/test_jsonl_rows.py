"""Rows of JSON Lines files: native observations and actions, parsed from text and written as the environment does."""

import json

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from lrl.codecs.numbers import NumberFormat
from lrl.codecs.spaces import SpaceCodec
from lrl.data.jsonl import write_jsonl
from lrl.data.rows import JsonlRows
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.envs.minari_storage import DatasetWriter
from lrl.envs.prompt_env import PromptEnvs
from lrl.rewards.behaviour_cloning import BehaviourCloningReward, BoundedCloningReward

PENDULUM = GymnasiumEnvs("Pendulum-v1")
ORIGINAL = {"observation": "<observation>0.12345,-1.00000,3.50000</observation>", "action": "<action>0.25000</action>"}


def rows_of(folder, *lines, env=PENDULUM, **settings):
    """Write lines to a file, objects as JSON, and return its rows."""
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return JsonlRows(str(path), env, **settings).rows()


def test_a_line_of_the_original_is_parsed_and_written_as_the_environment_does(tmp_path):
    (row,) = rows_of(tmp_path, ORIGINAL)
    np.testing.assert_allclose(row.native_observation, [0.12345, -1, 3.5], rtol=1e-6)
    np.testing.assert_allclose(row.action, [0.25])
    assert row.observation == "<observation>0.123,-1.000,3.500</observation>" and row.q_values == ()
    bare = {"observation": "0.12345,-1.00000,3.50000", "action": "0.25"}
    assert rows_of(tmp_path, bare)[0].observation == row.observation


class SpacesOnly(EnvFactory):
    """Spaces and a codec, without an environment to play."""

    def __init__(self, observation_space, action_space, numbers=None):
        self._spaces = observation_space, action_space
        self._codec = SpaceCodec(observation_space, action_space, numbers)

    codec = property(lambda self: self._codec)
    spaces = property(lambda self: self._spaces)

    def make(self, num_envs, response_format):
        raise NotImplementedError


def array(*numbers, dtype=np.float64):
    return np.array(numbers, dtype=dtype)


ANY = Box(-np.inf, np.inf, (2,), np.float64)
ANY32 = Box(-np.inf, np.inf, (2,), np.float32)
INTEGERS = Box(-(2**63), 2**63 - 1, (2,), np.int64)
TEXTS = Text(99, min_length=0, charset=[chr(code) for code in range(10, 127)])
SENTENCES = ("go +5 steps", " 1e3 ", "a\nb", "", "<observation>", "x</observation>", "<action>", "08", "+1", "a.b: 2")
ROUND_TRIPS = [
    (ANY, [array(1e15, -1e15), array(-123456789012345678.0, 0.5), array(1e300, -np.finfo(float).max), array(-0.0, 0)]),
    (ANY32, [array(1e30, np.finfo(np.float32).max, dtype=np.float32), array(9.9e14, 1e-30, dtype=np.float32)]),
    (INTEGERS, [array(2**63 - 1, -(2**63), dtype=np.int64), array(0, 10**18, dtype=np.int64)]),
    (Discrete(3, start=-1), [-1, 0, 1]),
    (MultiDiscrete([2, 10**18 + 5]), [array(1, 10**18 + 4, dtype=np.int64)]),
    (MultiBinary((2, 2)), [np.eye(2, dtype=np.int8)]),
    (TEXTS, SENTENCES),
    (Dict(a=TEXTS, b=ANY, c=TEXTS), [{"a": text, "b": array(1e20, 1), "c": text[::-1]} for text in SENTENCES]),
    (Tuple((ANY, Dict(z=TEXTS))), [(array(0, 1), {"z": text}) for text in SENTENCES]),
]


@pytest.mark.parametrize("precision", [0, 3, 15])
@pytest.mark.parametrize(("space", "values"), ROUND_TRIPS, ids=[str(space)[:20] for space, _ in ROUND_TRIPS])
def test_a_data_set_written_as_jsonl_is_read_unchanged(tmp_path, monkeypatch, space, values, precision):
    """Large numbers and texts that hold numbers, blanks, line breaks or tags, as observation and as action."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env, steps = SpacesOnly(space, space, NumberFormat(precision=precision)), len(values)
    with DatasetWriter("lrl/odd-v0", *env.spaces, None) as writer:
        episode = {"seed": 0, "context": None, "success": False, "random_steps": []}
        flags = {"rewards": [0.0] * steps, "terminations": [False] * steps, "truncations": [False] * steps}
        writer.add([episode | flags | {"observations": [*values, values[0]], "actions": [*values]}])
        writer.finish({})
    path = tmp_path / "odd.jsonl"
    assert write_jsonl("lrl/odd-v0", env, path) == steps
    rows = JsonlRows(str(path), env).rows()
    assert [row.observation for row in rows] == [env.codec.observation_to_text(value) for value in values]
    assert [env.codec.action_to_text(row.action) for row in rows] == [env.codec.action_to_text(one) for one in values]
    if isinstance(space, (Text, Discrete)):
        assert [row.native_observation for row in rows] == [row.action for row in rows] == list(values)


def test_only_the_numbers_of_a_dict_are_read_as_other_programs_write_them(tmp_path):
    env = SpacesOnly(Dict(say=TEXTS, to=ANY), Dict(say=TEXTS, to=ANY))
    (row,) = rows_of(
        tmp_path, dict.fromkeys(("observation", "action"), "say: go +5 steps, 1e3\nto: +1e-2, .5\n"), env=env
    )
    assert row.native_observation["say"] == row.action["say"] == "go +5 steps, 1e3"
    assert row.observation == "say: go +5 steps, 1e3\nto: 0.010,0.500"


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e999", "9" * 310])
def test_numbers_that_are_not_finite_are_an_error_with_the_line(tmp_path, number):
    with pytest.raises(ValueError, match="line 1: observation is"):
        rows_of(tmp_path, {"observation": f"0,{number}", "action": "0,0"}, env=SpacesOnly(ANY, ANY))
    with pytest.raises(ValueError, match="line 1: action is"):
        rows_of(tmp_path, {"observation": "0,0", "action": f"0,{number}"}, env=SpacesOnly(ANY, ANY))


def test_integers_mean_values_between_the_bounds(tmp_path):
    env = GymnasiumEnvs("Pendulum-v1", numbers=NumberFormat(kind="integers"))
    line = {"observation": "<observation>0,999,0</observation>", "action": "<action>999</action>"}
    (row,) = rows_of(tmp_path, line, env=env)
    assert row.native_observation.tolist() == [-1, 1, -8] and row.action.tolist() == [2]
    assert row.observation == line["observation"]


def test_decimals_without_digits_behind_the_point_are_no_integers_of_another_format(tmp_path):
    env = GymnasiumEnvs("Pendulum-v1", numbers=NumberFormat(precision=0))
    (row,) = rows_of(tmp_path, {"observation": "1,0,9", "action": "<action>5</action>"}, env=env)
    assert row.native_observation.tolist() == [1, 0, 9] and row.action.tolist() == [2]


def test_an_action_out_of_bounds_is_clipped_as_in_the_environment(tmp_path):
    (row,) = rows_of(tmp_path, ORIGINAL | {"action": "<action>-7.5</action>"})
    assert row.action.tolist() == [-2]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            {"action": "<action>500</action>"},
            "action is '<action>500</action>', whose integers are outside the action space",
        ),
        ({"action": "3"}, "action is '3', whose integers are outside the action space"),
        ({"observation": "<observation>12,503,999</observation>"}, "observation is '<observation>12,503,999</observat"),
        ({"observation": "0,2,0"}, "observation is '0,2,0', whose integers are outside the observation space"),
    ],
)
def test_integers_that_were_read_as_decimals_are_an_error_and_not_clipped(tmp_path, line, said):
    with pytest.raises(ValueError, match=f"line 1: {said}.* set env.numbers.kind to integers"):
        rows_of(tmp_path, ORIGINAL | line)
    inside = ORIGINAL | {"observation": "0,1,8", "action": "<action>-3</action>"}
    assert rows_of(tmp_path, inside)[0].action.tolist() == [-2], "no integer from 0 to 999"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.017393862828612328,-0.5,1e-05", [0.017393862828612328, -0.5, 1e-5]),
        ("1.5e-05, .1, +2.5\n", [1.5e-5, 0.1, 2.5]),
        ("0.1,2.,-1E-1", [0.1, 2, -0.1]),
    ],
)
def test_numbers_are_read_as_programs_write_them(tmp_path, text, values):
    """Python's own form of a float has up to 17 digits or an exponent, which the environment never writes."""
    line = {"observation": f"<observation>{text}</observation>", "action": "<action>-1e-2</action>"}
    (row,) = rows_of(tmp_path, line)
    np.testing.assert_allclose(row.native_observation, values, rtol=1e-6)
    assert row.action.tolist() == pytest.approx([-0.01])
    rng = np.random.default_rng(0)
    numbers = rng.normal(0, 1, (200, 3)).astype(np.float32) * 10.0 ** rng.integers(-8, 1, (200, 1))
    numbers = np.clip(numbers, -1, 1)
    lines = [{"observation": ",".join(map(str, row.tolist())), "action": repr(float(row[0]))} for row in numbers]
    for row, wanted in zip(rows_of(tmp_path, *lines), numbers, strict=True):
        np.testing.assert_allclose(row.native_observation, wanted, atol=1e-14)


@pytest.mark.parametrize("action", ["right", "1", "<action>1</action>", "<action>right</action>"])
def test_a_word_may_be_given_by_its_number(tmp_path, action):
    line = {"observation": "<observation>0.1,0,0,0</observation>", "action": action}
    (row,) = rows_of(tmp_path, line, env=GymnasiumEnvs("CartPole-v1"))
    assert row.action == 1


def test_texts_that_cannot_be_parsed_are_shown_unchanged_to_text_policies(tmp_path):
    lake = {"observation": "row 0 column 0\nA F\nF G", "action": "DOWN"}
    rows = JsonlRows(str(tmp_path / "rows.jsonl"), GymnasiumEnvs("FrozenLake-v1"))
    (row,) = rows_of(tmp_path, lake, env=rows.env)
    assert (row.observation, row.native_observation, row.action) == (lake["observation"], None, 1)
    with pytest.raises(ValueError, match="JsonlRows, which has text observations only"):
        PromptEnvs(rows, [BehaviourCloningReward()]).make(1, None)


def test_observations_with_names_are_read_as_numbers(tmp_path):
    named = GymnasiumEnvs("CartPole-v1", numbers=NumberFormat(names=True))
    text = "cart position 0.100\ncart velocity 0.000\npole angle 0.000\npole velocity -0.500"
    (row,) = rows_of(tmp_path, {"observation": text, "action": "left"}, env=named)
    assert row.observation == text and row.native_observation.tolist() == pytest.approx([0.1, 0, 0, -0.5])
    line = {"observation": "cart position 0.1", "action": "left"}
    with pytest.raises(ValueError, match="line 1: observation is 'cart position 0.1', which is not in the env"):
        rows_of(tmp_path, line, env=named)


def test_networks_are_rewarded_on_lines(tmp_path):
    rows_of(tmp_path, ORIGINAL)
    factory = PromptEnvs(JsonlRows(str(tmp_path / "rows.jsonl"), PENDULUM), [BoundedCloningReward()])
    envs = factory.make(2, None)
    observations, _ = envs.reset(seed=0)
    assert observations.dtype == np.float32 and observations.shape == (2, 3)
    assert envs.step(np.array([[0.25], [9.0]], dtype=np.float32))[1].tolist() == [1.0, pytest.approx(np.exp(-30.625))]


def test_lines_are_selected_by_a_seed_and_read_when_they_are_shown(tmp_path):
    lines = [ORIGINAL | {"action": f"<action>{n / 10}</action>"} for n in range(10)]
    lines = [item for line in lines for item in (line, b"")]
    everything = [round(float(row.action[0]) * 10) for row in rows_of(tmp_path, *lines)]
    assert everything == list(range(10))
    chosen = {}
    for seed in (0, 1):
        for count in (3, 6):
            rows = rows_of(tmp_path, *lines, num_rows=count, seed=seed)
            chosen[seed, count] = [round(float(row.action[0]) * 10) for row in rows[:]]
            assert len(set(chosen[seed, count])) == count
    assert set(chosen[0, 3]) < set(chosen[0, 6]) and chosen[0, 6] == sorted(chosen[0, 6]) != chosen[1, 6]
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(OSError):
        rows[0]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (
            ORIGINAL | {"observation": "<observation>0.1 -1.0 3.5</observation>"},
            "observation is '<obs.* not in the environment's format",
        ),
        (ORIGINAL | {"observation": "<observation>1,2</observation>"}, "there must be 3 numbers separated by commas"),
        (ORIGINAL | {"action": "<action>1,2</action>"}, "action is '<action>1,2</action>'; there must be 1 numbers"),
        (ORIGINAL | {"action": 3}, "action is 3; it must be a string"),
        ({"observation": ORIGINAL["observation"]}, "it has no action; it has observation"),
        (b"[1, 2", "it is not a valid JSON object"),
        (b"3", "it is not a valid JSON object"),
        pytest.param(b"[" * 100_000, "it is not a valid JSON object", id="deep"),
        (b"\xff\xfe", "it is not a valid JSON object"),
    ],
)
def test_a_wrong_line_raises_with_its_number(tmp_path, line, complaint):
    """A data set that writes numbers as the environment does not is an error here; the original trained on it."""
    with pytest.raises(ValueError, match=f"rows.jsonl, line 3: .*{complaint}"):
        rows_of(tmp_path, ORIGINAL, b"", line)
    with pytest.raises(ValueError, match="rows.jsonl, line 1: "):
        rows_of(tmp_path, line)


def test_clipped_actions_are_logged_once_with_the_first_line(tmp_path, caplog):
    rows = rows_of(tmp_path, ORIGINAL, ORIGINAL | {"action": "-7.5"}, ORIGINAL | {"action": "2.5"})
    assert [float(row.action[0]) for row in rows] == [0.25, -2, 2]
    (said,) = (one.getMessage() for one in caplog.records)
    assert ": actions of 2 of 3 lines are out of the bounds of Box(-2.0, 2.0, (1,), float32) and are clipped" in said
    assert said.endswith("the first is in line 2.")


def test_a_missing_or_empty_file_and_too_many_rows_raise(tmp_path):
    with pytest.raises(ValueError, match=r"env.rows.path is '.*none.jsonl', which cannot be read"):
        JsonlRows(str(tmp_path / "none.jsonl"), PENDULUM).rows()
    with pytest.raises(ValueError, match=r"env.rows.path is '.*', which is empty"):
        rows_of(tmp_path, b"", b"  ")
    with pytest.raises(ValueError, match=r"env.rows.num_rows is 2, but '.*rows.jsonl' has 1 lines; it must be at most"):
        rows_of(tmp_path, ORIGINAL, num_rows=2)
    with pytest.raises(ValueError, match="env.rows.num_rows is 0; it must be at least 1"):
        rows_of(tmp_path, ORIGINAL, num_rows=0)
