"""A run starts from adapters of another shape: they are merged into the base, and it goes on and is evaluated alike."""

import pytest
import torch
from tiny_runs import grpo, make_trainer, rollout_data, save_tiny_model

from lrl.evaluation.load import _load_weights
from lrl.functional.distributed import read_checkpoint
from lrl.lm.adapters import save_pretrained
from lrl.lm.config import LoRAConfig
from lrl.training.checkpoint import CollectionCheckpoint
from lrl.training.weights import initial_weights, merge_adapters, take_weights

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft under transformers 5
IDS = torch.arange(20)[None]
SAVED = ["lm_head", "embed_tokens"]
SMALL, OTHER = LoRAConfig(r=2, alpha=8), LoRAConfig(r=4, alpha=4, target_modules=["q_proj", "down_proj"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": save_tiny_model(root / "llama"),
        "tied": save_tiny_model(root / "tied", tie_word_embeddings=True),
        "gpt2": save_tiny_model(root / "gpt2", kind="gpt2", tie_word_embeddings=False),
    }


def fit(module, root, ckpt_path=None, max_epochs=1):
    trainer = make_trainer(root, CollectionCheckpoint(1), max_epochs=max_epochs)
    weights_only = True if ckpt_path else None
    trainer.fit(module, datamodule=rollout_data("prompts"), ckpt_path=ckpt_path, weights_only=weights_only)
    return trainer


@pytest.fixture(scope="module")
def sources(folders, tmp_path_factory):
    """Policies with trained adapters, as run directories and as exported folders."""
    root, found = tmp_path_factory.mktemp("sources"), {}
    for base, saved in (("llama", None), ("llama", SAVED), ("tied", None), ("tied", SAVED), ("gpt2", None)):
        lora = LoRAConfig(r=2, alpha=8, modules_to_save=None if saved is None else saved)
        module = grpo(folders[base], model={"lora": lora}, kl={"coef": 0.0}, optimizer={"schedule": "constant"})
        name = f"{base}-{'saved' if saved else 'plain'}"
        fit(module, root / name)
        save_pretrained(module.policy.language_model, root / f"{name}-exported")
        found[name] = root / name, root / f"{name}-exported", module.policy
    return found


def started(module):
    module.policy.connect(rollout_data("prompts").codec)
    module.configure_model()
    return module


@torch.no_grad()
def logits(policy):
    return policy.language_model.model.eval()(input_ids=IDS).logits


@pytest.mark.slow
@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("name", ["llama-plain", "llama-saved", "tied-plain", "tied-saved"])
def test_adapters_of_the_same_shape_are_taken_with_the_layers_that_are_trained_whole(folders, sources, name, exported):
    source, wanted = sources[name][exported], sources[name][2]
    lora = LoRAConfig(r=2, alpha=8, modules_to_save=SAVED if "saved" in name else None)
    module = started(grpo(folders[name.split("-")[0]], model={"lora": lora}, init_from=str(source)))
    ours, theirs = module.policy.state_dict(), wanted.state_dict()
    taken = [key for key in theirs if "lora_" in key or ".modules_to_save." in key]
    assert taken and all(torch.equal(ours[key], theirs[key]) for key in taken)
    assert torch.equal(logits(module.policy), logits(wanted)) and not module.overwritten_names


@pytest.mark.slow
@pytest.mark.parametrize("saved", [None, ["embed_tokens"]])
def test_a_run_in_four_bits_starts_from_what_another_one_exported(tmp_path, saved):
    shape = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "tie_word_embeddings": True}
    base = save_tiny_model(tmp_path / "base", **shape)
    model = {"lora": LoRAConfig(r=2, alpha=8, modules_to_save=saved), "quantization": "nf4"}
    source = grpo(base, model=model, kl={"coef": 0.0}, optimizer={"schedule": "constant"})
    fit(source, tmp_path / "source")
    save_pretrained(source.policy.language_model, tmp_path / "exported")
    untrained = started(grpo(base, model=model))
    for start in ("source", "exported"):
        module = started(grpo(base, model=model, init_from=str(tmp_path / start)))
        assert torch.equal(logits(module.policy), logits(source.policy)) and not module.overwritten_names
        assert not torch.equal(logits(module.policy), logits(untrained.policy))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [OTHER, LoRAConfig(r=2, alpha=4), None])
