"""Batches whose shape follows from the length of a text alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_architectures import load

from lrl.models import lower_layers
from lrl.models.fixed_batches import fixed_batches, padded, place_matters
from lrl.models.language_model import LoRAConfig

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 600), min_size=1, max_size=40)


@given(LENGTHS, st.booleans())
def test_each_text_is_in_one_batch_whose_shape_follows_from_its_length(lengths, alone):
    batches = list(fixed_batches(lengths, CPU, alone=alone))
    assert sorted(text for batch in batches for text in batch.texts) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch.members) == batch.rows and set(batch.members) == set(batch.texts)
        for text in batch.texts:
            (single,) = fixed_batches([lengths[text]], CPU, alone=alone)
            assert (single.rows, single.width) == (batch.rows, batch.width)
            assert lengths[text] <= batch.width <= max(1.25 * lengths[text], 4)
    assert not alone or all((batch.rows, batch.width) == (1, lengths[batch.texts[0]]) for batch in batches)


def test_widths_and_rows_by_hand():
    assert [padded(length) for length in (1, 7, 8, 9, 14, 19, 33, 75, 107, 129)] == [
        1,
        7,
        8,
        10,
        14,
        20,
        40,
        80,
        112,
        160,
    ]
    batches = list(fixed_batches([19, 300, 20, 14], CPU))
    assert [(batch.texts, batch.rows, batch.width) for batch in batches] == [
        ([0, 2], 12, 20),
        ([1], 1, 300),
        ([3], 18, 14),
    ]
    together = fixed_batches([19, 20, 20], CPU, apart=["a", "b", "a"])
    assert [batch.texts for batch in together] == [[0, 2], [1]]


def test_short_texts_are_padded_on_the_right_and_rows_that_are_left_over_repeat_the_first():
    (batch,) = fixed_batches([9, 10], CPU)
    ids = batch.rectangle([[*range(1, 10)], [*range(11, 21)]], CPU)
    assert ids.shape == (25, 10)
    assert ids[0].tolist() == [*range(1, 10), 0] and ids[1].tolist() == [*range(11, 21)]
    assert all(row.tolist() == ids[0].tolist() for row in ids[2:])


def test_a_place_that_matters_is_found():
    def by_text(ids):
        return ids[..., None].float()

    def by_row(ids):
        return by_text(ids) + 1e-3 * torch.arange(len(ids))[:, None, None]

    assert not place_matters(by_text, 50, CPU) and place_matters(by_row, 50, CPU)


@pytest.mark.parametrize("matters", [False, True])
def test_texts_are_computed_together_unless_their_place_matters(folder, monkeypatch, matters):
    monkeypatch.setattr(lower_layers, "place_matters", lambda *_: matters)
    model = load(folder, lora=LoRAConfig(r=2, last_layers=2))
    shapes = []
    bottom = model.model.get_submodule("base_model.model.model.layers.0")
    bottom.register_forward_hook(lambda _, given, out: shapes.append(tuple(out.shape[:2])))
    prompts = torch.arange(1, 19).view(3, 6) % 19
    seen = torch.ones_like(prompts, dtype=torch.bool)
    inputs = {"prompt_ids": prompts, "prompt_mask": seen, "response_ids": prompts[:, :2]}
    states = model.lay_out(inputs, seen[:, :2]).lower.states
    assert shapes == ([(1, 6)] * 3 + [(1, 2)] * 3 if matters else [(42, 6), (128, 2)])
    plain = load(folder, lora=LoRAConfig(r=2, last_layers=2), state_cache_mb=None)
    with torch.no_grad():
        text = torch.cat([prompts[1], prompts[1, :2]])[None]
        expected = plain.model(input_ids=text, output_hidden_states=True).hidden_states[2][0]
    apart = (expected[:, None] - states.flatten(0, 1)).abs().amax(2)
    assert float(apart.min(1).values.max()) <= 1e-5
