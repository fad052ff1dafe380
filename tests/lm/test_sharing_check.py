"""Rows are shared, and first ratios are 1, in every precision: bfloat16 is judged by its distance to float32."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from tiny_runs import batch_of, grpo, make_trainer, rollout_data, save_tiny_model, text_policy

from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.lm.attention import in_float32, is_exact, is_sound
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.forward import check_sharing, logits_of
from lrl.lm.layouts import Turns, lay_out
from lrl.lm.model import LanguageModel
from lrl.policies.head import HeadPolicy
from lrl.policies.scoring import ScoringPolicy
from lrl.policies.text import TextPolicy
from lrl.training import gradient_module
from lrl.types import RandomKeys

LOUD = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
LOUD |= {"num_attention_heads": 4, "num_key_value_heads": 4}
MAP = ("SFFF", "FHFH", "FFFH", "HFFG")
OBSERVATIONS = [render_map(state, MAP) for state in (0, 1, 4, 9) for _ in range(6)]
KEYS = RandomKeys(seed=0, purpose="test", collection=0, env=np.arange(24), turn=np.zeros(24, dtype=np.int64))


@pytest.fixture(scope="module")
def loud(tmp_path_factory):
    """A random Llama of eight layers whose activations are so large that bfloat16 is .1 nats from float32."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "loud", **LOUD)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def load(folder, **settings):
    model = LanguageModel(LanguageModelConfig(name=folder, **settings))
    model.configure()
    return model.eval()


def layout(share):
    generator = torch.Generator().manual_seed(0)
    prompt, responses = (torch.randint(4, 20, size, generator=generator) for size in ((1, 9), (4, 5)))
    seen = torch.ones(4, 9, dtype=torch.bool)
    return lay_out(Turns(prompt.repeat(4, 1), seen, responses, seen[:, :5]), share)


def policies(folder, **model):
    """One policy of each kind that holds a language model."""
    written = text_policy(folder, max_new_tokens=8, **model)
    chosen = ScoringPolicy(LanguageModelConfig(name=folder, **model), written.prompt)
    headed = HeadPolicy(LanguageModelConfig(name=folder, **model), critic=None, init_seed=0)
    headed.connect_spaces(gym.spaces.Text(500), gym.spaces.Discrete(4))
    for policy in (written, chosen, headed):
        policy.connect(FrozenLakeCodec())
        policy.configure()
    return {"text": written, "scoring": chosen, "head": headed}


@torch.no_grad()
def test_sixteen_bits_are_judged_by_their_distance_to_float32(loud):
    halved = load(loud, dtype="bfloat16")
    shared, plain = (logits_of(halved.model, layout(share)) for share in (True, False))
    with in_float32(halved.model):
        exact = logits_of(halved.model, layout(False), torch.float32)
    widened = copy.deepcopy(halved.model).float()
    torch.testing.assert_close(exact, logits_of(widened, layout(False)), atol=1e-4, rtol=0)
    assert {weight.dtype for weight in halved.model.parameters()} == {torch.bfloat16}
    far = (torch.log_softmax(plain.float(), -1) - torch.log_softmax(exact, -1)).abs().mean()
    assert far > 0.05, "the model must be loud"
    assert is_sound(shared, plain, exact) and is_sound(plain, plain, exact)
    assert not is_sound(plain + 4 * (plain - exact), plain, exact)
    assert is_exact(exact, exact * (1 + 1e-6)) and not is_exact(exact, plain.float())


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["auto", "sdpa"])
@pytest.mark.parametrize("changes", [{}, {"lora": LoRAConfig(r=2)}])
def test_prompts_are_shared_in_bfloat16(loud, attention, changes, caplog):
    model = load(loud, dtype="bfloat16", attention=attention, **changes)
    assert model.share and check_sharing(model.model, model.device) == "exact"
    assert ("it should be auto or eager" in caplog.text) == (attention == "sdpa")


def test_the_self_check_reads_two_rows_of_at_most_twelve_tokens(loud, monkeypatch):
    model, shapes = load(loud), []
    model.model.register_forward_pre_hook(lambda *given: shapes.append(given[2]["input_ids"].shape), with_kwargs=True)
    check_sharing(model.model, model.device)
    assert shapes and all(rows <= 2 and columns <= 12 for rows, columns in shapes)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 1e-2), ("float32", 1e-4)])
def test_first_ratios_are_one_for_loud_models(loud, dtype, limit):
    for name, policy in policies(loud, dtype=dtype).items():
        decisions = policy.act(OBSERVATIONS, [()] * 24, KEYS, policy.sampling)
        for part in (batch_of(decisions), *batch_of(decisions).split(7)):
            ratio = (policy.evaluate(part).logprobs - part.old_logprobs).exp()
            assert float((ratio - 1).abs()[part.response_mask].max()) <= limit, name


@pytest.mark.slow
@torch.no_grad()
def test_logprobs_as_sampled_are_near_the_recomputed_ones(loud):
    kept, again = (policies(loud, dtype="bfloat16", recompute_logprobs=choice) for choice in (False, None))
    for name in ("text", "scoring"):
        sampled, forced = (part[name].act(OBSERVATIONS, [()] * 24, KEYS, part[name].sampling) for part in (kept, again))
        assert torch.equal(sampled.inputs["response_ids"], forced.inputs["response_ids"])
        assert float((sampled.logprobs - forced.logprobs).abs().mean()) < 1e-2


@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU")
@pytest.mark.parametrize(
    ("precision", "limit"),
    [("32-true", 1e-5), ("64-true", 1e-9), ("bf16-true", 1e-2), ("bf16-mixed", 1e-2), ("16-mixed", 1e-2)],
)
@pytest.mark.parametrize(("kind", "history"), [("prompts", 0), pytest.param("episodes", "all", marks=pytest.mark.slow)])
def test_the_first_ratio_is_one_in_every_precision_of_the_trainer(
    tiny, loud, tmp_path, precision, limit, kind, history
):
    module = grpo(loud if "16" in precision else tiny, history)
    trainer = make_trainer(tmp_path, enable_checkpointing=False, max_epochs=1, precision=precision)
    trainer.fit(module, datamodule=rollout_data(kind, num_epochs=1, num_minibatches=1 + bool(history)))
    first = trainer.logger.rows[0][1]
    assert first["train/ratio_error"] <= (0 if history and precision.startswith("bf16") else limit)
    assert history or first["train/kl_to_reference"] <= limit
    assert module.policy.language_model.share


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_with_another_first_position_raises(tmp_path, dtype):
    folder = save_tiny_model(tmp_path / "roberta", "roberta", is_decoder=True, type_vocab_size=1)
    with pytest.raises(ValueError, match="a roberta, which does not number the positions of a text 0, 1, ...;"):
        LanguageModel(LanguageModelConfig(name=folder, dtype=dtype)).configure()


@pytest.mark.slow
def test_the_first_ratio_is_one_if_only_the_update_makes_a_single_pass(loud, tmp_path, monkeypatch):
    monkeypatch.setattr(gradient_module, "shards_parameters", lambda strategy: True)
    monkeypatch.setattr(TextPolicy, "passes", lambda self, batch, gradient=False: [*torch.arange(len(batch)).split(2)])
    trainer = make_trainer(tmp_path, enable_checkpointing=False, max_epochs=1, precision="bf16-true")
    trainer.fit(grpo(loud, "all"), datamodule=rollout_data("episodes", num_epochs=1))
    assert trainer.logger.rows[0][1]["train/ratio_error"] == 0
