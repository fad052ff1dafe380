"""Every recorded observation and action is checked against its space when a data set is opened."""

import h5py
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from lrl.codecs.codec import NamedActionsCodec
from lrl.codecs.space_formats import MultiDiscreteFormat
from lrl.codecs.spaces import SpaceCodec
from lrl.codecs.toy_text import CliffWalkingCodec, FrozenLakeCodec, TaxiCodec
from lrl.data.jsonl import write_jsonl
from lrl.data.minari import MinariDemonstrations
from lrl.data.minari_writer import observation_statistics
from lrl.data.rows import MinariRows
from lrl.data.transitions import TransitionsDataModule
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.minari_reader import DatasetReader
from lrl.envs.minari_storage import DatasetWriter
from lrl.policies.mlp import MLPPolicy
from lrl.rollouts.examples import draw_examples

NAME = "lrl/recorded-v0"
WIDE = Box(-np.inf, np.inf, (2,), np.float64)
UNIT = Box(-1, 1, (2,), np.float32)


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


def record(
    observations, actions, observation_space, action_space, name=NAME, advised=None, rewards=(0.0, 0.5, 1.0) * 2
):
    """Write two episodes of three steps, given by six observations and six actions."""
    with DatasetWriter(NAME, observation_space, action_space, None) as writer:
        for start in (0, 3):
            episode = {"seed": start, "context": None, "success": False, "random_steps": []}
            episode |= {"observations": [*observations[start : start + 3], observations[0]]}
            episode |= {"actions": actions[start : start + 3], "rewards": [*rewards[start : start + 3]]}
            episode |= {"terminations": [False, False, True], "truncations": [False] * 3}
            if advised is not None:
                episode |= {"advised_actions": dict(enumerate(advised[start : start + 3])), "has_advisor": True}
            writer.add([episode])
        writer.finish({})


def with_one_wrong(good, wrong):
    """Return six values, the one in episode 1, step 2 wrong."""
    return [good] * 5 + [wrong]


def pair(second, dtype=np.float32):
    return np.array([0.5, second], dtype=dtype)


WRONG = [
    (Discrete(4), 1, -1, r"has -1 as the {} of step 2; it must be an element of Discrete\(4\)"),
    (Discrete(4), 1, 4, "has 4 as the {} of step 2"),
    (Discrete(4, start=-2), -2, 2, r"has 2 as the {} of step 2; it must be an element of Discrete\(4, start=-2\)"),
    (Discrete(4), 1.0, 1.5, "has 1.5 as the {} of step 2"),
    (Discrete(4), 1.0, np.nan, "has nan as the {} of step 2"),
    (
        MultiDiscrete([3, 4]),
        np.array([2, 3]),
        np.array([2, 4]),
        r"has 4 in the {} of step 2. .* MultiDiscrete\(\[3 4\]",
    ),
    (MultiDiscrete([3, 4]), np.array([2, 3]), np.array([-1, 0]), "has -1 in the {} of step 2"),
    (MultiBinary(2), np.array([1, 0], np.int8), np.array([1, 2], np.int8), "has 2 in the {} of step 2"),
    (
        UNIT,
        pair(0.7),
        pair(np.nan),
        r"has nan in the {} of step 2; numbers of Box\(-1.0, 1.0, \(2,\), float32\) must be fin",
    ),
    (WIDE, pair(0.7, float), pair(np.inf, float), "has inf in the {} of step 2"),
    (WIDE, pair(0.7, float), pair(-np.inf, float), "has -inf in the {} of step 2"),
    (Box(0, 9, (2,), np.int16), np.array([1.0, 2.0]), np.array([1.0, 2.5]), "has 2.5 in the {} of step 2"),
    (Dict(a=Tuple((Text(9), Discrete(2)))), {"a": ("x", 1)}, {"a": ("x", -1)}, "has -1 as the {}.a.1 of step 2"),
]


CASES = [(role, *row) for role in ("observation", "action") for row in WRONG]
CASES += [("advised action", *WRONG[index]) for index in (0, 8, 12)]


