"""Updates on episodes with history compute the tokens that turns have in common once, with equal loss and gradients."""

from dataclasses import replace
from statistics import fmean

import pytest
import torch
from benchmarks.turn_trees import ARCHITECTURES, SETTINGS, distances, distances_to_float32, environment, module_of, play
from tiny_architectures import folder_of

from lrl.lm.layouts import Layout, additive_mask, in_subtree, pack

KINDS = ("writing", "choosing")
NAMES = [*SETTINGS]
ROTATED = [
    (architecture, kind, NAMES[(place + number) % 3])
    for place, architecture in enumerate(ARCHITECTURES)
    for number, kind in enumerate(KINDS)
]
"""Each architecture with some settings; ``benchmark.py turn_trees`` measures all."""
RARELY = ("granite", "olmo2", "qwen3")
"""Architectures whose updates by writing are compared in ``make test-all`` only, because they take longest."""
CASES = [("llama", "choosing", NAMES[0])]
CASES += [
    pytest.param(*case, marks=pytest.mark.reference if case[0] in RARELY and case[1] == "writing" else pytest.mark.slow)
    for case in dict.fromkeys([*(("llama", kind, name) for kind in KINDS for name in NAMES), *ROTATED])
    if case not in CASES
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(("architecture", "kind", "name"), CASES)
def test_loss_and_gradients_are_those_of_one_row_per_turn(root, architecture, kind, name):
    env = environment()
    module = module_of(kind, folder_of(root, architecture), env, **SETTINGS[name])
    assert module.policy.language_model.share and module.needs_reference
    far = distances(module, play(module, env))
    assert far["gradient"] <= 1e-5 and far["loss"] <= 1e-5 and far["tokens"] < 0.5
    assert far["memory"] < 0.9


def wrong_mask(layout, dtype):
    """Return a mask with which tokens attend to those of other turns."""
    return additive_mask(in_subtree(torch.where(layout.last < 0, -1, layout.last.shape[1] - 1)), dtype)


def wrong_positions(*args):
    """Return a layout whose positions are columns."""
    layout = pack(*args)
    return replace(layout, position_ids=torch.arange(layout.input_ids.shape[1]).expand_as(layout.input_ids))


@pytest.mark.parametrize("fault", ["mask", "positions"])
@pytest.mark.parametrize("kind", [pytest.param("writing", marks=pytest.mark.slow), "choosing"])
def test_a_wrong_mask_or_position_would_be_noticed(root, monkeypatch, kind, fault):
    env = environment()
    module = module_of(kind, folder_of(root, "llama"), env)
    rollout = play(module, env)
    if fault == "mask":
        right = Layout.attention_mask
        chosen = lambda layout, dtype: (right if layout.single else wrong_mask)(layout, dtype)  # noqa: E731
        monkeypatch.setattr(Layout, "attention_mask", chosen)
    else:
        monkeypatch.setattr("lrl.lm.model.pack", wrong_positions)
    far = distances(module, rollout)
    assert far["gradient"] > 1e-3 and far["loss"] > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_the_gradient_is_as_near_to_float32_as_with_one_row_per_turn(root, kind):
    env, found = environment(), []
    for architecture in ARCHITECTURES[:2]:
        module = module_of(kind, folder_of(root, architecture), env, dtype="bfloat16").bfloat16()
        found += [distances_to_float32(module, play(module, env, episodes=1, seed=seed)) for seed in range(2)]
    shared, alone = map(fmean, zip(*found, strict=True))
    assert 0 < shared <= 1.2 * alone
