"""Environments that return odd things are either played or end with one sentence that says where."""

import logging
import re
from types import MappingProxyType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.native import EnvironmentFailedError
from lrl.evaluation.episodes import evaluate_policy
from lrl.policies.baselines import RandomActor
from lrl.policies.mlp import MLPPolicy
from lrl.rollouts.runner import EnvRunner
from lrl.types import Decisions, RandomKeys, SamplingConfig

POINT = spaces.Box(-1, 1, (2,), np.float32)
SEED = 5
"""Seed of the first of two episodes."""


class OddEnv(gym.Env):
    """Returns in every step what its arguments say; a step ends the episode if nothing else does."""

    def __init__(self, space=POINT, observation=None, start=None, limit=3, actions=None, **returned):
        self.observation_space, self.limit = space, limit
        self.action_space = spaces.Discrete(2) if actions is None else actions
        self.observation, self.start, self.returned = observation, start, returned
        self.resets = []

    def observe(self, given):
        if given is not None:
            return given
        self.observation_space.seed(0)
        return self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        self.resets.append((seed, options))
        self.steps = 0
        return self.observe(self.start), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        outcome = {
            "reward": 1.0,
            "terminated": self.steps >= self.limit,
            "truncated": False,
            "info": {},
        } | self.returned
        return (self.observe(self.observation), *outcome.values())


class Raising(OddEnv):
    """Raises in its second step, or in its reset."""

    def __init__(self, in_reset=False):
        super().__init__()
        self.in_reset = in_reset

    def reset(self, *, seed=None, options=None):
        if self.in_reset:
            raise RuntimeError("the simulator\n is gone")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.steps == 1:
            raise KeyError("joint")
        return super().step(action)


class WithoutOptions(OddEnv):
    """Has a reset without options."""

    def reset(self, *, seed=None):
        return super().reset(seed=seed)


class RejectingOptions(OddEnv):
    """Accepts no option that it does not know."""

    def reset(self, *, seed=None, options=None):
        if options:
            raise ValueError(f"unknown options {sorted(options)}")
        return super().reset(seed=seed)


class OldApi(OddEnv):
    """Returns four values, as before Gymnasium 0.26."""

    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class Unpicklable(OddEnv):
    """Cannot be copied to another process."""

    def __init__(self):
        super().__init__()
        self.lock = __import__("threading").Lock()


class Exiting(OddEnv):
    """Ends the program, as a game does whose window is closed."""

    def step(self, action):
        raise SystemExit(0)


class BrokenClose(OddEnv):
    """Cannot be closed."""

    def close(self):
        raise OSError("the socket\n is gone")


class WithoutRepr:
    """Cannot be shown."""

    def __repr__(self):
        raise RuntimeError("no text")


class ChangingInReset(OddEnv):
    """Observes one number more in its second episode."""

    def reset(self, *, seed=None, options=None):
        if self.resets:
            self.observation_space = spaces.Box(-1, 1, (3,), np.float32)
        return super().reset(seed=seed, options=options)


class ChangingSpace(OddEnv):
    """Has an observation space that depends on the number of copies that exist."""

    made = 0

    def __init__(self):
        type(self).made += 1
        super().__init__(spaces.Box(-1, 1, (type(self).made,), np.float32))


