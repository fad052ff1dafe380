"""Turns with the same text are computed once, and everything comes out as if they were not."""

import numpy as np
import pytest
import torch
from tiny_architectures import LORA
from tiny_runs import batch_of, save_tiny_model, text_policy

from lrl.codecs.grid import FrozenLakeCodec, render_map
from lrl.models import distinct_turns as module
from lrl.models.distinct_turns import distinct_turns
from lrl.models.value_head import ValueHeadConfig
from lrl.types import RandomKeys


def turns(prompts, responses, width=4):
    def padded(rows):
        mask = torch.tensor([[column < len(row) for column in range(width)] for row in rows])
        return torch.tensor([[*row, *[9] * (width - len(row))] for row in rows]), mask

    (ids, prompt_mask), (response, mask) = padded(prompts), padded(responses)
    return {"prompt_ids": ids, "prompt_mask": prompt_mask, "response_ids": response}, mask


def test_the_first_of_equal_turns_stands_for_all():
    found = distinct_turns(*turns([[1], [2], [1], [2], [1], [1]], [[3], [3], [3], [3], [3, 4], [3]]))
    assert sorted(found.first.tolist()) == [0, 1, 4]
    assert found.first[found.index].tolist() == [0, 1, 0, 1, 4, 0]


def test_what_is_padding_does_not_count_and_where_a_prompt_ends_does():
    found = distinct_turns(*turns([[1, 2], [1], [1, 2], [1], [1, 2]], [[3], [2, 3], [3], [2, 3], [3]]))
    assert found.first[found.index].tolist() == [0, 1, 0, 1, 0]
    zero = distinct_turns(*turns([[1], [1], [1], [1]], [[0], [0, 0], [0], [0, 0]]))
    assert zero.first[zero.index].tolist() == [0, 1, 0, 1]


def test_nothing_is_left_out_where_few_turns_are_repeated():
    assert distinct_turns(*turns([[1], [2], [3]], [[3], [3], [3]])) is None
    assert distinct_turns(*turns([[1], [2], [1]], [[3], [3], [3]])) is None
    assert distinct_turns(*turns([[1]], [[3]])) is None


def test_sums_that_collide_are_noticed(monkeypatch):
    monkeypatch.setattr(module.torch, "randint", lambda *_, **__: torch.zeros((), dtype=torch.long))
    assert distinct_turns(*turns([[1], [2], [1], [2]], [[3], [3], [3], [3]])) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tied", tie_word_embeddings=True)


@pytest.mark.parametrize(("critic", "lora"), [(None, LORA), (ValueHeadConfig(), None)])
def test_a_policy_and_its_gradient_are_the_same(folder, monkeypatch, critic, lora):
    policy = text_policy(folder, max_new_tokens=4, value_head=critic, lora=lora)
    policy.connect(FrozenLakeCodec())
    policy.configure()
    policy.build_reference(warm_started=False)
    maps = [render_map(state, ("SFFF", "FHFH", "FFFH", "HFFG")) for state in (0, 1)]
    rows = np.arange(2)
    keys = RandomKeys(seed=0, purpose="test", collection=0, env=rows, turn=0 * rows)
    batch, results = batch_of(policy.act(maps, [()] * 2, keys))[torch.tensor([0, 1, 1, 0, 0, 1])], []
    seen = []
    policy.language_model.model.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["input_ids"].numel()), with_kwargs=True
    )
    for share in (0.5, 0.0):
        monkeypatch.setattr(module, "_SHARE", share)
        seen.append(0)
        out = policy.evaluate(batch)
        weights = torch.linspace(-1, 1, 6)[:, None]
        (weights * (out.logprobs + out.entropy) + (0 if critic is None else weights * out.values)).sum().backward()
        grads = torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None])
        policy.zero_grad()
        results.append((out.logprobs, out.entropy, out.values, policy.reference_logprobs(batch), grads))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    plain = seen[len(seen) // 2 + 1]
    once, all_turns = (sum(part) for part in np.split(np.array(seen), [len(seen) // 2]))
    assert once < all_turns
    monkeypatch.setattr(module, "_SHARE", 0.5)
    seen.clear()
    policy.evaluate(batch, dropout_seed=1)  # dropout differs from turn to turn
    policy.needs_distribution = True
    assert policy.evaluate(batch).distribution is not None
    assert seen[0] == seen[1] == plain
