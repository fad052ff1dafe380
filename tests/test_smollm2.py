"""SmolLM2-135M-Instruct from the cache of ``lrl fetch``: what the model knows, and that policies act with it."""

import time

import pytest
import torch

from lrl.cli.evaluate import main as evaluate
from lrl.lm.config import LanguageModelConfig
from lrl.lm.files import SMOLLM2, cached
from lrl.lm.loading import fingerprint
from lrl.lm.model import LanguageModel

pytestmark = pytest.mark.pretrained
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module", autouse=True)
def fetched():
    folder = cached(SMOLLM2)
    if folder is None:
        pytest.skip(f"{SMOLLM2.title} is not in the cache; run `make smollm2`.")
    return folder


@pytest.fixture(scope="module")
def model():
    loaded = LanguageModel(LanguageModelConfig(name="smollm2-135m", dtype="bfloat16"))
    loaded.configure()
    return loaded


def test_the_capital_of_france_is_paris(model):
    ids = torch.tensor([model.tokenizer.encode_chat(CAPITAL)])
    with torch.no_grad():
        made = model.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert model.tokenizer.decode(made[0, ids.shape[1] :].tolist()) == "The capital of France is Paris."


def test_the_weights_are_the_known_ones(model):
    assert model.fingerprint == fingerprint(model.model) == SMOLLM2.fingerprint
    assert sum(weight.numel() for weight in model.model.parameters()) == 134_515_008


def test_architecture_and_tied_embeddings(model):
    config = model.model.config
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("llama", 30, 576)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert config.rope_parameters["rope_theta"] == 100_000
    assert model.model.lm_head.weight is model.model.model.embed_tokens.weight
    assert not hasattr(config, "quantization_config")


def test_the_chat_template_has_the_turns_of_system_user_and_assistant(model):
    chat = [{"role": "system", "content": "Play."}, *CAPITAL, {"role": "assistant", "content": "Paris"}, *CAPITAL]
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    assert model.tokenizer.tokenizer.decode(model.tokenizer.encode_chat(chat)) == (
        "<|im_start|>system\nPlay.<|im_end|>\n"
        f"{question}<|im_start|>assistant\nParis<|im_end|>\n{question}<|im_start|>assistant\n"
    )
    assert model.tokenizer.stop_ids() == {2}


def test_every_digit_is_a_token_and_spaces_before_it_are_one(model):
    tokenizer = model.tokenizer.tokenizer
    said = tokenizer.convert_ids_to_tokens(model.tokenizer.encode_text("-0.125  42"))
    assert said == ["-", "0", ".", "1", "2", "5", "ĠĠ", "4", "2"]


def test_loading_from_the_cache_takes_less_than_ten_seconds():
    started = time.process_time()  # of this process: the machine may be busy with other tests
    LanguageModel(LanguageModelConfig(name="smollm2-135m", dtype="bfloat16")).configure()
    assert time.process_time() - started < 10


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("choose", [False, True], ids=["writes", "chooses"])
def test_an_episode_of_frozen_lake(choose, dtype, capsys, tmp_path):
    words = ["--choose"] if choose else ["--response_format", "direct", "--max_new_tokens", "4"]
    said = ["--model", "smollm2-135m", "--dtype", dtype, "--episodes", "1", "--json", str(tmp_path / "report.json")]
    evaluate("lrl evaluate", [*said, *words])
    out = capsys.readouterr().out
    assert "smollm2-135m in FrozenLake-v1" in out and (tmp_path / "report.json").is_file()