IMAGE = spaces.Box(0, 255, (4, 4, 3), np.uint8)
PARTS = spaces.Dict({"position": POINT, "held": spaces.Discrete(3), "camera": spaces.Box(0, 1, (2, 2), np.float64)})
PLAYED = {
    "Dict": {"space": PARTS},
    "Tuple": {"space": spaces.Tuple((POINT, spaces.Discrete(4)))},
    "MultiBinary": {"space": spaces.MultiBinary(3)},
    "MultiDiscrete": {"space": spaces.MultiDiscrete([3, 4])},
    "Text": {"space": spaces.Text(8)},
    "float64": {"space": spaces.Box(-1, 1, (2,), np.float64)},
    "int8": {"space": spaces.Box(-9, 9, (2,), np.int8)},
    "image": {"space": IMAGE},
    "image of int64": {"space": IMAGE, "observation": np.full((4, 4, 3), 255)},
    "scalar": {"space": spaces.Box(-1, 1, (), np.float32), "observation": 0.5, "start": np.float64(0.25)},
    "list": {"observation": [0.1, 0.2]},
    "float64 in a float32 space": {"observation": np.array([0.1, 0.2])},
    "out of bounds": {"observation": np.array([7, 7], np.float32)},
    "Discrete as an array": {"space": spaces.Discrete(3), "observation": np.array([2])},
    "reward float32": {"reward": np.float32(1)},
    "reward of shape (1,)": {"reward": np.array([1.0])},
    "reward of shape ()": {"reward": np.array(1.0)},
    "reward bool": {"reward": True},
    "terminated bool_": {"terminated": np.bool_(True)},
    "terminated int": {"terminated": 1},
    "truncated array": {"truncated": np.array([True])},
    "info with arrays": {"info": {"x": np.zeros(3), "reward_parts": np.ones(3), "reward_name": "sum", "map": {"a": 1}}},
    "success None": {"info": {"success": None, "is_success": np.array([1.0])}},
    "info that is no dict": {"info": MappingProxyType({"x": 1})},
    "info with a large integer": {"info": {"x": 10**400}},
    "actions of int8": {"actions": spaces.Discrete(2, dtype=np.int8)},
    "Box actions": {"actions": spaces.Box(-1, 1, (2,), np.float32)},
}
"""Arguments of an :class:`OddEnv` by name; all of them are played."""

REFUSED = {
    "reward None": ({"reward": None}, 1, "reward is None; it must be a number"),
    "reward NaN": ({"reward": np.float32("nan")}, 1, "reward is nan; it must be finite"),
    "reward beyond float64": ({"reward": 10**400}, 1, "reward is inf; it must be finite"),
    "reward text": ({"reward": "1"}, 1, "reward is '1'; it must be a number"),
    "reward of two": ({"reward": np.ones(2)}, 1, r"reward is array\(\[1., 1.\]\); it must be a number"),
    "terminated None": ({"terminated": None}, 1, "terminated is None; it must be true or false"),
    "truncated text": ({"truncated": "no"}, 1, "truncated is 'no'; it must be true or false"),
    "NaN": ({"observation": np.array([0, np.nan], np.float32)}, 1, r"observation\[1\] is nan; it must be finite"),
    "NaN at first": ({"start": np.full(2, np.nan, np.float32)}, 0, r"observation\[0\] is nan; it must be finite"),
    "infinite": ({"observation": np.array([-np.inf, 0])}, 1, r"observation\[0\] is -inf; it must be finite"),
    "NaN in a part": (
        {
            "space": PARTS,
            "observation": {"position": np.zeros(2), "held": 0, "camera": np.array([[0, 1], [np.nan, 0]])},
        },
        1,
        r"observation\['camera'\]\[1, 0\] is nan; it must be finite",
    ),
    "beyond float32": (
        {"observation": np.array([1e300, 0])},
        1,
        r"observation\[0\] is (1e\+300, which float32 cannot represent|inf; it must be finite)",
    ),
    "tensor with gradient": (
        {"observation": torch.zeros(2, requires_grad=True)},
        1,
        r"observation is tensor\(.*\); it must be an array of numbers",
    ),
    "wrong shape": ({"observation": np.zeros(3)}, 1, r"observation has shape \(3,\); it must have shape \(2,\)"),
    "ragged": (
        {"observation": [[1], [1, 2]]},
        1,
        r"observation is \[\[1\], \[1, 2\]\]; it must be an array of numbers",
    ),
    "missing part": (
        {"space": PARTS, "observation": {"position": np.zeros(2)}},
        1,
        "observation is .*; it must be a dictionary with the key 'camera'",
    ),
    "half an integer": (
        {"space": spaces.Box(-9, 9, (2,), np.int8), "observation": np.array([0.5, 1])},
        1,
        r"observation is array\(\[0.5, 1. \]\), which int8 cannot represent",
    ),
    "beyond a byte": (
        {"space": spaces.Box(0, 255, (2,), np.uint8), "observation": np.array([256, 0])},
        1,
        r"observation is array\(\[256, 0\]\), which uint8 cannot represent",
    ),
    "beyond Discrete": ({"space": spaces.Discrete(3), "observation": 3}, 1, "it must be an integer from 0 to 2"),
    "beyond MultiBinary": ({"space": spaces.MultiBinary(2), "observation": [0, 2]}, 1, r"must be in MultiBinary\(2\)"),
    "short Tuple": ({"space": spaces.Tuple((POINT, POINT)), "observation": (1,)}, 1, "it must be a tuple of 2"),
    "no text": ({"space": spaces.Text(8), "observation": 3}, 1, "observation is 3; it must be in Text"),
    "info None": ({"info": None}, 1, "info is None; it must be a dictionary"),
    "success NaN": ({"info": {"success": np.nan}}, 1, r"info\['success'\] is nan; it must be true or false"),
    "success text": ({"info": {"success": "false"}}, 1, r"info\['success'\] is 'false'; it must be true or false"),
    "success array": ({"info": {"is_success": np.ones(2)}}, 1, r"info\['is_success'\] is array.*true or false"),
    "success large": ({"info": {"success": 10**400}}, 1, r"info\['success'\] is 10+\.\.\.; it must be true or false"),
    "success without text": ({"info": {"success": WithoutRepr()}}, 1, r"info\['success'\] is a WithoutRepr; it must"),
    "success dict": ({"info": {"success": {"all": True}}}, 1, r"info\['success'\] is {'all': True}; it must be true"),
}
"""Arguments of an :class:`OddEnv`, the step that raises an error, and a pattern of its message."""

