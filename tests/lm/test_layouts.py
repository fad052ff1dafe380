"""Every arrangement of turns in rows gives the log-probabilities and gradients of the turns one by one."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from lrl.functional.distributions import Categorical
from lrl.lm.forward import logits_of
from lrl.lm.layouts import Candidates, Turns, lay_out, pack

SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ARCHITECTURES = {
    "llama": LlamaConfig(**SIZES),
    "gpt2": GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=128),
}
ARRANGEMENTS = {
    "plain": lay_out,
    "padded on the right": partial(lay_out, align="left"),
    "packed": pack,
    "packed in rows": partial(pack, max_row_tokens=24),
    "packed in one row": partial(pack, max_row_tokens=1000),
    "packed in narrow rows": partial(pack, max_row_tokens=4),
}


def turns(prompts, responses):
    """Return turns from lists of token ids; the id of the padding occurs nowhere else."""

    def padded(rows):
        width = max(1, *map(len, rows))
        mask = torch.tensor([[column < len(row) for column in range(width)] for row in rows])
        return torch.tensor([[*row, *[39] * (width - len(row))] for row in rows]), mask

    return Turns(*padded(prompts), *padded(responses))


def random_turns(prefix=0, seed=0):
    """Seven turns over three prompts of different lengths that begin with ``prefix`` equal tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size):
        return torch.randint(1, 39, (size,), generator=generator).tolist()

    common, format_ = draw(prefix), draw(2)
    prompts = [common + draw(size) for size in (5, 3, 8)]
    responses = [(format_ + draw(size))[:size] for size in (4, 1, 3, 6, 2, 5, 6)]
    return turns([prompts[number] for number in (0, 1, 0, 2, 0, 1, 0)], responses)


def texts(some):
    """The prompt and the response of each turn, as lists."""
    return [(prompt[mask].tolist(), response[own].tolist()) for prompt, mask, response, own in zip(*some, strict=True)]


def seen_by(layout):
    """Return the tokens that each column attends to, in order, by row and column; padding is left out."""
    mask = layout.attention_mask(torch.float32)
    size = layout.input_ids.shape[1]
    seen = (mask[:, None, :] == 1).expand(-1, size, -1).tril() if mask.dim() == 2 else mask[:, 0] == 0
    found = {}
    for row, column in (layout.last >= 0).nonzero().tolist():
        columns = seen[row, column].nonzero()[:, 0]
        order = columns[torch.argsort(layout.position_ids[row, columns])]
        assert layout.position_ids[row, order].tolist() == list(range(len(order)))
        found[row, column] = layout.input_ids[row, order].tolist()
    return found


def check_layout(layout, some):
    seen = seen_by(layout)
    whole = [prompt + response for prompt, response in texts(some)]
    for (row, column), text in seen.items():  # each token is one of the turn that it is said to be of
        turn, index = int(layout.turn[row, column]), int(layout.index[row, column])
        assert text == whole[turn][: index + 1]
    assert ((layout.turn < 0) == (layout.last < 0)).all()
    for turn, (prompt, response) in enumerate(texts(some)):
        for index in range(len(response)):
            row, column = divmod(int(layout.cells[layout.kept[turn, index]]), layout.input_ids.shape[1])
            assert row == layout.row[turn] and seen[row, column] == prompt + response[:index]


PROMPTS = st.lists(st.integers(4, 6), min_size=1, max_size=6)
RESPONSES = st.lists(st.integers(4, 5), min_size=1, max_size=5)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data(), st.lists(PROMPTS, min_size=1, max_size=3), st.sampled_from([[], [6, 5, 4]]))
def test_each_token_attends_to_the_tokens_before_it_in_its_turn(data, prompts, prefix):
    drawn = data.draw(st.lists(st.tuples(st.sampled_from(prompts), RESPONSES), min_size=1, max_size=9))
    some = turns([prefix + prompt for prompt, _ in drawn], [response for _, response in drawn])
    for arrange in ARRANGEMENTS.values():
        check_layout(arrange(some), some)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(PROMPTS, min_size=1, max_size=4),
    st.lists(RESPONSES, min_size=1, max_size=6, unique_by=tuple),
    st.sampled_from([None, 4, 24, 1000]),
)
def test_candidates_follow_each_prompt_once_per_prefix(prompts, candidates, width):
    made = Candidates.of(candidates, torch.device("cpu"))
    layout = pack(turns(prompts, prompts), width, made)
    prefixes = sorted({tuple(text[:size]) for text in candidates for size in range(1, len(text))})
    seen = seen_by(layout)
    for turn, prompt in enumerate(prompts):
        found = [seen[divmod(int(cell), layout.input_ids.shape[1])] for cell in layout.cells[layout.kept[turn]]]
        assert found == [prompt, *([*prompt, *prefix] for prefix in prefixes)]
    for candidate, text in enumerate(candidates):
        before = [((), *prefixes)[number] for number in made.before[candidate, : len(text)]]
        assert before == [tuple(text[:size]) for size in range(len(text))]


