"""Tests of the facts about MuJoCo bodies in ProPS+ prompts, by comparison with the environments."""

import re

import numpy as np
import pytest
from environment_facts import facts_of, last_step, numbers

BODIES = ("InvertedPendulum", "InvertedDoublePendulum", "Reacher", "Swimmer", "Hopper", "Walker2d", "HalfCheetah")


def squares(action):
    return float(np.square(action).sum())


def forward_weights(facts):
    """Return the weight of the velocity, the bonus and the weight of the cost in the formula of a reward."""
    pattern = r"(?:([\d.]+) \* )?v(?: \+ ([\d.]+))? - (?:([\d.]+) \* )?\(sum of the squared numbers of the action\)"
    velocity, bonus, cost = re.match(pattern, facts.reward).groups()
    return float(velocity or 1), float(bonus or 0), float(cost or 1)


@pytest.mark.parametrize("id", ["Swimmer", "Hopper", "Walker2d", "HalfCheetah"])
@pytest.mark.parametrize("kwargs", [{}, {"forward_reward_weight": 2.0, "ctrl_cost_weight": 0.3}])
def test_rewards_of_bodies_that_move_forward(id, kwargs):
    facts, native = facts_of(f"{id}-v5", **kwargs)
    velocity, bonus, cost = forward_weights(facts)
    native.reset(seed=0)
    ended = False
    for _ in range(200):
        action, before = native.action_space.sample(), native.data.qpos[0]
        _, reward, ended, _, _ = native.step(action)
        moved = (native.data.qpos[0] - before) / native.dt
        assert reward == pytest.approx(velocity * moved + bonus * (not ended) - cost * squares(action), abs=1e-5)
        if ended:
            break
    assert ended == (id in ("Hopper", "Walker2d")) == ("bonus" in facts.reward) == ("early" not in facts.end)
    assert f"step of {native.dt:g} s" in facts.reward


@pytest.mark.parametrize("id", ["Hopper", "Walker2d"])
def test_what_ends_an_episode_on_legs(id):
    facts, native = facts_of(f"{id}-v5")
    native.reset(seed=0)

    def healthy(height=1.25, pitch=0.0, velocity=0.0):
        places, speeds = native.init_qpos.copy(), native.init_qvel.copy()
        places[1:3], speeds[-1] = (height, pitch), velocity
        native.set_state(places, speeds)
        return native.is_healthy

    heights, pitches, *others = facts.end.split(";")
    bounds = numbers(heights)
    assert healthy(bounds[0] + 1e-6) and not healthy(bounds[0])
    assert len(bounds) == 1 or (healthy(bounds[1] - 1e-6) and not healthy(bounds[1]))
    for bound in numbers(pitches):
        assert healthy(pitch=bound * 0.999) and not healthy(pitch=bound)
    for bound in numbers(others[0]) if others else ():
        assert healthy(velocity=bound * 0.999) and not healthy(velocity=bound)
    assert healthy(velocity=200.0) == (not others) and native._get_obs().max() <= 10


def test_bodies_whose_fall_does_not_end_the_episode_are_described():
    facts, native = facts_of("Hopper-v5", terminate_when_unhealthy=False, healthy_reward=3.0)
    assert facts.end == "nothing ends it early." and forward_weights(facts)[1] == 3
    assert "In steps after which the height is 0.7 m or less; or" in facts.reward
    native.reset(seed=0)
    native.set_state(native.init_qpos * 0.4, native.init_qvel)
    _, reward, ended, _, info = native.step(np.zeros(3))
    assert not ended and reward == pytest.approx(info["x_velocity"])


def test_inverted_pendulum():
    facts, native = facts_of("InvertedPendulum-v5")
    rewards, before, after, terminated = last_step(native, lambda observation: np.array([1.0]))
    low, high = numbers(facts.end)
    assert terminated and low < before[1] < high and not low < after[1] < high
    assert numbers(facts.reward) == [rewards[0], rewards[-1]] == [1, 0]
    assert after[0] > before[0], "a positive force pushes to positive positions"
    native.set_state(np.array([0.0, 0.1]), np.zeros(2))
    assert native.data.geom_xpos[-1, 0] > 0, "a positive angle leans to positive positions"
    assert native.model.joint("slider").range.tolist() == [-1, 1] and "ends at -1 and 1" in facts.observation