KINDS = {
    "raises in step": (Raising, {}, 2, "step raised KeyError: 'joint'"),
    "raises in reset": (Raising, {"in_reset": True}, 0, "reset raised RuntimeError: the simulator is gone"),
    "reset without options": (WithoutOptions, {}, 0, "reset raised TypeError: .*'options'"),
    "ends the program": (Exiting, {}, 1, "step raised SystemExit: 0"),
    "four values": (OldApi, {}, 1, "step raised ValueError: not enough values to unpack"),
}
"""Class, arguments, step and pattern of environments whose methods are odd."""


@pytest.fixture
def odd():
    """Register an environment and return its factory."""
    names = []

    def factory(kind=OddEnv, limit=9, **settings):
        names.append(f"test/{kind.__name__}{len(names)}-v0")
        made = []

        def make(**kwargs):
            made.append(kind(**kwargs))
            return made[-1]

        gym.register(names[-1], entry_point=make, max_episode_steps=limit)
        envs: Any = GymnasiumEnvs(names[-1], **settings)
        envs.made = made
        return envs

    yield factory
    for name in names:
        gym.registry.pop(name)


class NativeActor:
    """Takes random native actions."""

    response_format, greedy_is_reproducible, sampling = None, False, SamplingConfig()

    def __init__(self, space):
        self.space = space

    def end_episodes(self):
        pass

    def prepare(self, envs):
        self.space.seed(0)

    def act(self, observations, memory, keys, sampling):
        rows = len(observations)
        nothing = torch.zeros(rows, 1)
        actions = [self.space.sample() for _ in range(rows)]
        return Decisions(actions=actions, inputs={}, response_mask=nothing > 0, logprobs=nothing, memory=memory)


def play(envs, text, num_envs=2, episodes=2):
    """Play episodes of random actions, as texts or as native actions."""
    policy: Any = RandomActor(response_format="direct") if text else NativeActor(envs.spaces[1])
    if text:
        policy.connect(envs.codec)
    return evaluate_policy(policy, envs, episodes, SEED, num_envs)


@pytest.mark.parametrize("text", [True, False], ids=["text", "native"])
@pytest.mark.parametrize("name", PLAYED)
def test_odd_environments_are_played(odd, name, text, caplog):
    envs = odd(kwargs=PLAYED[name])
    results = play(envs, text)
    assert results.lengths.max() <= 3 and results.returns.tolist() == results.lengths.tolist()
    assert results.successes.all() == (name in ("success None", "terminated int", "terminated bool_"))
    assert all(type(env.resets[0][0]) is int and env.resets[0][1] is None for env in envs.made if env.resets)
    left_out = [record.getMessage() for record in caplog.records]
    assert len(left_out) == (4 if name == "info with arrays" else 0), "once for each name and copy"
    if left_out:
        term = r"info\['reward_parts'\] is array.*, which is not a finite number and is left out\."
        assert re.fullmatch(rf"{envs.id} \(episode seed 5, step 1\): {term}", left_out[0])