def episode(turns_, seed=0, candidates=2):
    """Prompts and responses of an episode whose prompts contain all turns before, and an unusual spelling of one."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses, past = [], [], torch.randint(1, 39, (3,), generator=generator).tolist()
    for turn in range(turns_):
        past = past + torch.randint(1, 39, (4,), generator=generator).tolist()
        response = torch.randint(1, 39, (2 + turn % 2,), generator=generator).tolist()
        prompts.append(past)
        responses.append(response)
        past = past + (response if turn != 1 else [7, *response])  # a prompt may spell a response in other tokens
    return prompts, responses


def test_the_turns_of_an_episode_add_their_own_tokens_only():
    prompts, responses = episode(6)
    some = turns(prompts, responses)
    layout = pack(some, 1000)
    check_layout(layout, some)
    branch = len(responses[1]) - 1  # the response that the next prompt does not continue
    assert layout.input_ids.shape == (1, len(prompts[-1]) + len(responses[-1]) - 1 + branch)
    assert not layout.single
    chain = turns(prompts[2:], responses[2:])
    assert pack(chain, 1000).single
    assert pack(chain, 1000).attention_mask(torch.float32).shape == (1, len(prompts[-1]) + len(responses[-1]) - 1)


@pytest.mark.parametrize("prefix", [0, 6])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_and_gradients_are_those_of_turns_one_by_one(name, attention, prefix):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[name], attn_implementation=attention).eval()
    some = random_turns(prefix)

    def gradient(logprobs):
        grads = torch.autograd.grad(logprobs.sum(), list(model.parameters()))
        return torch.cat([grad.flatten() for grad in grads])

    alone = []
    for prompt, response in texts(some):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        alone.append(Categorical(logits).logprobs(torch.tensor(response)))
    expected, expected_gradient = torch.cat(alone), gradient(torch.cat(alone))
    for what, arrange in ARRANGEMENTS.items():
        logprobs = Categorical(logits_of(model, arrange(some))).logprobs(some.response_ids)[some.response_mask]
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0, msg=what)
        torch.testing.assert_close(gradient(logprobs), expected_gradient, atol=1e-4, rtol=1e-4, msg=what)


# Which arrangement is chosen, and how rows are filled.


def test_the_cheapest_width_is_chosen():
    apart = turns(torch.arange(1, 37).view(4, 9).tolist(), [[1, 2, 3]] * 4)
    assert pack(apart).input_ids.shape == (4, 11)
    together = turns([list(range(1, 10))] * 4, [[1, 2], [3, 2], [4, 1], [5, 2]])
    assert pack(together).input_ids.shape == (1, 13)
    assert pack(together, 11).input_ids.shape == (2, 11)


def packed_turns(prefix=0):
    """Five turns of 40 tokens, of which the last one of each response predicts nothing."""
    generator = torch.Generator().manual_seed(3)

    def draw(size):
        return torch.randint(1, 30, (size,), generator=generator).tolist()

    common = [*range(1, prefix + 1)]
    return turns([common + draw(size) for size in (5, 9, 2, 7, 3)], [draw(size) for size in (3, 1, 4, 2, 4)])


def test_packed_rows_are_filled_and_none_is_too_long():
    layout = pack(packed_turns(), max_row_tokens=16)
    computed = (layout.last >= 0).sum(1)
    assert layout.input_ids.shape[0] == 3 and int(computed.sum()) == 40 - 5 and int(computed.max()) <= 16


def test_packed_rows_are_as_long_as_the_longest_turn_at_least():
    assert pack(packed_turns(), max_row_tokens=4).input_ids.shape == (5, 9)


def test_packed_rows_hold_the_common_prefix_once():
    layout = pack(packed_turns(prefix=6), max_row_tokens=6 + 16)
    assert int((layout.last >= 0).sum()) == 6 * len(layout.input_ids) + 40 - 5


def test_logits_of_packed_rows_are_computed_at_few_columns():
    layout = pack(packed_turns(), max_row_tokens=64)
    assert layout.input_ids.shape == (1, 35) and len(layout.cells) == 14