def test_inverted_double_pendulum():
    facts, native = facts_of("InvertedDoublePendulum-v5")
    alive, *_ = numbers(facts.reward)
    formula = facts.reward.split(",")[0].replace("^", "**")
    native.reset(seed=0)
    for push in (0.3, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        _, reward, ended, _, _ = native.step(np.array([push]))
        x, _, y = native.data.site_xpos[0]
        _, v1, v2 = native.data.qvel
        told = eval(formula, {"x": x, "y": y, "v1": v1, "v2": v2})  # of our own text
        assert reward == pytest.approx(told - alive * ended) and ended == (y <= 1)
    assert numbers(facts.end)[0] == 1
    native.set_state(np.zeros(3), np.zeros(3))
    assert native.data.site_xpos[0][2] == pytest.approx(1.2)
    native.set_state(np.array([0.0, 0.3, -0.3]), np.zeros(3))
    assert native.data.site_xpos[0] == pytest.approx([0.6 * np.sin(0.3), 0, 0.6 * np.cos(0.3) + 0.6])


def test_reacher():
    facts, native = facts_of("Reacher-v5", reward_control_weight=0.5)
    observation, _ = native.reset(seed=0)
    action = np.array([0.5, -1.0])
    observation, reward, ended, _, _ = native.step(action)
    assert "- 0.5 * (sum of the squared" in facts.reward and facts.reward.startswith("-(distance of the fingertip")
    assert not ended and reward == pytest.approx(-np.hypot(*observation[8:]) - 0.5 * squares(action), abs=1e-6)
    gap = native.get_body_com("fingertip") - native.get_body_com("target")
    assert observation[8:] == pytest.approx(gap[:2])
    places = np.array([native.reset(seed=seed)[0][4:6] for seed in range(99)])
    assert 0.15 < np.hypot(*places.T).max() < 0.2 and "within 0.2 m of the shoulder" in facts.start
    native.set_state(np.array([0.5, 1.0, 0.1, 0.1]), np.zeros(4))
    tip = 0.1 * np.exp(0.5j) + 0.11 * np.exp(1.5j)
    assert native.get_body_com("fingertip")[:2] == pytest.approx([tip.real, tip.imag])


@pytest.mark.parametrize("id", BODIES)
def test_initial_states_and_observations_of_bodies(id):
    facts, native = facts_of(f"{id}-v5")
    assert "reset_noise_scale" not in facts.start
    low, high = native.action_space.low, native.action_space.high
    assert facts.actions.endswith(f"each is from {low[0]:g} to {high[0]:g}.") and (low == low[0]).all()
    listed = re.sub(r"\([^)]*\)", "", facts.observation.split(".")[0]).split(",")
    assert len(listed) - 1 == native.observation_space.shape[0]
    if id == "Reacher":
        return
    states = []
    for seed in range(60):
        native.reset(seed=seed)
        states.append(np.concatenate([native.data.qpos - native.init_qpos, native.data.qvel]))
    places, speeds = np.split(np.abs(states), [native.model.nq], axis=1)
    scale = numbers(facts.start)[1]
    assert 0.9 * scale < places.max() <= scale
    if "standard deviation" in facts.start:
        assert numbers(facts.start)[2] == pytest.approx(np.sqrt(np.square(speeds).mean()), rel=0.2)
    else:
        assert 0.9 * scale < speeds.max() <= scale


@pytest.mark.parametrize(
    ("id", "listed"), [("InvertedPendulum", "cart (force)"), ("Hopper", "thigh, leg, foot (torque)")]
)
def test_numbers_of_actions_are_named_by_the_parts_that_they_move(id, listed):
    facts, _ = facts_of(f"{id}-v5")
    assert facts.actions.startswith(f"the numbers are, in order: {listed}; each is from ")


def test_signs_of_pitch_angles():
    for id, part, ahead, told in (
        ("Hopper", "thigh_geom", False, "A positive pitch leans forward"),
        ("Walker2d", "thigh_geom", False, "A positive pitch leans forward"),
        ("HalfCheetah", "head", True, "A positive pitch is nose down"),
    ):
        facts, native = facts_of(f"{id}-v5")
        native.reset(seed=0)
        places = native.init_qpos.copy()
        before = (native.set_state(places, native.init_qvel), native.data.geom(part).xpos.copy())[1]
        places[2] = 0.1
        native.set_state(places, native.init_qvel)
        moved = native.data.geom(part).xpos - before
        assert told in facts.observation and (moved[2] < 0 if ahead else moved[0] < 0)  # legs swing back, nose drops
