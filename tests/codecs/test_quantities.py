"""Tests of the descriptions of numbers in prompts."""

import gymnasium as gym
import pytest
from gymnasium.envs.registration import registry

from lrl.codecs.numbers import NumberFormat
from lrl.codecs.registry import bodies, codec_for, environment_metadata
from lrl.codecs.spaces import Quantity, SpaceCodec, describe_quantities
from lrl.envs.factory import GymnasiumEnvs

INTEGERS = NumberFormat(kind="integers", describe=True)
DECIMALS = NumberFormat(describe=True)
BINS = "each an integer from 0 to 999, where 0 is the smallest and 999 the largest value of its range"
BODY_IDS = [f"{name.removesuffix('Env')}-v5" for name in bodies()]
LEGS = "back thigh, back shin, back foot, front thigh, front shin, front foot"


def described(id, numbers, **kwargs):
    return GymnasiumEnvs(id, kwargs, numbers=numbers).codec.description


def test_the_description_of_half_cheetah_matches_a_hand_written_one():
    speeds = ", ".join(f"{part} velocity" for part in ("pitch", *LEGS.split(", ")))
    assert described("HalfCheetah-v5", INTEGERS) == (
        "A two-dimensional cheetah with a back and a front leg. Run forward as fast as possible, with small torques. "
        f"Observations: 17 numbers separated by commas: height (m, from -4 to 4), pitch, {LEGS} (rad, from -4 to 4), "
        f"x velocity, height velocity (m/s, from -30 to 30), {speeds} (rad/s, from -30 to 30), {BINS}. "
        f"Actions: 6 numbers separated by commas: {LEGS} (torque, from -1 to 1), {BINS}, inside <action></action>."
    )


def test_decimals_say_which_ranges_are_bounds_and_which_are_usual():
    text = described("Pendulum-v1", DECIMALS)
    assert "3 numbers separated by commas: cosine, sine (from -1 to 1), velocity (rad/s, from -8 to 8)" in text
    assert "1 numbers separated by commas: torque (N m, from -2 to 2), each a decimal number, inside <action>" in text
    assert "cart velocity (m/s, usually from -3 to 3)" in described("CartPole-v1", DECIMALS)


def test_every_mujoco_body_of_gymnasium_is_in_the_table():
    entries = [spec.entry_point for spec in registry.values() if isinstance(spec.entry_point, str)]
    registered = {entry.rpartition(":")[2] for entry in entries if entry.startswith("gymnasium.envs.mujoco")}
    assert registered == set(bodies())


@pytest.mark.parametrize("id", BODY_IDS)
def test_every_number_of_observations_and_actions_of_a_body_is_described(id):
    native = GymnasiumEnvs(id).make_native()
    codec = codec_for(native, INTEGERS)
    observed, acted = codec.observation_format.details, codec.action_format.details
    for details, space in ((observed, native.observation_space), (acted, native.action_space)):
        listed = details.removesuffix(f", {BINS}").replace(", from", " from")
        names = [name for part in listed.split("), ") for name in part.split(" (")[0].split(", ")]
        spans = [name.rsplit(" ", 3) for name in names if " to " in name and name[-1].isdigit()]
        abbreviated = sum(int(span[3]) - int(span[1]) for span in spans)
        assert len(names) + abbreviated == space.shape[0]
    assert bodies()[type(native.unwrapped).__name__].task in codec.description
    native.close()


def test_units_follow_the_joints_of_the_model():
    ant = described("Ant-v5", DECIMALS)
    assert (
        "height (m, usually from -4 to 4), orientation w, orientation x, orientation y, orientation z (usually" in ant
    )
    assert "cfrc_ext 0 to 77 (external torque and force on each body in N m and N, usually from -1 to 1)" in ant
    assert "back right hip, back right ankle, front left hip" in ant.partition("Actions:")[2]
    pendulum = described("InvertedPendulum-v5", INTEGERS)
    assert "cart position (m, from -4 to 4), pole angle (rad, from -4 to 4), cart velocity (m/s" in pendulum
    assert "cart (force, from -3 to 3)" in pendulum
    assert "shoulder pan, shoulder lift" in described("Pusher-v5", INTEGERS).partition("Actions:")[2]
    assert "(torque in N m, from -2 to 2)" in described("Pusher-v5", INTEGERS)
    assert "x (m, from -100 to 100)" in described(
        "HalfCheetah-v5", INTEGERS, exclude_current_positions_from_observation=False
    )


@pytest.mark.parametrize(("size", "first"), [(9, None), (11, "height"), (12, "x")])
def test_numbers_are_named_only_if_the_size_of_the_observation_is_known(size, first):
    native = GymnasiumEnvs("Hopper-v5").make_native().unwrapped
    native.observation_space = gym.spaces.Box(-1, 1, (size,))
    quantities = environment_metadata(native).observation
    assert (quantities and quantities[0].name) == first
    native.close()


def test_described_names_are_not_followed_by_commas_in_observations():
    numbers = NumberFormat(kind="integers", describe=True, names=True)
    assert "Observations: 4 lines, each a name and its number: cart position (m," in described("CartPole-v1", numbers)


@pytest.mark.parametrize("id", [*BODY_IDS, "CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0"])
@pytest.mark.parametrize("kind", ["decimals", "integers"])
def test_without_describe_the_description_contains_only_the_task_and_the_actions(id, kind):
    native = GymnasiumEnvs(id).make_native()
    text = codec_for(native, NumberFormat(kind=kind)).description
    if id in BODY_IDS:
        count = native.action_space.shape[0]
        assert text == (
            "A simulated body with motors at its joints. The observation lists positions, then velocities. "
            f"Actions: {count} numbers separated by commas, inside <action></action>."
        )
    else:
        assert "Observations:" not in text and " numbers separated by commas:" not in text
    native.close()


def test_nested_spaces_are_described_by_position():
    space = gym.spaces.Dict({"at": gym.spaces.Box(0.0, 2.0, (4,)), "on": gym.spaces.Discrete(2)})
    codec = SpaceCodec(space, gym.spaces.Discrete(2), INTEGERS)
    assert codec.description == (
        f"Observations: at: 4 numbers separated by commas: 1 to 4 (from 0 to 2), {BINS}; on: 0, 1; one line each. "
        "Actions: 0, 1."
    )


def test_successive_numbered_names_are_abbreviated_from_three_on():
    names = ["a 0", "a 1", "b", "c 1", "c 2", "c 3", "c 5"]
    assert describe_quantities([Quantity(name) for name in names]) == "a 0, a 1, b, c 1 to 3, c 5"


def test_numbers_without_unit_are_separated_from_the_next_ones():
    turned = [Quantity("height", "m"), Quantity("orientation"), Quantity("hip", "rad"), Quantity("knee", "rad")]
    assert describe_quantities(turned) == "height (m), orientation (no unit), hip, knee (rad)"
