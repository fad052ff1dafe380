"""Findings of single detectors, on small arrays that are right or have a mistake."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from lrl.codecs.babyai import BabyAICodec
from lrl.codecs.boards import PlainBoardCodec, RagenBoardCodec
from lrl.codecs.numbers import NumberFormat
from lrl.codecs.registry import codec_for
from lrl.codecs.space_formats import DiscreteFormat
from lrl.codecs.spaces import SpaceCodec
from lrl.diagnosis.credit import advantages, neighbours
from lrl.diagnosis.detectors import (
    drawn_tokens,
    recorded_values,
    reference_moves,
    sampled_and_trained,
    sampled_distribution,
)
from lrl.diagnosis.environments import data_set, formats, new_episodes, order_of_turns, resets, start_states
from lrl.diagnosis.episodes import _wrong_numbers, observation_texts, prompts, replayed, shown_answers
from lrl.diagnosis.estimators import ppo_credit, without_last
from lrl.diagnosis.losses import update
from lrl.diagnosis.metrics import diagnose_metrics
from lrl.diagnosis.sample import Sample
from lrl.envs.frozen_lake import ExpertQRows
from lrl.prompts import RESPONSE_FORMATS
from lrl.training.environment_facts import _of_rows, misread, named, number_format
from lrl.training.recomputed import spread_turns
from lrl.training.replay import _whole_episodes
from lrl.training.samples import _chosen_envs, _configured


def sample(settings, responses=(), observations=(), **arrays):
    """Return turns of four environments at each time, with one token unless ``mask`` has more."""
    count = len(next(iter(arrays.values())))
    mask = np.ones((count, 1), dtype=bool)
    no, index = np.zeros(count, dtype=bool), np.arange(count)
    common = {"env": index % 4, "time": index // 4, "turn": index // 4, "group": index % 4 // 2, "mask": mask}
    common |= {"terminated": no, "truncated": no, "cut": no}
    return Sample(
        collection=0,
        settings={"half_precision": False} | settings,
        observations=list(observations) or [""] * count,
        responses=list(responses) or [""] * count,
        pieces=[],
        arrays=common | arrays,
    )


def found(detector, *args):
    return [finding.cause for finding in detector(*args)]


EPISODE = {"algorithm": "GRPOModule", "credit": {"kind": "episode"}, "advantage_scale": "none"}
RETURNS = np.arange(16.0) ** 2
WIDE = np.arange(3)[None] < 1 + np.arange(16)[:, None] % 3


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda advantages: advantages, []),
        (lambda advantages: advantages * without_last(WIDE), ["end token not trained"]),
        (lambda advantages: advantages[:, :1] * np.roll(WIDE, 1, axis=1), ["shifted mask"]),
        (lambda advantages: 0 * advantages, ["advantages are all 0"]),
        (
            lambda advantages: advantages + (np.arange(16) % 5 == 0)[:, None],
            ["advantages of invalid responses are wrong"],
        ),
        (
            lambda advantages: np.where((np.arange(16) % 5 == 0)[:, None], 0.0, advantages + 7),
            ["advantages of invalid responses are wrong"],
        ),
    ],
)
def test_the_place_of_wrong_advantages_is_named(change, cause):
    groups = np.arange(16) // 4
    right = RETURNS - RETURNS.reshape(4, 4).mean(1)[groups]
    arrays = {"env": np.arange(16), "group": groups, "mask": WIDE, "rewards": RETURNS, "valid": np.arange(16) % 5}
    assert found(advantages, sample(EPISODE, **arrays, advantages=change(right[:, None] * WIDE))) == cause


@pytest.mark.parametrize(
    ("axis", "cause"), [(0, []), (1, ["time and environments are swapped"]), (-1, ["returns run backwards in time"])]
)
def test_the_axis_of_returns_is_checked(axis, cause):
    rewards, values = np.random.default_rng(0).normal(size=(2, 8, 4))
    order = {0: lambda rows: rows, 1: lambda rows: rows.T, -1: lambda rows: rows[::-1]}[axis]
    back = {0: lambda rows: rows, 1: lambda rows: rows.T, -1: lambda rows: rows[::-1]}[axis]
    returns, ordered, of_state = [], order(rewards), order(values)
    for row in reversed(range(len(ordered))):
        future = 0.05 * of_state[row + 1] + 0.95 * returns[0] if returns else 0 * ordered[row]
        returns.insert(0, ordered[row] + 0.99 * future)
    arrays = {"rewards": rewards, "values": values, "returns": back(np.array(returns))}
    credit = {"kind": "turn", "gamma": 0.99, "gae_lambda": 0.95}
    flat = {name: array.reshape(-1) for name, array in arrays.items()}
    columns = {name: flat[name][:, None] for name in ("values", "returns")}
    assert found(neighbours, sample({"credit": credit}, rewards=flat["rewards"], **columns)) == cause


@pytest.mark.parametrize(
    ("mistake", "cause"),
    [
        ({}, []),
        ({"shifted_ends": 1}, ["ends of episodes are shifted by one turn"]),
        ({"bootstrap_terminal": "final state"}, ["termination treated as truncation"]),
        ({"bootstrap_terminal": "next episode"}, ["termination treated as truncation"]),
        ({"reward_scale": 3.0}, ["reward has the wrong scale"]),
        ("averaged", ["values are averaged over padding"]),
        ("last column", ["values are those of padding"]),
        ("shifted", ["shifted mask"]),
        ("divided", ["advantages are divided by the number of tokens"]),
        ("offset", ["reward has an offset"]),
        ("baseline", ["values are those of padding"]),
    ],
)
def test_a_mistake_in_gae_is_named(mistake, cause):
    credit = {"kind": "turn", "gamma": 0.9, "gae_lambda": 0.9, "critic_lambda": None, "token_gamma": 1.0}
    credit |= {"token_lambda": 1.0, "local_penalties": False, "bootstrap_last": False, "normalise": False}
    values = np.random.default_rng(0).normal(size=(16, 3))
    arrays = {"mask": WIDE, "rewards": RETURNS, "values": values, "terminated": np.arange(16) % 7 == 5}
    arrays["final_values"] = np.where(arrays["terminated"], 3.0, 0.0)
    settings = {"algorithm": "PPOValueHeadModule", "credit": credit}
    changed = {
        "averaged": {"values": values.mean(1, keepdims=True).repeat(3, 1)},
        "last column": {"values": values[:, -1:].repeat(3, 1)},
        "divided": {"values": values},
        "shifted": {"values": values},
        "baseline": {"values": values},
        "offset": {"rewards": (RETURNS - RETURNS.mean()) / RETURNS.std()},
    }.get(mistake if isinstance(mistake, str) else "", {})
    given = ppo_credit(sample(settings, **arrays | changed), **({} if changed else mistake))[0]
    given = given + (values[:, :1] - values[:, -1:]) * WIDE if mistake == "baseline" else given
    given = (
        np.roll(given.sum(1, keepdims=True) / WIDE.sum(1, keepdims=True) * WIDE, 1, 1)
        if mistake == "shifted"
        else given
    )
    given = given / WIDE.sum(1, keepdims=True) if mistake == "divided" else given
    assert found(advantages, sample(settings, **arrays, advantages=given)) == cause


@pytest.mark.parametrize(("difference", "causes"), [(1e-3, ["reference moves with the policy"]), (2e-3, [])])
def test_the_reference_must_stay_where_the_policy_was(difference, causes):
    own = np.full((16, 1), -1.0)
    arrays = {"evaluated": own, "ref_logprobs": own + difference, "moved": np.full((16, 1), 0.07)}
    assert found(reference_moves, [replace(sample({}, **arrays), collection=number) for number in range(2)]) == causes


def test_tokens_must_be_those_of_the_current_weights():
    ids = np.arange(16)[:, None]
    assert found(drawn_tokens, sample({"stop_ids": []}, ids=ids, drawn=ids)) == []
    wrong = found(drawn_tokens, sample({"stop_ids": []}, ids=ids, drawn=np.where(ids % 5, ids, ids + 1)))
    assert wrong == ["tokens are not sampled by the current weights"]


@pytest.mark.parametrize(
    ("key", "logprob", "cause"),
    [
        (1, -1.2, "random numbers are used again"),
        (1, -0.2, "tokens are not sampled by the current weights"),  # so likely that many random numbers give them
        (2, -1.2, "tokens are not sampled by the current weights"),
    ],
)
def test_random_numbers_of_other_turns_are_recognised(key, logprob, cause):
    ids, by = np.arange(16)[:, None], np.zeros((16, 2), dtype=bool)
    by[:, 0] = ids[:, 0] < 2
    by[2:, key:] = True
    arrays = {"drawn": np.where(ids < 2, ids, ids + 1), "drawn_by": by, "plain_logprobs": np.full((16, 1), logprob)}
    settings = {"stop_ids": [], "random_keys": ["", "the group"]}
    assert found(drawn_tokens, sample(settings, ids=ids, **arrays)) == [cause]


@pytest.mark.parametrize(("rare", "is_found"), [(1e-3, False), (0.3, True)])
def test_unlikely_tokens_may_be_missing_by_chance_only_if_they_are_rare(rare, is_found):
    entropy = np.full((100, 1), -rare * np.log(rare) - (1 - rare) * np.log(1 - rare))
    likeliest = np.full((100, 1), np.log(1 - rare))
    assert bool(found(sampled_distribution, [sample({}, evaluated=likeliest, entropy=entropy)])) == is_found


def test_prompts_must_contain_the_system_message():
    right, wrong = ({"with_system": np.arange(16) >= missing} for missing in (0, 1))
    assert found(prompts, sample({}, **right)) == []
    assert found(prompts, sample({}, **wrong)) == ["prompts do not contain the system message"]


def test_a_value_is_needed_where_an_episode_is_cut():
    values, cut = np.ones((16, 1)), np.arange(16) >= 12
    arrays = {"values": values, "evaluated_values": values, "cut": cut}
    assert found(recorded_values, sample({}, **arrays, final_values=cut * 1.0)) == []
    causes = found(recorded_values, sample({}, **arrays, final_values=np.zeros(16)))
    assert causes == ["end of the collection treated as termination"]
    causes = found(recorded_values, sample({}, **arrays | {"truncated": cut}, final_values=np.zeros(16)))
    assert causes == ["truncation treated as termination"]


@pytest.mark.parametrize(
    ("settings", "causes"),
    [
        ({"stop_kl": 0.05, "stopped": False}, []),
        ({"stop_kl": 0.07, "stopped": True}, []),
        ({"stop_kl": 0.07, "stopped": False}, ["updates end at another divergence than target_kl"]),
        ({"stop_kl": 0.05, "stopped": True}, ["updates end at another divergence than target_kl"]),
        ({"step_error": 0.01, "step_factor": 1.0}, []),
        ({"step_error": 0.5, "step_factor": 1.5}, ["weights do not follow the optimiser"]),
    ],
)
def test_optimiser_steps_are_compared(settings, causes):
    arrays = {"moved": np.zeros((8, 1)), "advantages": np.zeros((8, 1))}
    assert found(update, sample({"target_kl": 0.06} | settings, **arrays)) == causes


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"kind": "decimals", "precision": 2}, [-1.24, 3.0]),
        ({"kind": "integers"}, [243.0, 999.0]),
        ({"kind": "integers", "ranges": [[-2, 2], [0, 6]]}, [191.0, 500.0]),
        ({"kind": "normalised", "statistics": [[1, 0.5], [0, 0.1]], "precision": 1}, [-4.5, 10.0]),
    ],
)
def test_numbers_of_texts_are_written_as_documented(numbers, expected):
    box = gym.spaces.Box(np.array([-2.41, -3.0]), np.array([2.41, 3.0]), dtype=np.float64)
    codec = SpaceCodec(box, gym.spaces.Discrete(2), NumberFormat(**numbers))
    native = np.array([-1.237, 3.0])
    text = codec.observation_to_text(native)
    assert [float(number) for number in re.findall(r"-?[0-9.]+", text)] == expected
    form = number_format(codec, box)
    assert _wrong_numbers(np.array([expected]), native[None], form) == ""
    assert "instead of" in _wrong_numbers(np.array([expected]) + np.array([0, 3]), native[None], form)


def test_sampling_and_training_must_agree():
    logprobs = -np.ones((16, 1))
    assert found(sampled_and_trained, sample({}, logprobs=logprobs, evaluated=logprobs)) == []
    other = sample({}, logprobs=logprobs, evaluated=logprobs * 1.1)
    assert found(sampled_and_trained, other) == ["sampling and training disagree"]


def test_texts_must_show_the_state():
    state = np.random.default_rng(0).normal(size=(40, 2)).round(3)
    right = [f"{a:.3f}, {b:.3f}" for a, b in state]
    assert found(observation_texts, sample({}, observations=right, replay_native=state)) == []
    wrong = [f"{abs(a):.3f}, {b:.3f}" for a, b in state]
    assert found(observation_texts, sample({}, observations=wrong, replay_native=state)) == [
        "observations do not show the state"
    ]
    cells = np.arange(16.0)[:, None]
    same = sample({}, observations=[f"cell {n // 2}" for n in range(16)], replay_native=cells)
    assert found(observation_texts, same) == ["observations do not show the state"]


def test_observations_must_not_contain_the_answer():
    rng, names = np.random.default_rng(0), np.array(["left", "right", "up"])
    best, chosen = names[rng.integers(3, size=(2, 60))]
    arrays = {"success": (best == chosen) * 1.0, "terminated": np.ones(60, dtype=bool)}
    settings = {"action_names": names.tolist()}
    shown = sample(settings, chosen, [f"Go left or up.\n{name}" for name in best], **arrays)
    assert found(shown_answers, shown) == ["prompts contain the answer"]
    assert found(shown_answers, sample(settings, chosen, ["Go left or up."] * 60, **arrays)) == []
    random = sample(settings, chosen, [f"Go {name}." for name in names[rng.integers(3, size=60)]], **arrays)
    assert found(shown_answers, random) == []


def test_rewards_after_an_invalid_response_are_compared():
    valid, expected = np.arange(16) != 8, np.arange(16) % 3 * 1.0
    rewards = np.where(np.arange(16) < 8, expected, np.roll(expected, -1))
    arrays = {"env": np.arange(16), "time": np.zeros(16, dtype=int), "rewards": rewards}
    arrays |= {"valid": valid, "replay_valid": valid}
    ends = {f"replay_{name}": np.zeros(16) for name in ("terminated", "truncated")}
    arrays |= ends | {"replay_rewards": expected, "replay_repeats": np.ones(16), "replay_observed": np.ones(16)}
    assert found(replayed, sample({}, **arrays)) == ["rewards are shifted after invalid responses"]
    late = ends | {"replay_terminated": 1.0 - valid, "rewards": expected}
    assert found(replayed, sample({}, **arrays | late)) == ["invalid responses do not end the episode"]


def of_starts(found, counts, whole=False, collection=0):
    """Return a sample with the start states of a collection, and how often they are equal in a separate environment."""
    settings = {"starts": list(found), "separate_starts": {"counts": list(counts), "all": whole}}
    return replace(sample(settings, env=np.arange(4)), collection=collection)


@pytest.mark.parametrize(
    ("found", "counts", "whole", "is_wrong"),
    [
        ([5] * 16, [1] * 128, False, True),
        ([5] * 5, [1] * 128, False, False),
        ([5] * 64, [128], False, False),  # an environment that always starts in the same state
        ([5] * 64, [120, 8], False, False),
        ([5] * 11, [1] * 11, True, True),  # all groups have the same one of eleven rows
        (range(11), [1] * 11, True, False),
        ([n % 4 for n in range(64)], [1] * 128, False, True),
        (range(64), [1] * 128, False, False),
        ([n % 11 for n in range(64)], [1] * 11, True, False),
    ],
)
def test_start_states_must_vary_as_in_a_separate_environment(found, counts, whole, is_wrong):
    causes = [one.cause for one in start_states([of_starts(found, counts, whole)])]
    assert causes == ["episodes start in too few states"] * is_wrong


def test_start_states_of_all_collections_are_compared():
    of_rows = [of_starts([number] * 3, [1] * 128, collection=number) for number in range(12)]
    assert [one.collection for one in start_states(of_rows)] == [9]


def test_episodes_of_a_collection_must_have_their_own_seeds():
    origin = np.stack([np.arange(16), np.arange(16), -np.ones(16)], 1).astype(int)
    arrays = {"turn": np.zeros(16, dtype=int), "env": np.arange(16), "group": np.arange(16), "time": np.zeros(16)}
    assert found(new_episodes, [sample({}, **arrays, origin=origin)]) == []
    assert found(new_episodes, [sample({}, **arrays, origin=origin % 4)]) == ["the same episodes are played again"]
    members = arrays | {"group": np.arange(16) // 4, "origin": np.stack([np.arange(16) // 4] * 2 + [np.arange(16)], 1)}
    assert found(new_episodes, [sample({}, **members)]) == []


def test_responses_are_read_as_documented(monkeypatch):
    codecs = [codec_for(gym.make(name)) for name in ("CartPole-v1", "Taxi-v4", "CliffWalking-v1", "FrozenLake-v1")]
    codecs += [RagenBoardCodec("frozen_lake"), PlainBoardCodec("sokoban"), BabyAICodec()]
    assert all(misread(codec, form) == [] for codec in codecs for form in RESPONSE_FORMATS)
    assert named(codecs[4], "direct", ["right || Up", "go right", ""]).tolist() == [1, 0, 0]
    tagged = "<think>a</think> <answer>Left||</action></answer>"
    assert named(codecs[4], "think_answer", [tagged, tagged.replace("</action>", "")]).tolist() == [0, 1]
    strict = DiscreteFormat.decode

    def lenient(self, text):
        return strict(self, next((name for name in self.texts if name in text), text))

    monkeypatch.setattr(DiscreteFormat, "decode", lenient)
    wrong = sample({"misread": misread(codecs[0], "direct")}, env=np.arange(4))
    assert found(formats, wrong) == ["codec accepts invalid responses"]
    arrays = {"named": np.arange(4) % 2 * 1.0, "valid": np.ones(4)}
    assert found(formats, sample({}, **arrays)) == ["invalid responses are executed"]


def test_rows_must_belong_to_their_states():
    source = ExpertQRows()
    rows = source.rows()

    def causes(rows):
        return found(data_set, sample(_of_rows(source, rows), env=np.arange(4)))

    assert causes(rows) == []
    values = [rows[number - 1] for number in range(len(rows))]
    moved = [replace(row, q_values=other.q_values, action=other.action) for row, other in zip(rows, values)]
    assert causes(moved) == ["Q-values are not those of the states"]
    assert causes([replace(row, observation=other.observation) for row, other in zip(rows, values)]) == [
        "texts of the data set are of other states"
    ]
    assert causes([replace(row, action=(row.action + 1) % 4) for row in rows]) == [
        "actions of the data set are not the best"
    ]


def test_an_environment_must_be_reset_after_an_episode():
    ended, turn = np.arange(16) // 4 == 1, np.arange(16) // 4
    assert found(order_of_turns, sample({}, turn=turn, terminated=ended)) == ["episode goes on after its end"]
    assert found(order_of_turns, sample({}, turn=turn % 2, terminated=ended)) == []
    unreset = np.where(turn == 2, 1.0, np.nan)
    assert found(resets, sample({}, turn=turn % 2, unreset=unreset)) == ["environment is not reset after an episode"]


@pytest.mark.parametrize(
    ("weights", "cause"),
    [
        ({"first and second last": 1.0, "second and last": 0.0, "first and last": 0.0}, "end token not trained"),
        ({"first and second last": 0.0, "second and last": 1.0}, "sampled tokens not trained"),
        ({"padding": 1.0, "first and second last": 0.0, "second and last": 1.0}, "shifted mask"),
        ({"padding": 0.5, "first and second last": 0.5, "second and last": 0.5}, "padding trained"),
        ({"padding": 0.0, "first and second last": 0.5, "second and last": 0.5}, "gradients have the wrong size"),
        ({}, "gradients have the wrong size"),
    ],
)
def test_weights_of_tokens_in_a_gradient_name_the_mask(weights, cause):
    settings = {"token_weights": weights, "gradient_error": 0.5, "gradient_factor": 0.5}
    arrays = {"moved": np.zeros((40, 1)), "advantages": np.zeros((40, 1))}
    assert found(update, sample(settings, **arrays)) == [cause]


@pytest.mark.parametrize(("fall", "causes"), [(0.1, ["update has the wrong sign"]), (2.0, ["learning rate too high"])])
def test_the_direction_of_huge_updates_says_nothing_about_the_sign(fall, causes):
    advantages = np.where(np.arange(40) % 2, 1.0, -1.0)[:, None]
    assert found(update, sample({}, moved=-0.05 * advantages - fall, advantages=advantages)) == causes


def test_updates_are_compared_with_the_configuration():
    settings = {"largest_gradient": 3.0, "gradient_clip_val": 1.0, "repeated_turns": 8}
    arrays = {"moved": np.zeros((16, 1)), "advantages": np.ones((16, 1))}
    assert found(update, sample(settings, **arrays)) == [
        "turns are not trained on equally often",
        "gradients are not clipped",
    ]


def test_a_single_large_update_late_in_a_run_is_no_finding():
    kl = np.full(40, 0.01)
    assert diagnose_metrics({"train/update_kl": np.where(np.arange(40) == 20, 0.9, kl)}) == []
    lasting = np.where((np.arange(40) >= 20) & (np.arange(40) < 30), 0.3, kl)
    (finding,) = diagnose_metrics({"train/update_kl": lasting})
    assert finding.cause == "learning rate too high" and finding.collection == 20  # counted from 0, texts from 1
    assert "median of collections 17 to 26" in finding.evidence


def test_coefficients_are_those_of_the_configuration(tmp_path):
    path = tmp_path / "config.yaml"
    settings = {"ent_coef": 0.5, "kl": {"coef": 0.1, "target": None}, "clip": [0.2, 0.2], "fits_critic": False}
    _configured(path, settings)
    path.write_text("model: {init_args: {ent_coef: 0.0, kl: {coef: 0.2}, clip_range: 0.1}}")
    _configured(path, settings)
    assert settings == {"ent_coef": 0.0, "kl": {"coef": 0.2, "target": None}, "clip": [0.1, 0.1], "fits_critic": False}


def test_groups_with_invalid_responses_are_recorded():
    ones = torch.ones((1, 8), dtype=torch.long)
    valid = torch.arange(8) != 7
    rollout: Any = SimpleNamespace(turn=ones, active=ones > 0, metrics={"action_valid": valid}, num_turns=8)
    rollout.group, rollout.cut, rollout.lengths = torch.arange(8) // 2, ones == 0, ones[0]
    chosen, by_index = _chosen_envs(rollout, 4)
    assert (chosen.nonzero()[:, 0].tolist(), by_index.nonzero()[:, 0].tolist()) == ([0, 1, 6, 7], [0, 1])
    rollout.cut = (torch.arange(8) == 4)[None]
    assert _chosen_envs(rollout, 4)[0].nonzero()[:, 0].tolist() == [0, 1, 4, 5]


def test_last_episodes_are_played_again_before_the_others():
    turns = np.array([0, 1, 0, 1, 0, 1, 0, 0])
    one = sample({}, env=np.repeat([0, 1], [6, 2]), turn=turns, time=np.array([*range(6), *range(2)]))
    assert [episode.tolist() for episode in _whole_episodes(one)] == [[0, 1], [6], [4, 5], [7], [2, 3]]


def test_compared_turns_are_spread_over_the_sample():
    assert spread_turns(15, 8) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert spread_turns(3, 8) == [0, 1, 2]
