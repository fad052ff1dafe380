"""Tokens are added for tags: their rows start from what the tags consisted of, are trained, saved and exported."""

import pytest
import torch
from tiny_architectures import LORA, load, trainable
from tiny_runs import WORDS, demonstrations, make_trainer, save_tiny_model

from lrl.algorithms.sft import SFTModule
from lrl.lm.adapters import check_exportable
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.merging import load_adapter, save_merged
from lrl.lm.model import LanguageModel
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.training.checkpoint import CollectionCheckpoint
from lrl.training.export import ExportModel
from lrl.training.optimizer import OptimizerConfig
from lrl.types import SamplingConfig

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft under transformers 5
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
SAVED = LoRAConfig(r=2, alpha=4, modules_to_save=["embed_tokens", "lm_head"])
IDS = torch.arange(len(WORDS) + len(TAGS))[None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    wide = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "initializer_range": 0.05}
    return {
        "untied": save_tiny_model(root / "untied"),
        "tied": save_tiny_model(root / "tied", tie_word_embeddings=True),
        "padded": save_tiny_model(root / "padded", vocab_size=32),
        "wide": save_tiny_model(root / "wide", **wide),
    }


def rows(model):
    model = model.model
    return [end.weight.detach() for end in (model.get_input_embeddings(), model.get_output_embeddings())]


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("base", ["untied", "tied", "padded"])
def test_a_row_starts_as_the_mean_of_what_its_text_consisted_of(folders, base):
    model, before = load(folders[base], added_tokens=["LEFT DOWN", "UP", "FROG"]), load(folders[base])
    token = model.tokenizer.encode_text
    assert token("LEFT DOWN") == [len(WORDS)] and token("UP") == [WORDS.index("UP")] and token("FROG") == [21]
    assert token("LEFTDOWN LEFT DOWN") == [WORDS.index("<unk>"), len(WORDS)]
    parts = [WORDS.index("LEFT"), WORDS.index("DOWN")]
    for now, old in zip(rows(model), rows(before), strict=True):
        assert len(now) == (32 if base == "padded" else len(WORDS) + 2)
        torch.testing.assert_close(now[len(WORDS)], (old[parts[0]] + old[parts[1]]) / 2)
        torch.testing.assert_close(now[21], old[WORDS.index("<unk>")])
        assert torch.equal(now[: len(WORDS)], old[: len(WORDS)])
    inputs, outputs = (end.weight for end in (model.model.get_input_embeddings(), model.model.get_output_embeddings()))
    assert (inputs is outputs) == (base == "tied") and model.fingerprint != before.fingerprint
    assert model.tokenizer.tokenizer.decode([20], skip_special_tokens=True) == "LEFT DOWN", "as a server writes it"


def test_random_weights_get_random_rows_unlike_those_of_numbers(folders):
    first, again = (load(folders["untied"], added_tokens=TAGS, random_init=True) for _ in range(2))
    assert torch.equal(rows(first)[0], rows(again)[0])
    assert torch.cdist(rows(first)[0], rows(first)[0]).fill_diagonal_(9).min() > 0.1


def test_tokens_that_would_never_be_trained_or_are_given_twice_are_an_error(folders):
    message = r"added_tokens is set and lora.modules_to_save does not name 'embed_tokens'.*\[embed_tokens, lm_head\]\."
    with pytest.raises(ValueError, match=message):
        load(folders["untied"], added_tokens=TAGS, lora=LORA)
    half = LoRAConfig(r=2, modules_to_save=["embed_tokens"])
    with pytest.raises(ValueError, match=r"does not name 'lm_head'.*must be \[lm_head\]"):
        load(folders["untied"], added_tokens=TAGS, lora=half)
    assert trainable(load(folders["tied"], added_tokens=TAGS, lora=half))
    with pytest.raises(ValueError, match=r"added_tokens is \['a', 'a'\]; it must be different texts\."):
        LanguageModelConfig(added_tokens=["a", "a"])


def module(folder, lora, init_from=None, **model):
    """Clones the expert of FrozenLake in tags that are tokens."""
    language_model = LanguageModelConfig(name=folder, added_tokens=TAGS, lora=lora, **model)
    policy = TextPolicy(language_model, PromptTemplate(system=""), SamplingConfig(max_new_tokens=8))
    return SFTModule(policy, OptimizerConfig(lr=1e-2), init_from=init_from)


