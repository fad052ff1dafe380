"""Every algorithm trains the policy that chooses among the legal actions."""

import json

import pytest
import torch
from tiny_runs import FLOAT64, demonstrations, grpo, make_trainer, rollout_data, save_tiny_model, sft

from lrl.codecs.toy_text import render_map
from lrl.data.demonstrations import DemonstrationsDataModule
from lrl.data.jsonl import JsonlDemonstrations
from lrl.envs.factory import GymnasiumEnvs
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.policies.scoring import ScoringPolicy
from lrl.prompts import PromptTemplate

START = render_map(0, ("SFFF", "FHFH", "FFFH", "HFFG"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def choosing(module, folder, temperature=1.0, history=0, **model):
    """Return an algorithm whose policy chooses among the actions instead of writing them."""
    prompt = PromptTemplate(response_format="direct", system="", history=history)
    module.policy = ScoringPolicy(LanguageModelConfig(name=folder, **model), prompt, temperature)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prompts", "episodes"])
@pytest.mark.parametrize("lora", [None, LoRAConfig(r=2)])
def test_it_is_trained_by_grpo_from_a_ratio_of_one(folder, tmp_path, lora, kind):
    module = choosing(grpo(folder), folder, history=int(kind == "episodes"), lora=lora, **FLOAT64["model"])
    trainer = make_trainer(tmp_path, enable_checkpointing=False)
    trainer.fit(module, datamodule=rollout_data(kind, num_epochs=1, num_minibatches=1))
    first, *_, last = (row for _, row in trainer.logger.rows)
    assert first["train/ratio_error"] == pytest.approx(0, abs=1e-12)
    assert first["train/kl_to_reference"] == pytest.approx(0, abs=1e-12)
    assert all(row["rollout/invalid_action_rate"] == 0 for _, row in trainer.logger.rows)
    assert last["train/kl_to_reference"] > 0


@pytest.mark.learning
def test_demonstrations_are_learned_by_the_cross_entropy_over_candidates(folder, tmp_path, caplog):
    module, data = choosing(sft(folder), folder, temperature=2.0), demonstrations()
    trainer = make_trainer(tmp_path, enable_checkpointing=False, max_epochs=60)
    trainer.fit(module, datamodule=data)
    assert "sampling.temperature 2 is ignored" in caplog.text
    for index in range(data.num_batches()):
        batch = data.batch(0, index)
        scores = module.policy.scores(batch.inputs["prompt_ids"], batch.inputs["prompt_mask"])
        answers = batch.inputs["response_ids"][:, 0]
        assert torch.equal(scores.argmax(-1), answers)
        loss = -(module.policy.evaluate(batch).logprobs * batch.advantages).sum()
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(scores, answers))


@pytest.mark.parametrize(
    ("response", "loss_on", "named"),
    [
        ("UP", "all", "data.loss_on is 'all', which a ScoringPolicy does not support; it must be completion"),
        ("<answer>UP</answer>", "completion", "response '<answer>UP</answer>', which a ScoringPolicy cannot choose"),
    ],
)
def test_demonstrations_that_are_not_a_candidate_raise_one_sentence(folder, tmp_path, response, loss_on, named):
    file = tmp_path / "turns.jsonl"
    file.write_text(json.dumps({"observation": START, "response": response}) + "\n")
    env = GymnasiumEnvs("FrozenLake-v1")
    data = DemonstrationsDataModule(JsonlDemonstrations(str(file)), env, loss_on=loss_on)
    with pytest.raises(ValueError, match=named):
        make_trainer(tmp_path, enable_checkpointing=False).fit(choosing(sft(folder), folder), datamodule=data)
