"""Tests of ordered number embeddings: which rows change, and their new values."""

import math

import pytest
import torch
from tiny_runs import save_tiny_model

from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.loading import number_tokens, prepare_vocabulary
from lrl.lm.model import LanguageModel


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


@pytest.mark.slow
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


def test_a_tokenizer_that_splits_numbers_into_digits_raises(tmp_path):
    save_tiny_model(tmp_path / "words", "llama")
    with pytest.raises(ValueError, match="ordered_numbers is true, but the vocabulary has 4 numerals"):
        load(name=str(tmp_path / "words"), ordered_numbers=True)
    with pytest.raises(ValueError, match="ordered_numbers true"):
        LanguageModelConfig(quantization="nf4", lora=LoRAConfig(), ordered_numbers=True)


# -- tokens for numbers ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def digit_by_digit(request, tmp_path_factory):
    """A folder with a tiny Llama whose tokenizer reads digit by digit, and knows 42 as one token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<unk>", "<pad>", "<eos>", *"0123456789", "42", ",", "go"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"42|\d|,|go"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tied, folder = request.param, tmp_path_factory.mktemp("digits")
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=tied, pad_token_id=1, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder), tied


def test_a_number_is_one_token_and_a_text_comes_back_unchanged(digit_by_digit):
    folder, _ = digit_by_digit
    plain, added = load(name=folder).tokenizer, load(name=folder, number_tokens=True).tokenizer
    text = "502,7,42,10,999go1000"
    assert len(plain.encode_text(text)) == 19
    ids = added.encode_text(text)
    assert added.decode(ids) == plain.decode(plain.encode_text(text)) == text
    assert added.tokenizer.convert_ids_to_tokens(ids) == [
        "502",
        ",",
        "7",
        ",",
        "42",
        ",",
        "10",
        ",",
        "999",
        "go",
        "100",
        "0",
    ]


def test_the_embedding_of_a_number_starts_from_its_digits_and_all_others_stay(digit_by_digit):
    folder, tied = digit_by_digit
    plain, added = load(name=folder), load(name=folder, number_tokens=True)
    vocabulary = added.tokenizer.tokenizer.get_vocab()
    assert len(added.model.get_input_embeddings().weight) == added.vocabulary == 16 + 989
    for part in ("get_input_embeddings", "get_output_embeddings"):
        old, new = (getattr(model.model, part)().weight.detach() for model in (plain, added))
        digit = {text: old[vocabulary[text]] for text in "0123456789"}
        expected = (4 * digit["5"] + 2 * digit["0"] + digit["2"]) / 7
        torch.testing.assert_close(new[vocabulary["502"]], expected)
        torch.testing.assert_close(new[vocabulary["31"]], (4 * digit["3"] + 2 * digit["1"]) / 6)
        assert torch.equal(new[:16], old[:16])
    tables = added.model.get_input_embeddings().weight, added.model.get_output_embeddings().weight
    assert (tables[0] is tables[1]) == tied
    assert added.fingerprint != plain.fingerprint


def test_random_weights_get_random_numbers_by_the_seed(digit_by_digit):
    folder, _ = digit_by_digit
    state = torch.get_rng_state()
    one, same, other = (load(name=folder, number_tokens=True, random_init=True, init_seed=k) for k in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(embeddings(one), embeddings(same)) and not torch.equal(embeddings(one), embeddings(other))
    assert len(embeddings(one).unique(dim=0)) == len(embeddings(one))
    ratio = embeddings(one)[20:].std() / embeddings(one)[:16].std()
    assert 0.8 < float(ratio) < 1.2


def test_numbers_with_tokens_can_be_ordered(digit_by_digit):
    folder, _ = digit_by_digit
    model = load(name=folder, number_tokens=True, ordered_numbers=True)
    vocabulary = model.tokenizer.tokenizer.get_vocab()
    index = torch.tensor([vocabulary[str(n)] for n in range(1000)])
    distances = torch.cdist(embeddings(model)[index], embeddings(model)[index]).fill_diagonal_(math.inf)
    assert ((distances.argmin(1) - torch.arange(1000)).abs() == 1).all()


def test_a_tokenizer_without_digits_raises(tiny_model):
    with pytest.raises(ValueError, match=r"number_tokens is true, but '\d' is no token of the tokenizer"):
        load(name=tiny_model, number_tokens=True)
    with pytest.raises(ValueError, match="nf4 and number_tokens true"):
        LanguageModelConfig(quantization="nf4", lora=LoRAConfig(), number_tokens=True)


def test_a_tokenizer_that_has_all_numbers_gets_no_tokens(plain):
    assert load(number_tokens=True).fingerprint == plain.fingerprint


@pytest.mark.parametrize("settings", [{"ordered_numbers": True}, {"number_tokens": True, "added_tokens": ["<a>"]}])
@pytest.mark.parametrize("random_init", [False, True])
def test_the_device_on_which_lightning_makes_models_changes_nothing(settings, random_init):
    """On a GPU, what is made without a device lies there, and a generator of the CPU was an error."""
    config = LanguageModelConfig(**settings, random_init=random_init)
    tables = []
    for device in ("cpu", "meta"):
        model = LanguageModel(LanguageModelConfig(random_init=random_init))
        model.configure()
        with torch.device(device):
            prepare_vocabulary(model.model, model.tokenizer.tokenizer, config)
        tables.append(embeddings(model))
    assert torch.equal(*tables) and tables[0].device.type == "cpu"