def fit(root, given, max_epochs=1, ckpt_path=None, callbacks=()):
    trainer = make_trainer(root, CollectionCheckpoint(1), *callbacks, max_epochs=max_epochs)
    trainer.fit(given, demonstrations(), ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else True)
    return given.policy.language_model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "lora"), [("untied", None), ("tied", None), ("untied", SAVED), ("tied", SAVED), ("padded", SAVED)]
)
def test_they_are_trained_saved_exported_merged_and_started_from(folders, tmp_path, base, lora):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = fit(tmp_path / "run", module(folders[base], lora), callbacks=[ExportModel()])
    start = load(folders[base], added_tokens=TAGS)
    for now, old, end in zip(rows(trained), rows(start), (23, 24), strict=True):  # nothing is read after the last tag
        assert (now[20:end] - old[20:end]).abs().amax(1).min() > 1e-3, "every tag has learned"
    wanted = logits(trained.model)
    exported = str(tmp_path / "run" / "model")
    kind = AutoModelForCausalLM if lora is None else AutoPeftModelForCausalLM
    torch.testing.assert_close(logits(kind.from_pretrained(exported)), wanted, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(exported).encode("<think>", add_special_tokens=False) == [20]
    for source in (exported, str(tmp_path / "run")):
        again = module(folders[base], lora, init_from=source)
        again.configure_model()
        assert torch.equal(logits(again.policy.language_model.model), wanted) and not again.overwritten_names
    if lora is not None:
        loaded = load_adapter(exported)
        save_merged(loaded.model, tmp_path / "of_export", loaded.tokenizer.save_pretrained, loaded.config)
        torch.testing.assert_close(logits(load(str(tmp_path / "of_export")).model), wanted, atol=1e-5, rtol=0)
    save_merged(trained.model, tmp_path / "merged", trained.tokenizer.save, trained.config)
    merged = load(str(tmp_path / "merged"), added_tokens=TAGS)  # which are there already
    torch.testing.assert_close(logits(merged.model), wanted, atol=1e-5, rtol=0)
    assert merged.tokenizer.encode_text("<think></think>") == [20, 21]


@pytest.mark.slow
def test_a_resumed_run_has_the_rows_that_it_had(folders, tmp_path):
    whole = fit(tmp_path / "whole", module(folders["tied"], SAVED), max_epochs=2)
    fit(tmp_path / "run", module(folders["tied"], SAVED))
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    resumed = fit(tmp_path / "run", module(folders["tied"], SAVED), max_epochs=2, ckpt_path=last)
    assert torch.equal(logits(resumed.model), logits(whole.model))


def test_four_bits_take_them_as_well(folders):
    model = load(folders["wide"], added_tokens=TAGS, lora=SAVED, quantization="nf4")
    logits(model.model)
    model.model(input_ids=IDS).logits.square().sum().backward()
    grads = [weight.grad for name, weight in trainable(model).items() if "modules_to_save" in name]
    assert len(grads) == 2 and all(grad[20:24].any() for grad in grads)


def test_an_adapter_is_exported_only_with_the_embeddings_that_it_was_trained_on(folders):
    for key, value in (("added_tokens", TAGS), ("number_tokens", True), ("ordered_numbers", True)):
        config = LanguageModelConfig(name=folders["tied"], lora=LORA, **{key: value})
        with pytest.raises(ValueError, match=rf"language_model.{key} is .*, or lora.modules_to_save name the embed"):
            check_exportable(LanguageModel(config))
        check_exportable(LanguageModel(LanguageModelConfig(name=folders["tied"], lora=SAVED, **{key: value})))


def test_a_tag_that_is_one_token_ends_a_response_and_stays_in_its_text(folders):
    policy = module(folders["untied"], None).policy
    policy.configure()
    ids = policy.encode_response("<think></think><answer>LEFT</answer>")
    assert ids == [20, 21, 22, WORDS.index("LEFT"), 23], "no end token after the tag"
    assert policy.language_model.tokenizer.decode(ids).replace(" ", "") == "<think></think><answer>LEFT</answer>"
    language_model = LanguageModelConfig(name=folders["untied"], added_tokens=["<action>", "</action>"])
    prompt = PromptTemplate(response_format="direct", stop="</action>")
    direct = TextPolicy(language_model, prompt, SamplingConfig(max_new_tokens=8))
    direct.configure()
    assert direct.stop_text == direct.generator.stop_text == "</action>"
    assert direct.encode_response("<action>1 2</action>") == [20, WORDS.index("1"), WORDS.index("2"), 21]
    assert policy.stop_text == "</answer>"
