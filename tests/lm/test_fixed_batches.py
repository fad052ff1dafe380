"""Batches whose shape follows from the length of a text alone."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_architectures import load, save_tiny_model

from lrl.lm.config import LoRAConfig
from lrl.lm.fixed_batches import Shape, fixed_batches, padded, place_matters
from lrl.lm.frozen_states import LowerLayers
from lrl.lm.layouts import Continuation
from lrl.policies.head import TextStateCache

CPU = torch.device("cpu")
TEXTS = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 1500)), min_size=1, max_size=40)


def never(shape):
    return False


@given(TEXTS, st.booleans(), st.none() | st.integers(200, 220))
def test_each_text_is_in_one_batch_whose_shape_follows_from_it_alone(texts, alone, limit):
    lengths, pasts = zip(*texts, strict=True)

    def batches_of(some):
        lengths, pasts = zip(*some, strict=True)
        return list(fixed_batches(lengths, CPU, lambda shape: alone, pasts=pasts, limit=limit))

    batches = batches_of(texts)
    assert sorted(text for batch in batches for text in batch.texts) == list(range(len(texts)))
    for batch in batches:
        rows, width, past = batch.shape
        assert len(batch.members) == rows and set(batch.members) == set(batch.texts)
        assert rows == 1 or rows * width in (32, 64, 96, 128)
        assert rows == 1 or not past or rows * (past + width) <= 1024
        for text in batch.texts:
            assert batches_of([texts[text]])[0].shape == batch.shape
            assert lengths[text] <= width <= max(1.25 * lengths[text], lengths[text] + 7) and pasts[text] <= past
            assert limit is None or width <= limit
    assert not alone or all(batch.shape == (1, *texts[batch.texts[0]]) for batch in batches)


def test_widths_and_rows_by_hand():
    widths = {1: 4, 7: 8, 8: 8, 9: 12, 14: 16, 17: 24, 33: 40, 75: 80, 107: 112, 129: 160}
    assert {length: padded(length) for length in widths} == widths
    batches = list(fixed_batches([19, 300, 20, 14], CPU, never))
    assert batches == [([0, 2], (4, 24, 0)), ([1], (1, 300, 0)), ([3], (8, 16, 0))]
    together = fixed_batches([7, 8, 8], CPU, never, pasts=[70, 100, 79])
    assert [*together] == [([0, 2], (8, 8, 80)), ([1], (8, 8, 112))]  # of 11 and 8 rows that fit in 1,024 columns
    assert [*fixed_batches([16, 17, 12], CPU, never, columns=32)] == [
        ([0], (2, 16, 0)),
        ([1], (1, 17, 0)),
        ([2], (1, 12, 0)),
    ]
    assert [batch.shape for batch in fixed_batches([9, 9], CPU, never, limit=9)] == [(1, 9, 0)] * 2


def test_short_texts_are_padded_on_the_right_and_rows_that_are_left_over_repeat_the_first():
    (batch,) = fixed_batches([9, 10], CPU, never)
    ids = batch.rectangle([[*range(1, 10)], [*range(11, 21)]], CPU)
    assert ids.shape == (8, 12)
    assert ids[0].tolist() == [*range(1, 10), 0, 0, 0] and ids[1].tolist() == [*range(11, 21), 0, 0]
    assert all(row.tolist() == ids[0].tolist() for row in ids[2:])


def test_a_place_that_matters_is_found():
    def by_text(ids):
        return ids[..., None].float()

    def last_row_differs(ids):
        return by_text(ids) + 1e-3 * (torch.arange(len(ids)) == len(ids) - 1)[:, None, None]

    ids = torch.arange(12).view(4, 3)
    assert not place_matters(by_text, ids) and place_matters(last_row_differs, ids)


@pytest.mark.slow
@pytest.mark.parametrize("matters", [False, True])
def test_texts_are_computed_together_unless_their_place_matters(folder, monkeypatch, matters):
    tried = []
    monkeypatch.setattr(LowerLayers, "place_matters", lambda self, shape: tried.append(shape) or matters)
    model = load(folder, lora=LoRAConfig(r=2, last_layers=2))
    tried.clear()
    shapes = []
    bottom = model.model.get_submodule("base_model.model.model.layers.0")
    bottom.register_forward_hook(lambda _, given, out: shapes.append(tuple(out.shape[:2])))
    prompts = torch.arange(1, 19).view(3, 6) % 19
    seen = torch.ones_like(prompts, dtype=torch.bool)
    inputs = {"prompt_ids": prompts, "prompt_mask": seen, "response_ids": prompts[:, :2]}
    states = model.lay_out(inputs, seen[:, :2]).lower.states
    assert shapes == ([(1, 6)] * 3 + [(1, 2)] * 3 if matters else [(4, 8), (8, 4)])
    assert tried == [Shape(4, 8, 0), Shape(8, 4, 8)]
    plain = load(folder, lora=LoRAConfig(r=2, last_layers=2), state_cache_mb=None)
    with torch.no_grad():
        text = torch.cat([prompts[1], prompts[1, :1]])[None]  # the last token of a response predicts nothing
        expected = plain.model(input_ids=text, output_hidden_states=True).hidden_states[2][0]
    apart = (expected[:, None] - states.flatten(0, 1)).abs().amax(2)
    assert float(apart.min(1).values.max()) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("width", [3, 7, 10, 14, 20])
def test_full_batches_give_each_text_the_bits_that_it_has_without_the_others(tmp_path, width):
    # Of 172 units, fewer rows would leave a remainder to vector instructions, which is rounded in another way.
    save_tiny_model(tmp_path / "odd", hidden_size=64, intermediate_size=172, num_hidden_layers=3)
    model = load(str(tmp_path / "odd"), lora=LoRAConfig(r=2, last_layers=1))
    generator = torch.Generator().manual_seed(0)
    for count in (128 // width, 128 // width + 3):
        prompts = torch.randint(0, 19, (count, width), generator=generator).tolist()
        after = [Continuation(tuple(ids[:2]), (0, 1), (1, 1)) for ids in prompts]
        model.lower.forget()
        states, starts, more = model.lower.states([*map(tuple, prompts)], after)
        for place in (0, count // 2, count - 1):
            model.lower.forget()
            alone, start, then = model.lower.states([tuple(prompts[place])], [after[place]])
            for here, there, size in ((starts[place, 0], start[0, 0], width), (more[place], then[0], 2)):
                assert torch.equal(states[here : here + size], alone[there : there + size])


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
@torch.no_grad()
def test_nothing_is_padded_beyond_the_length_at_which_rotary_embeddings_change(tmp_path, rope):
    long = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 13}
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0} | (long if rope == "longrope" else {})
    save_tiny_model(tmp_path / "rope", head_dim=8, max_position_embeddings=13, rope_parameters=parameters)
    model = load(str(tmp_path / "rope"), lora=LoRAConfig(r=2, last_layers=1))
    prompts, after = [tuple(range(1, 10)), tuple(range(1, 12))], [Continuation((3, 4), (0, 1), (1, 1))] * 2
    states, pieces, rest = model.lower.states(prompts, after)
    for turn, prompt in enumerate(prompts):
        text = torch.tensor([[*prompt, 3, 4]])
        expected = model.model(input_ids=text, output_hidden_states=True).hidden_states[1][0]
        for start, plain in zip((pieces[turn, 0], rest[turn]), expected.split([len(prompt), 2]), strict=True):
            torch.testing.assert_close(states[start : start + len(plain)], plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("positions", "length"), [(9, 9), (12, 9), (30, 27), (100, 99)])
def test_nothing_is_padded_beyond_the_table_of_positions(tmp_path, positions, length):
    save_tiny_model(tmp_path / "short", "gpt2", n_positions=positions)
    model = load(str(tmp_path / "short"), lora=LoRAConfig(r=2, last_layers=1))
    text = [*range(1, 10)] * 11
    states, _, _ = model.lower.states([tuple(text[:length])], [Continuation((), (), ())])
    kept = TextStateCache(64).states(
        model.model.get_base_model(),
        lambda texts: model.states(texts["text_ids"], texts["text_mask"])[:, -1],
        {"text_ids": torch.tensor([text[:length]]), "text_mask": torch.ones(1, length, dtype=torch.bool)},
    )
    assert states.shape[0] == 1 + length and states.isfinite().all() and kept.isfinite().all()


def test_kernels_without_masks_of_single_tokens_compute_every_pass_whole(folder, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("lrl"), "propagate", True)
    monkeypatch.setattr("lrl.lm.frozen_states.kernel_of", lambda model: "flash_attention_2")
    with caplog.at_level(logging.WARNING, logger="lrl"):
        model = load(folder, lora=LoRAConfig(r=2, last_layers=2))
    assert model.lower is None and "attention is flash_attention_2, which takes no mask of single" in caplog.text
