"""Numerals in order: who is moved, where to, and who is not."""

import math

import pytest
import torch
from tiny_runs import save_tiny_model

from lrl.models.language_model import LanguageModel, LanguageModelConfig, LoRAConfig
from lrl.models.number_embeddings import number_tokens


def load(**settings):
    model = LanguageModel(LanguageModelConfig(**settings))
    model.configure()
    return model


@pytest.fixture(scope="module")
def plain():
    return load()


@pytest.fixture(scope="module")
def ordered():
    return load(ordered_numbers=True)


def embeddings(model):
    return model.model.get_input_embeddings().weight.detach()


def test_a_numeral_has_one_to_three_digits_and_maybe_a_blank_before_it():
    words = ("7", "07", "Ġ490", "▁12", "1234", "²", "4a", "a", "Ġ", "", "-1")
    found = number_tokens({word: index for index, word in enumerate(words)})
    assert found == {0: 7, 1: 7, 2: 490, 3: 12}


def test_neighbours_are_nearest_and_nothing_else_moves(plain, ordered):
    vocabulary = plain.tokenizer.tokenizer.get_vocab()
    index = torch.tensor([vocabulary[str(n)] for n in range(1000)])
    distances = torch.cdist(embeddings(ordered)[index], embeddings(ordered)[index]).fill_diagonal_(math.inf)
    assert ((distances.argmin(1) - torch.arange(1000)).abs() == 1).all()
    unordered = torch.cdist(embeddings(plain)[index], embeddings(plain)[index]).fill_diagonal_(math.inf)
    assert ((unordered.argmin(1) - torch.arange(1000)).abs() == 1).float().mean() < 0.1
    others = [i for i in range(len(vocabulary)) if i not in number_tokens(vocabulary)]
    assert torch.equal(embeddings(ordered)[others], embeddings(plain)[others])
    rest = zip(plain.named_parameters(), ordered.named_parameters(), strict=True)
    assert all(torch.equal(a, b) for (name, a), (_, b) in rest if "embed_tokens" not in name)


def test_the_embedding_is_the_sum_of_waves_that_is_documented(plain, ordered):
    vocabulary = plain.tokenizer.tokenizer.get_vocab()
    directions = torch.randn(12, 160, generator=torch.Generator().manual_seed(0))

    def wave(n):
        cosines = sum(math.cos(math.pi * k * n / 1000) * directions[k - 1] / k for k in range(1, 7))
        return cosines + sum(math.sin(math.pi * k * n / 1000) * directions[k + 5] / k for k in range(1, 7))

    found = list(number_tokens(vocabulary).items())
    scale = embeddings(plain)[[i for i, _ in found]].norm(dim=1).mean()
    scale = scale / torch.stack([wave(n) for _, n in found]).norm(dim=1).mean()
    for text in ("0", "7", "042", "490", "999"):
        assert torch.allclose(embeddings(ordered)[vocabulary[text]], wave(int(text)) * scale, atol=1e-5)


def test_the_seed_names_the_directions_and_the_runs_own_is_left_alone(ordered):
    state, again, other = torch.get_rng_state(), load(ordered_numbers=True), load(ordered_numbers=True, init_seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(embeddings(again), embeddings(ordered))
    assert not torch.equal(embeddings(other), embeddings(ordered))
    assert again.fingerprint == ordered.fingerprint
    assert len({each.fingerprint for each in (ordered, other, load())}) == 3


def test_who_reads_digit_by_digit_is_refused(tmp_path):
    save_tiny_model(tmp_path / "words", "llama")
    with pytest.raises(ValueError, match="ordered_numbers is true, but the vocabulary has 4 numerals"):
        load(name=str(tmp_path / "words"), ordered_numbers=True)
    with pytest.raises(ValueError, match="ordered_numbers true"):
        LanguageModelConfig(quantization="nf4", lora=LoRAConfig(), ordered_numbers=True)
