"""Responses as a tree: which prefixes there are, who sees whom, and that nothing comes out differently."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_architectures import LORA, load
from tiny_runs import WORDS, batch_of, text_policy

from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.functional.distributions import Categorical
from lrl.lm import layouts
from lrl.lm.config import LoRAConfig
from lrl.lm.heads import ValueHeadConfig
from lrl.lm.layouts import Turns, find_prefixes, lay_out, lay_out_distinct, lay_out_trees, pack
from lrl.types import RandomKeys


def padded(rows, width):
    mask = torch.tensor([[column < len(row) for column in range(width)] for row in rows])
    return torch.tensor([[*row, *[9] * (width - len(row))] for row in rows]), mask


def turns(prompts, responses):
    (ids, prompt_mask), (response, mask) = padded(prompts, 4), padded(responses, 5)
    return Turns(ids, prompt_mask, response, mask)


def test_prefixes_are_numbered_by_length_and_the_last_token_is_none():
    ids, mask = padded([[5, 6, 7], [5, 6, 8], [5], [5, 4], [5, 6, 7]], 5)
    found = find_prefixes(torch.tensor([0, 0, 0, 0, 1]), ids, mask.sum(1))
    assert sorted(zip(found.root.tolist(), found.ids.tolist(), found.depth.tolist(), strict=True)) == [
        (0, 5, 1), (0, 6, 2), (1, 5, 1), (1, 6, 2)
    ]  # fmt: skip
    named = [(found.root[n].item(), found.depth[n].item()) for n in range(4)]
    before = [
        [None if n < 0 else named[n] for n in row[:size]] for row, size in zip(found.before.tolist(), mask.sum(1))
    ]
    assert before[0] == before[1] == [None, (0, 1), (0, 2)]
    assert before[2] == [None] and before[3] == [None, (0, 1)] and before[4] == [None, (1, 1), (1, 2)]
    for number, parent in enumerate(found.parent.tolist()):
        assert (parent == -1) == (found.depth[number] == 1)
        if parent >= 0:
            assert found.root[parent] == found.root[number] and found.depth[parent] == found.depth[number] - 1


def test_a_row_holds_each_prefix_once_and_each_sees_its_own():
    layout = lay_out_trees(turns([[1, 2]] * 5 + [[3]], [[5, 6, 7], [5, 6, 8], [5, 4, 7], [5, 6], [5, 4, 8], [5]]))
    turn, column = layout.turn, layout.index
    assert turn[0].tolist() == [-1, 5, -1, -1, -1] and column[1].tolist() == [0, 1, 2, 3, 3]
    for place in (2, 3, 4):  # each token is one of the turn that it is said to be of
        text = [1, 2, *[[5, 6, 7], [5, 6, 8], [5, 4, 7], [5, 6], [5, 4, 8]][turn[1, place]]]
        assert text[column[1, place]] == layout.input_ids[1, place]
    assert layout.input_ids[1].tolist()[:3] == [1, 2, 5] and sorted(layout.input_ids[1].tolist()[3:]) == [4, 6]
    assert layout.input_ids[0].tolist() == [0, 3, 0, 0, 0]
    assert layout.position_ids[1].tolist() == [0, 1, 2, 3, 3]
    mask = layout.attention_mask(torch.float32)[:, 0] == 0
    assert mask[1].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 0, 1],
    ]
    assert mask[0, 1].int().tolist() == [0, 1, 0, 0, 0]
    assert layout.kept[3, :2].tolist() == [0, 1] and layout.kept[0, :3].tolist() == [0, 1, layout.kept[1, 2].item()]


def test_prompts_with_a_common_prefix_are_in_one_row_and_logits_only_where_a_token_is_predicted(monkeypatch):
    monkeypatch.setattr(layouts, "_MIN_PREFIX", 2)
    groups = turns([[1, 2, 3, 4]] * 3 + [[1, 2, 5]] * 3, [[6, 7], [6, 8], [7], [6, 7], [6, 7], [8]])
    layout = lay_out_trees(groups)
    assert layout.input_ids.shape[0] == 1 and layout.input_ids[0].tolist()[:2] == [1, 2]
    assert sorted(layout.input_ids[0].tolist()[2:]) == [3, 4, 5, 6, 6]
    seen = layout.attention_mask(torch.float32)[0, 0] == 0
    texts = {}
    for column, ids in enumerate(layout.input_ids[0].tolist()):
        text = [layout.input_ids[0, other].item() for other in range(column) if seen[column, other]] + [ids]
        assert layout.position_ids[0, column] == len(text) - 1
        texts[layout.logit_columns.tolist().index(column) if column in layout.logit_columns else -1 - column] = text
    ids, prompt_mask, response, mask = groups
    for turn, place in mask.nonzero().tolist():
        before = [*ids[turn][prompt_mask[turn]].tolist(), *response[turn, :place].tolist()]
        assert texts[layout.kept[turn, place].item()] == before
    assert {len(text) for number, text in texts.items() if number < 0} == {1, 3}  # but for column 1, of padding


def test_there_is_no_tree_where_responses_differ():
    assert lay_out_trees(turns([[1]] * 2, [[5, 6, 7, 8, 4], [7, 6, 7, 8, 4]])) is None
    assert lay_out_trees(turns([[1]], [[5, 6]])) is None
    assert lay_out_trees(turns([[1], [2]], [[5, 6], [5, 6]])) is None
    assert lay_out_trees(turns([[1]] * 4, [[5]] * 4)) is None


def random_groups(counts, length, shared):
    """Turns of groups that differ in size; the responses of each have ``shared`` common tokens."""
    generator = torch.Generator().manual_seed(0)
    prompt_of = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    prompts = torch.randint(1000, (len(counts), 100), generator=generator)[prompt_of]
    responses = torch.randint(1000, (len(prompt_of), length), generator=generator)
    responses[:, :shared] = torch.arange(shared)
    return Turns(prompts, torch.ones_like(prompts).bool(), responses, torch.ones_like(responses).bool())


def test_there_is_no_tree_where_rows_would_be_padded_much_or_very_long():
    assert lay_out_trees(random_groups([8] * 8, 24, 12)) is not None
    assert lay_out_trees(random_groups([64] + [1] * 60, 24, 12)) is None  # all rows as long as the largest tree
    assert lay_out_trees(random_groups([32] * 2, 300, 100)) is None  # attention to 6,500 columns


def test_equal_turns_are_arranged_once_and_refer_to_their_own_text(models):
    drawn = [[5, 6, 7], [5, 6], [5, 6, 7], [4], [5, 6], [4]]
    some = turns([[1, 2], [3], [1, 2], [3], [1], [3]], drawn)
    ids, prompt_mask, response, mask = some
    for arrange in (
        partial(lay_out, share=False),
        partial(lay_out, share=False, align="left"),
        partial(pack, max_row_tokens=12),
    ):
        layout = lay_out_distinct(arrange, some)
        once = arrange(Turns(*(part[[0, 1, 3, 4]] for part in some)))
        assert torch.equal(layout.input_ids, once.input_ids) and layout.row.shape == (6,)
        assert torch.equal(layout.row[[0, 3]], layout.row[[2, 5]])
        for row, column in (layout.turn >= 0).nonzero().tolist():
            turn, place = int(layout.turn[row, column]), int(layout.index[row, column])
            text = [*ids[turn][prompt_mask[turn]], *response[turn][mask[turn]]]
            assert text[place] == layout.input_ids[row, column]
        for model in models:
            plain = Categorical(model.logits(lay_out(Turns(ids, prompt_mask, response, mask), share=False))).logprobs(
                response
            )
            torch.testing.assert_close(Categorical(model.logits(layout)).logprobs(response) * mask, plain * mask)


@pytest.fixture(scope="module")
def models(folder):
    last = LoRAConfig(r=2, alpha=8, last_layers=2)
    made = [load(folder, dtype="float64"), load(folder, dtype="float64", lora=last)]
    for weight in (weight for model in made for weight in model.parameters() if weight.requires_grad):
        with torch.no_grad():
            weight.add_(0.1 * torch.ones_like(weight).cumsum(-1).sin())
    return [model.eval() for model in made]


RESPONSES = st.lists(st.sampled_from([4, 5]), min_size=1, max_size=5)


PROMPTS = [[[6, 7, 8, 4], [5], [8, 8]], [[6, 7, 8, 4], [6, 7, 8], [6, 7, 4]]]


def check_against_plain_pass(models, ids, prompt_mask, response, mask):
    trees = lay_out_trees(Turns(ids, prompt_mask, response, mask))
    for model in models:
        results = []
        plain = lay_out(Turns(ids, prompt_mask, response, mask), share=False)
        inputs = {"prompt_ids": ids, "prompt_mask": prompt_mask, "response_ids": response}
        for layout in (plain, model.lay_out(inputs, mask)):
            logprobs = Categorical(model.logits(layout)).logprobs(response)
            (logprobs * mask * torch.linspace(-1, 1, mask.numel()).view(mask.shape)).sum().backward()
            grads = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.requires_grad])
            model.zero_grad()
            results.append(((logprobs * mask).detach(), grads))
        for one, other in zip(*results, strict=True):  # norms and softmax are in float32
            assert float((one - other).norm()) <= 1e-5 * float(one.norm())
    if trees is not None:
        assert trees.input_ids.numel() <= plain.input_ids.numel()


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1), st.lists(st.tuples(st.integers(0, 2), RESPONSES), min_size=6, max_size=12))
def test_logprobs_and_gradients_are_those_of_the_plain_pass(models, which, drawn):
    prompts = [PROMPTS[which][number] for number, _ in drawn]
    ids, prompt_mask, response, mask = turns(prompts, [tokens for _, tokens in drawn])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "_MIN_PREFIX", 2)
        check_against_plain_pass(models, ids, prompt_mask, response, mask)
    assert max(max(tokens) for _, tokens in drawn) < len(WORDS)


LAST = LoRAConfig(r=2, alpha=8, last_layers=2)
CRITIC = ValueHeadConfig(adapter=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("critic", "lora"),
    [(None, LORA), (ValueHeadConfig(), LORA), (CRITIC, LORA), (ValueHeadConfig(), LAST), (CRITIC, LAST), (None, None)],
)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_a_policy_and_its_reference_say_the_same_with_and_without_trees(
    folder, monkeypatch, critic, lora, chunked, single
):
    policy = text_policy(folder, max_new_tokens=4, value_head=critic, lora=lora)
    policy.connect(FrozenLakeCodec())
    policy.configure()
    policy.build_reference(warm_started=False)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.ones_like(weight).cumsum(-1).sin())
    maps = [render_map(state, ("SFFF", "FHFH", "FFFH", "HFFG")) for state in (0, 1, 0, 1, 0, 1, 0, 1)]
    rows = np.arange(8)
    keys = RandomKeys(seed=0, purpose="test", collection=0, env=rows, turn=0 * rows)
    batch, results = batch_of(policy.act(maps, [()] * 8, keys, policy.sampling)), []
    ids, mask = batch.inputs["response_ids"].clone(), torch.ones_like(batch.response_mask)
    ids[:, :2] = torch.tensor([5, 6])  # then they differ, but for the last of each prompt, which ends there
    mask[6:, 2:] = False
    batch = batch.replace(inputs={**batch.inputs, "response_ids": ids * mask}, response_mask=mask)
    policy.language_model.chunks = chunked
    monkeypatch.setattr("lrl.lm.model.AT_ONCE", 10)
    tokens = []
    for share in (1.0, 0.0):
        monkeypatch.setattr(layouts, "_TREE_SHARE", share)
        monkeypatch.setattr(layouts, "_MIN_PREFIX", 2 if single else 1000)
        if single:
            monkeypatch.setattr(layouts, "cost_of", lambda rows, width: rows / 10)
        layout = policy.eval()._layout(batch.inputs, batch.response_mask)
        assert share == 0 or len(layout.input_ids) == 2 - single
        tokens.append(layout.input_ids.numel())
        out = policy.evaluate(batch)
        weights = torch.linspace(-1, 1, 8)[:, None] * batch.response_mask
        (weights * (out.logprobs + out.entropy) + (0 if critic is None else weights * out.values)).sum().backward()
        grads = torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None])
        policy.zero_grad()
        results.append((out.logprobs, out.entropy, out.values, policy.reference_logprobs(batch), grads))
    for one, other in zip(*results, strict=True):
        assert one is None or float((one - other).detach().norm()) <= 1e-5 * float(one.detach().norm())
    assert tokens[0] < tokens[1] and not torch.allclose(results[0][0], results[0][3], atol=1e-2)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), RESPONSES), min_size=1, max_size=9))
def test_each_prefix_that_predicts_a_token_is_found_once(rooted):
    roots, texts = zip(*rooted, strict=True)
    ids, mask = padded(texts, 5)
    trie = find_prefixes(torch.tensor(roots), ids, mask.sum(1))
    spelled = [(roots[text], *texts[text][:depth]) for text, depth in zip(trie.text, trie.depth, strict=True)]
    assert sorted(spelled) == sorted({(root, *text[:n]) for root, text in rooted for n in range(1, len(text))})
    assert [root for root, *_ in spelled] == trie.root.tolist()
    assert [last for *_, last in spelled] == trie.ids.tolist()
    assert sorted(trie.depth.tolist()) == trie.depth.tolist()
    numbers = {prefix: number for number, prefix in enumerate(spelled)}
    assert trie.parent.tolist() == [numbers.get(prefix[:-1], -1) for prefix in spelled]
    wanted = [[numbers.get((root, *text[:n]), -1) for n in range(len(text))] for root, text in rooted]
    assert trie.before.tolist() == [[*row, *[-1] * (ids.shape[1] - len(row))] for row in wanted]


def test_no_row_is_wider_than_the_model_takes(monkeypatch):
    monkeypatch.setattr(layouts, "_MIN_PREFIX", 2)
    groups = turns([[1, 2, 3, 4]] * 3 + [[1, 2, 5]] * 3, [[6, 7], [6, 8], [7], [6, 7], [6, 7], [8]])
    assert len(lay_out_trees(groups, max_columns=7).input_ids) == 1
    assert len(lay_out_trees(groups, max_columns=6).input_ids) == 2
    assert lay_out_trees(groups, max_columns=4) is None


def test_there_are_no_trees_with_dropout(folder):
    model = load(folder)
    ids, prompt_mask, response, mask = turns([[5]] * 4, [[5, 6, 7]] * 4)
    inputs = {"prompt_ids": ids, "prompt_mask": prompt_mask, "response_ids": response}
    assert model.eval().lay_out(inputs, mask).tree is not None
    assert model.train().lay_out(inputs, mask).tree is None
