"""Adapters of the last layers only, and of different ranks."""

import json

import pytest
import torch
from tiny_architectures import folder_of, load, logprobs, trainable
from tiny_runs import grpo, make_trainer, rollout_data

from lrl.lm.adapters import save_pretrained
from lrl.lm.config import LoRAConfig
from lrl.training.checkpoint import CollectionCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft under transformers 5
LAST = LoRAConfig(r=2, alpha=8, last_layers=2)


@pytest.mark.parametrize("wanted", ["all-linear", ["q_proj", "down_proj"]])
def test_only_the_last_layers_get_adapters(folder, wanted):
    model = load(folder, lora=LoRAConfig(**vars(LAST) | {"target_modules": wanted}))
    weights = trainable(model)
    assert {name.split(".layers.")[1][0] for name in weights} == {"2", "3"}
    assert ("gate_proj" in " ".join(weights)) == (wanted == "all-linear")
    assert {len(weight) for name, weight in weights.items() if "_A" in name} == {2}
    with torch.no_grad():
        for weight in weights.values():
            weight.add_(0.1)
    logprobs(model).sum().backward()
    assert all(weight.grad.any() for weight in weights.values())


def test_adapters_on_a_base_of_16_bits_are_float32_and_small_steps_are_not_lost(folder):
    model = load(folder, lora=LAST, dtype="bfloat16")
    weights = trainable(model)
    frozen = {weight.dtype for weight in model.model.parameters() if not weight.requires_grad}
    assert frozen == {torch.bfloat16} and {weight.dtype for weight in weights.values()} == {torch.float32}
    with torch.no_grad():
        for weight in weights.values():
            weight.fill_(0.5)  # in bfloat16 its neighbour is .002 away
    logprobs(model).sum().backward()
    torch.optim.AdamW(weights.values(), lr=1e-5, weight_decay=0).step()
    for weight in weights.values():
        moved = (weight - 0.5).abs()[weight.grad.abs() > 1e-6]
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-5), rtol=0.1, atol=0)
    assert logprobs(model).dtype == torch.float32 and logprobs(model).isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"last_layers": 0}, r"lora.last_layers is 0; it must be at least 1, or null\."),
        ({"last_layers": 5}, r"lora.last_layers is 5; it must be at most 4, the number of layers\."),
        ({"last_layers": 1, "target_modules": "norm"}, r"'norm', which is not in the last 1 layers; .* q_proj"),
    ],
)
def test_layers_that_do_not_exist_are_named(folder, settings, message):
    with pytest.raises(ValueError, match=message):
        load(folder, lora=LoRAConfig(**settings))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mixtral", r"lora.dropout is 0.1, which is not possible for .*mixtral'"),
        (
            "mamba",
            r"lora.target_modules is 'all-linear', which is not possible for .*mamba': .*'out_proj'.*"
            r"name other layers; there are dt_proj, in_proj, lm_head, out_proj, x_proj\.$",
        ),
    ],
)
def test_errors_of_peft_name_the_setting(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        load(folder_of(tmp_path, name), lora=LoRAConfig(r=2, dropout=0.1))


@torch.no_grad()
def outputs(policy):
    return policy.language_model.model.eval()(input_ids=torch.arange(20)[None]).logits


@pytest.mark.slow
@pytest.mark.parametrize("source", ["run", "exported"])
def test_a_run_starts_from_them_merged_or_as_they_are(folder, tmp_path, source):
    from peft import AutoPeftModelForCausalLM

    first = grpo(folder, model={"lora": LAST}, kl={"coef": 0.0}, optimizer={"schedule": "constant", "lr": 1e-2})
    trainer = make_trainer(tmp_path / "run", CollectionCheckpoint(1), max_epochs=1)
    trainer.fit(first, datamodule=rollout_data("prompts"))
    save_pretrained(first.policy.language_model, tmp_path / "exported")
    settings = json.loads((tmp_path / "exported" / "adapter_config.json").read_text())
    assert settings["layers_to_transform"] == [2, 3]
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(loaded(input_ids=torch.arange(20)[None]).logits, outputs(first.policy))
    for lora in (LAST, LoRAConfig(r=2, alpha=8, last_layers=1), LoRAConfig(r=2, alpha=4), None):
        module = grpo(folder, model={"lora": lora}, init_from=str(tmp_path / source))
        module.policy.connect(rollout_data("prompts").codec)
        module.configure_model()
        torch.testing.assert_close(outputs(module.policy), outputs(first.policy), atol=1e-5, rtol=1e-5)
        assert bool(module.overwritten_names) == (lora is not None and lora is not LAST)


def test_layers_that_are_trained_in_full_are_matched_by_their_whole_name(folder):
    weights = trainable(load(folder, lora=LoRAConfig(r=2, alpha=8, last_layers=1, modules_to_save=["norm"])))
    full = [name for name in weights if "lora_" not in name]
    assert len(full) == 1 and "layernorm" not in full[0] and ".norm." in full[0]