@pytest.mark.parametrize(("role", "space", "good", "wrong", "said"), CASES)
def test_a_value_outside_its_space_is_named_with_data_set_episode_and_step(role, space, good, wrong, said):
    mixed = with_one_wrong(good, wrong)
    if role == "observation":
        record(mixed, [0] * 6, space, Discrete(2))
    elif role == "action":
        record([0] * 6, mixed, Discrete(2), space)
    else:
        record([0] * 6, [good] * 6, Discrete(2), space, advised=mixed)
    with pytest.raises(ValueError, match=f"^dataset_id is '{NAME}', whose episode 1 {said.format(role)}"):
        DatasetReader(NAME)


@pytest.mark.parametrize(("space", "good"), [row[:2] for row in WRONG])
def test_values_inside_their_space_are_read(space, good, caplog):
    record([good] * 6, [good] * 6, space, space, advised=[good] * 6)
    episode = DatasetReader(NAME).episode(1)
    assert len(episode.actions) == len(episode.observations) == len(episode.advised_actions) == 3
    assert not caplog.records


LAKE = GymnasiumEnvs("FrozenLake-v1")


@pytest.mark.parametrize(
    "use",
    [
        lambda path: MinariDemonstrations(NAME, "all").load(LAKE.codec, MLPPolicy()),
        lambda path: MinariRows(NAME, LAKE).rows(),
        lambda path: TransitionsDataModule(NAME).load(),
        lambda path: observation_statistics(NAME),
        lambda path: draw_examples(LAKE, 2, "direct", NAME),
        lambda path: write_jsonl(NAME, LAKE, path / "lines.jsonl"),
    ],
    ids=["demonstrations", "rows", "transitions", "statistics", "examples", "lines"],
)
def test_every_use_of_a_data_set_opens_it_in_the_same_way(use, tmp_path):
    record([0] * 6, with_one_wrong(1, -1), Discrete(16), Discrete(4))
    with pytest.raises(ValueError, match="whose episode 1 has -1 as the action of step 2"):
        use(tmp_path)
    assert not (tmp_path / "lines.jsonl").exists()


def test_finite_actions_out_of_bounds_are_clipped_wherever_they_are_read_and_that_is_logged(caplog, monkeypatch):
    box = Box(-2, 2, (1,), np.float32)
    actions = [np.array([value], np.float32) for value in (0.5, -7, 0.5, 0.5, 3, 0.5)]
    observations = [np.array([1, 0, 0], np.float32)] * 6
    pendulum = GymnasiumEnvs("Pendulum-v1")
    record(observations, actions, pendulum.spaces[0], box, advised=actions)
    reader = DatasetReader(NAME)
    (said, also) = (one.getMessage() for one in caplog.records)
    assert said.startswith(
        f"dataset_id is '{NAME}': action in 2 of 6 steps is out of the bounds of Box(-2.0, 2.0, (1,)"
    )
    assert said.endswith("and is clipped; episode 0 has -7.0 in the action of step 1.") and "advised action" in also
    read = [reader.episode(index) for index in (0, 1)]
    assert [float(action[0]) for one in read for action in one.actions] == [0.5, -2, 0.5, 0.5, 2, 0.5]
    assert [float(action[0]) for one in read for action in one.advised_actions.values()] == [0.5, -2, 0.5, 0.5, 2, 0.5]
    caplog.clear()
    DatasetReader(NAME)
    assert not caplog.records, "once per process"


def test_actions_are_clipped_to_the_environments_bounds_where_the_stored_ones_are_infinite(caplog):
    pendulum = GymnasiumEnvs("Pendulum-v1")
    observations, action = [np.array([1, 0, 0], np.float32)] * 6, np.array([7], np.float32)
    record(observations, [action] * 6, pendulum.spaces[0], Box(-np.inf, np.inf, (1,), np.float32))
    source = MinariDemonstrations(NAME, "all")
    source.validate(pendulum)
    assert [turn.native.action.tolist() for turn in source.load(pendulum.codec, MLPPolicy())] == [[2.0]] * 6
    assert len(caplog.records) == 1 and "clipped" in caplog.text


