"""Causal LMs from GGUF files."""

import pytest
import torch
from tiny_gguf import tiny_llama, write_gguf

from lrl.lm.adapters import check_exportable
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.model import LanguageModel


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return {kind: str(write_gguf(folder / f"{kind}.gguf", kind)) for kind in ("F32", "Q4_1")}


def load(name, **changes):
    model = LanguageModel(LanguageModelConfig(name=str(name), **changes))
    model.configure()
    return model


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_the_weights_of_an_unquantised_file_are_the_models_own(files):
    ids = torch.randint(0, 200, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(logits(load(files["F32"]).model, ids), logits(tiny_llama(), ids), atol=1e-5)


def test_quantised_weights_become_dense_ones_that_can_be_trained_and_saved(files, tmp_path):
    loaded = load(files["Q4_1"]).model
    for (name, found), (other, exact) in zip(loaded.named_parameters(), tiny_llama().named_parameters(), strict=True):
        assert name == other and found.requires_grad and found.dtype == torch.float32
        assert torch.allclose(found, exact, atol=0.05) and (found.ndim == 1 or not torch.equal(found, exact))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    loaded.save_pretrained(tmp_path)
    ids = torch.tensor([[1, 5, 9]])
    from transformers import AutoModelForCausalLM

    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids), logits(loaded, ids))


def test_tokenizer_and_chat_template_come_from_the_file(files):
    tokenizer = load(files["F32"], dtype="bfloat16").tokenizer
    ids = tokenizer.encode_chat([{"role": "user", "content": "le ft"}])
    text = "<|im_start|>user\nle ft<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.tokenizer.decode(ids) == text and ids[0] == 1 and 2 in ids
    assert tokenizer.tokenizer.convert_tokens_to_ids("le") in ids and tokenizer.stop_ids() == {2}


def test_adapters_and_random_weights_of_a_files_architecture(files):
    adapted = load(files["Q4_1"], lora=LoRAConfig(r=2))
    assert {name.split(".")[-3] for name, weight in adapted.named_parameters() if weight.requires_grad} >= {"lora_A"}
    with pytest.raises(ValueError, match="a GGUF file, which an exported adapter cannot name as its base"):
        check_exportable(adapted)
    fresh = load(files["Q4_1"], random_init=True).model
    assert fresh.config.num_hidden_layers == 2 and not torch.equal(fresh.lm_head.weight, tiny_llama().lm_head.weight)


def test_a_relative_path_is_found(files, tmp_path, monkeypatch):
    write_gguf(tmp_path / "here.gguf")
    monkeypatch.chdir(tmp_path)
    assert load("here.gguf").fingerprint == load(files["F32"]).fingerprint


def test_an_invalid_file_raises_one_sentence(tmp_path, files):
    with pytest.raises(ValueError, match=r"there is no such GGUF file, it must be a local one\.$"):
        load(tmp_path / "nowhere.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ValueError, match=r"^language_model.name is '.*text.gguf'.*\.$"):
        load(tmp_path / "text.gguf")
    with pytest.raises(ValueError, match="quantization is nf4 and language_model.name .*F32.gguf"):
        LanguageModelConfig(name=files["F32"], quantization="nf4", lora=LoRAConfig())