@pytest.mark.parametrize("name", ["llama-plain", "llama-saved", "tied-saved", "gpt2-plain"])
def test_adapters_of_another_shape_are_merged_into_the_base(folders, sources, caplog, name, lora):
    base = name.split("-")[0]
    if base == "gpt2" and lora is OTHER:
        lora = LoRAConfig(r=4, target_modules=["c_attn"])
    for source in sources[name][:2]:
        caplog.clear()
        with caplog.at_level("INFO", "lrl"):
            module = started(grpo(folders[base], model={"lora": lora}, init_from=str(source)))
        assert caplog.text.count("merged the adapter of rank 2 in") == 1
        torch.testing.assert_close(logits(module.policy), logits(sources[name][2]), atol=1e-5, rtol=1e-5)
        with module.policy.language_model.reference() as reference, torch.no_grad():
            torch.testing.assert_close(reference(input_ids=IDS).logits, logits(module.policy), atol=0, rtol=0)
        assert bool(module.overwritten_names) == (lora is not None)
        trained = [key for key, weight in module.named_parameters() if weight.requires_grad]
        assert all("lora_" in key for key in trained) == (lora is not None)


@pytest.mark.slow
def test_a_run_on_a_merged_base_is_resumed_evaluated_and_started_from(folders, sources, tmp_path):
    settings = {
        "model": {"lora": OTHER},
        "init_from": str(sources["tied-saved"][0]),
        "optimizer": {"schedule": "constant"},
    }
    whole = fit(grpo(folders["tied"], **settings), tmp_path / "whole", max_epochs=2)
    fit(grpo(folders["tied"], **settings), tmp_path / "again")
    last = tmp_path / "again" / "checkpoints" / "last.ckpt"
    resumed = fit(grpo(folders["tied"], **settings), tmp_path / "again", ckpt_path=last, max_epochs=2)
    ours, theirs = (trainer.lightning_module.state_dict() for trainer in (resumed, whole))
    assert sorted(ours) == sorted(theirs) and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    fresh = grpo(folders["tied"], model={"lora": OTHER}).policy
    fresh.configure()
    _load_weights(fresh, read_checkpoint(last)["state_dict"], last)
    wanted = resumed.lightning_module.policy
    assert torch.equal(logits(fresh), logits(wanted))
    for lora in (OTHER, SMALL):
        module = started(grpo(folders["tied"], model={"lora": lora}, init_from=str(tmp_path / "again")))
        torch.testing.assert_close(logits(module.policy), logits(wanted), atol=1e-5, rtol=1e-5)


def test_adapters_that_cannot_be_merged_raise_one_sentence(folders, sources, tmp_path):
    plain = sources["llama-plain"]
    policy = grpo(folders["tied"], model={"lora": OTHER}).policy
    policy.configure()
    layer = "language_model.model.base_model.model.lm_head"
    adapter = {f"{layer}.lora_A.weight": torch.zeros(2, 16), f"{layer}.lora_B.weight": torch.zeros(20, 2)}
    with pytest.raises(ValueError, match="an adapter on .*lm_head', whose weights are tied"):
        merge_adapters(policy, adapter, str(plain[0]))
    with pytest.raises(ValueError, match=r"an adapter on .*layers.0.*', which this policy lacks"):
        started(grpo(folders["gpt2"], init_from=str(plain[1])))
    with pytest.raises(ValueError, match=r"quantization is 'nf4', it must be null"):
        merge_adapters(quantised(policy), initial_weights(str(plain[0])), str(plain[0]))
    torch.save({"state_dict": read_checkpoint(plain[0] / "checkpoints" / "last.ckpt")["state_dict"]}, tmp_path / "bare")
    with pytest.raises(ValueError, match="an unknown alpha"):
        started(grpo(folders["llama"], model={"lora": OTHER}, init_from=str(tmp_path / "bare")))


def quantised(policy):
    policy.language_model.config = type(policy.language_model.config)(
        name=policy.language_model.config.name, lora=OTHER, quantization="nf4"
    )
    return policy


def test_adapters_do_not_fit_a_policy_without_adapters(folders, sources):
    given = initial_weights(str(sources["llama-plain"][0]))
    with pytest.raises(ValueError, match="which this policy lacks"):
        take_weights(grpo(folders["llama"]).policy, given, "run")