def test_finite_observations_out_of_bounds_are_kept_and_logged(caplog):
    """Many environments, such as LunarLander, leave the bounds that they declare."""
    record([np.array([0.5, 1.5], np.float32)] * 6, [0] * 6, UNIT, Discrete(2))
    assert DatasetReader(NAME).episode(0).observations[0].tolist() == [0.5, 1.5]
    assert "observation in 6 of 6 steps is out of the bounds of Box" in caplog.text and "used as it is" in caplog.text


def test_rounding_to_the_precision_of_the_space_is_not_out_of_bounds(caplog):
    record([0] * 6, [np.array([1 + 1e-12, -1.0])] * 6, Discrete(2), UNIT)
    DatasetReader(NAME)
    assert not caplog.records


def test_advice_at_random_steps_is_checked_and_clipped_as_well(caplog):
    pendulum = GymnasiumEnvs("Pendulum-v1")
    with DatasetWriter(NAME, *pendulum.spaces, None) as writer:
        episode = {"seed": 0, "context": None, "success": False, "random_steps": [0, 1, 2]}
        episode |= {"observations": [np.array([1, 0, 0], np.float32)] * 4, "actions": [np.ones(1, np.float32)] * 3}
        episode |= {"advised_actions": {0: np.array([0.5], np.float32), 2: np.array([7.0], np.float32)}}
        writer.add([episode | {"rewards": [0.0] * 3, "terminations": [False] * 3, "truncations": [False] * 3}])
        writer.finish({})
    turns = MinariDemonstrations(NAME, "all", advised=True).load(pendulum.codec, MLPPolicy())
    assert [turn.native.action.tolist() for turn in turns] == [[0.5], [2.0]]
    assert "advised action in 1 of 3 steps is out of the bounds of Box(-2.0, 2.0" in caplog.text
    with pytest.raises(ValueError, match="num_rows is|num_episodes is"):
        MinariDemonstrations(NAME, "all").load(pendulum.codec, MLPPolicy())


def test_returns_are_those_of_the_metadata_and_no_episode_is_opened_again(monkeypatch):
    record([0] * 6, [1] * 6, Discrete(2), Discrete(2))
    reader = DatasetReader(NAME)
    for name in ("get_episode_metadata", "get_episodes"):
        monkeypatch.setattr(reader._storage, name, None)  # a call would raise
    assert reader.returns.tolist() == [1.5, 1.5]


@pytest.mark.parametrize("stored", [True, False])
def test_a_return_that_is_not_finite_is_named_with_its_episode(stored, datasets):
    record([0] * 6, [1] * 6, Discrete(2), Discrete(2), rewards=[0, 0, 1, 0, np.nan, 1])
    if not stored:
        with h5py.File(datasets / "lrl" / "recorded-v0" / "data" / "main_data.hdf5", "a") as file:
            for episode in file.values():
                del episode.attrs["rewards_sum"]
    with pytest.raises(ValueError, match=f"^dataset_id is '{NAME}', whose episode 1 has the return nan; all rewards"):
        MinariDemonstrations(NAME, "all", min_return=0).load(LAKE.codec, MLPPolicy())


class Named(NamedActionsCodec):
    _actions = ("left", "right")
    description = ""

    def observation_to_text(self, observation, context=None):
        return ""


@pytest.mark.parametrize(
    "write",
    [
        lambda: Named().action_to_text(-1),
        lambda: Named().action_to_text(2),
        lambda: SpaceCodec(Discrete(3), Discrete(3)).action_to_text(-1),
        lambda: SpaceCodec(Discrete(3, start=5), Discrete(3)).observation_to_text(4),
        lambda: MultiDiscreteFormat(MultiDiscrete([2, 2])).encode([0, -1]),
        lambda: MultiDiscreteFormat(MultiBinary(2)).encode([0, 2]),
        lambda: TaxiCodec().observation_to_text(-1),
        lambda: CliffWalkingCodec().observation_to_text(48),
        lambda: FrozenLakeCodec().observation_to_text(-1, ("SF", "FG")),
        lambda: FrozenLakeCodec().observation_to_text(4, ("SF", "FG")),
    ],
)
def test_a_codec_writes_no_text_for_what_is_outside_the_space(write):
    with pytest.raises(ValueError, match="-1|2|4"):
        write()