@pytest.mark.parametrize("text", [True, False], ids=["text", "native"])
@pytest.mark.parametrize("name", [*REFUSED, *KINDS])
def test_an_invalid_result_of_an_environment_raises_one_sentence(odd, name, text):
    if name in REFUSED:
        kind, (kwargs, step, problem) = OddEnv, REFUSED[name]
    else:
        kind, kwargs, step, problem = KINDS[name]
    envs = odd(kind, kwargs=kwargs)
    with pytest.raises(EnvironmentFailedError) as error:
        play(envs, text)
    sentence = str(error.value)
    assert re.match(rf"environment 0 of {envs.id} \(episode seed 5, step {step}\): .*{problem}", sentence), sentence
    assert sentence.endswith(".") and "\n" not in sentence


def test_a_space_that_changes_between_episodes_raises(odd):
    with pytest.raises(EnvironmentFailedError, match=r"seed 6, step 0\): observation has shape \(3,\); it must"):
        play(odd(ChangingInReset), text=False, num_envs=1)


def test_copies_with_different_spaces_raise(odd):
    ChangingSpace.made = 0
    with pytest.raises(ValueError, match="env.id is .*, whose copies have different spaces"):
        play(odd(ChangingSpace), text=False)


@pytest.mark.parametrize("text", [True, False], ids=["text", "native"])
def test_an_environment_that_cannot_be_closed_is_played_with_a_warning(odd, text, caplog):
    """An error in close was a traceback, and the results were lost."""
    envs = odd(BrokenClose)
    assert len(play(envs, text)) == 2
    assert {record.getMessage() for record in caplog.records} == {
        f"{envs.id}: close raised OSError: the socket is gone."
    }


class EndedBySignal(SystemExit):
    """Exception that a signal handler raises."""


def test_a_signal_during_a_step_is_no_failure_of_the_environment(odd):
    class Interrupted(OddEnv):
        def step(self, action):
            raise EndedBySignal(143)

    with pytest.raises(EndedBySignal):
        play(odd(Interrupted), text=False)


CREATED = {
    "raises": (RuntimeError("no\n simulator"), r"which cannot be created \(RuntimeError: no simulator\)\."),
    "misses a package": (
        ModuleNotFoundError("No module named 'x'"),
        r"which cannot be created \(ModuleNotFoundError: No mod",
    ),
    "has no spaces": (None, "whose observation_space is None; it must be a space of Gymnasium"),
}


@pytest.mark.parametrize("name", CREATED)
def test_an_environment_that_cannot_be_created_raises_one_sentence(odd, name):
    """All but TypeError, KeyError and ValueError were tracebacks."""
    error, problem = CREATED[name]

    class Broken(OddEnv):
        def __init__(self):
            if error is not None:
                raise error

    envs = odd(Broken)
    with pytest.raises(ValueError, match=f"^env.id is '{envs.id}', {problem}"):
        envs.make(1, None)


def test_a_discrete_space_that_is_too_large_to_be_named_raises(odd):
    """Naming all elements took all memory."""
    envs = odd(kwargs={"space": spaces.Discrete(2**60)})
    with pytest.raises(ValueError, match=f"env is '{envs.id}': .*1152921504606846976 elements; .* at most 1000000"):
        envs.make(1, None)


@pytest.mark.parametrize("text", [True, False], ids=["text", "native"])
def test_an_environment_that_cannot_be_copied_is_played(odd, text):
    assert len(play(odd(Unpicklable), text)) == 2


def test_options_of_lrl_do_not_reach_an_environment(odd):
    envs = odd(RejectingOptions)
    assert len(play(envs, text=False)) == 2
    envs = odd(reset_options={"low": 1})
    play(envs, text=True)
    assert {str(env.resets[0][1]) for env in envs.made if env.resets} == {"{'low': 1}"}


def test_an_idle_copy_is_neither_reset_nor_stepped():
    """Two episodes of different lengths took ten resets."""
    envs = GymnasiumEnvs("CartPole-v1")
    counted = {"reset": 0, "step": 0}
    make = envs.make

    def counting(num_envs, response_format):
        vectorized: Any = make(num_envs, response_format)
        for env in vectorized.envs:
            for name in counted:
                setattr(env, name, count(getattr(env, name), name))
        return vectorized

    def count(method, name):
        def counted_method(*args, **kwargs):
            counted[name] += 1
            return method(*args, **kwargs)

        return counted_method

    envs.make = counting
    results = play(envs, text=False)
    assert results.lengths[0] != results.lengths[1]
    assert counted == {"reset": 2, "step": int(results.lengths.sum())}


@pytest.mark.parametrize(
    ("limit", "settings", "told"), [(None, {}, 1), (9, {}, 0), (None, {"max_episode_steps": 9}, 0)]
)
def test_an_environment_without_time_limit_logs_a_warning(odd, caplog, limit, settings, told):
    envs = odd(limit=limit, **settings)
    for _ in range(2):
        envs.make(1, None).close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * told
    assert all(
        f"env is '{envs.id}', for which Gymnasium has no time limit" in record.getMessage() for record in caplog.records
    )


def test_a_network_is_told_which_observation_is_not_a_number(odd):
    """It ended with the advice to try a smaller learning rate."""
    envs = odd(kwargs={"observation": np.array([0, np.nan], np.float32)})
    policy = MLPPolicy()
    policy.connect_spaces(*envs.spaces)
    policy.connect(envs.codec)
    policy.configure()
    with pytest.raises(EnvironmentFailedError, match=r"\(episode seed 5, step 1\): observation\[1\] is nan"):
        evaluate_policy(policy, envs, 2, SEED, 2)


SUCCESSES = {  # success of each step, by last step and by any step
    "at the end": ([0, 0, 1], True, True),
    "on the way": ([0, 1, 0], False, True),
    "never": ([0, 0, 0], False, False),
}


class Succeeding(OddEnv):
    """Reports a success at some steps."""

    def __init__(self, successes):
        super().__init__()
        self.successes = successes

    def step(self, action):
        *outcome, _ = super().step(action)
        return (*outcome, {"success": self.successes[self.steps - 1]})


@pytest.mark.parametrize("text", [True, False], ids=["text", "native"])
@pytest.mark.parametrize("name", SUCCESSES)
def test_success_is_read_at_the_last_step_or_at_any_step(odd, name, text):
    successes, last, any_step = SUCCESSES[name]
    for success_at, expected in {"last_step": last, "any_step": any_step}.items():
        results = play(odd(Succeeding, kwargs={"successes": successes}, success_at=success_at), text)
        assert results.successes.tolist() == [expected] * 2
        report = results.report("odd", "random")
        assert report["success_at"] == success_at and report["success_rate"] == float(expected)


def test_a_success_on_the_way_outlasts_invalid_responses(odd):
    for success_at, expected in {"last_step": False, "any_step": True}.items():
        envs = odd(Succeeding, kwargs={"successes": [1, 1, 1]}, success_at=success_at, max_invalid=1).make(1, "direct")
        envs.reset(seed=[0])
        assert envs.step(("0",))[4]["success"].tolist() == [True]
        *_, terminated, _, infos = envs.step(("nonsense",))
        assert terminated[0] and infos["success"].tolist() == [expected]


@pytest.mark.parametrize("text", [True, False], ids=["text", "native"])
@pytest.mark.parametrize("success_at", ["last_step", "any_step"])
def test_success_of_an_episode_that_max_turns_cuts_is_that_of_its_turns(odd, success_at, text):
    for successes in ([0, 1, 0], [1, 0, 0], [0, 0, 1]):
        factory = odd(Succeeding, kwargs={"successes": successes}, success_at=success_at)
        policy: Any = RandomActor(response_format="direct") if text else NativeActor(factory.spaces[1])
        if text:
            policy.connect(factory.codec)
        runner, row = EnvRunner(policy, factory.make(1, policy.response_format)), np.array([0])
        runner.reset(row, row)
        for turn in range(2):
            keys = RandomKeys(seed=0, purpose="rollout", collection=0, env=row, turn=row + turn)
            step = runner.turn(keys, max_turns=2)
        assert step.truncated[0] and not step.terminated[0] and runner.ended[0]
        expected = successes[1] if success_at == "last_step" else max(successes[:2])
        assert step.infos["success"].tolist() == [bool(expected)]
        runner.envs.close()


def test_success_at_has_two_values():
    with pytest.raises(ValueError, match="env.success_at is 'end'; it must be one of last_step, any_step"):
        GymnasiumEnvs("CartPole-v1", success_at="end")  # pyright: ignore[reportArgumentType]
