"""The trained model as others load it."""

import json

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub.errors import LocalTokenNotFoundError
from tiny_runs import grpo, make_trainer, merged, rollout_data, save_tiny_model, sft

from lrl.lm.config import LoRAConfig
from lrl.training.export import ExportModel, write_card

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft under transformers 5
LORA = LoRAConfig(r=2, alpha=4)
IDS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tied", tie_word_embeddings=True)


@pytest.fixture
def hub(monkeypatch):
    """Stub of the hub that accepts every request and records it."""
    asked = []
    for name in ("whoami", "create_repo", "upload_folder"):
        answer = lambda self, *args, _name=name, **kwargs: asked.append((_name, args, kwargs))  # noqa: E731
        monkeypatch.setattr(huggingface_hub.HfApi, name, answer)
    return asked


def fit(root, folder, export=None, **module):
    module = grpo(folder, **merged({"kl": {"coef": 0.0}}, module))
    trainer = make_trainer(root, export or ExportModel(), max_epochs=1, enable_checkpointing=False)
    trainer.fit(module, datamodule=rollout_data("prompts"))
    return module.policy


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


@pytest.mark.slow
@pytest.mark.parametrize("base", ["folder", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_model_is_loaded_by_hugging_face_alone(request, tmp_path, base, dtype):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = fit(tmp_path, request.getfixturevalue(base), model={"dtype": dtype})
    kernel = policy.language_model.model.config._attn_implementation  # another one rounds differently
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation=kernel)
    assert torch.equal(logits(loaded), logits(policy.language_model.model)) and str(loaded.dtype) == f"torch.{dtype}"
    ends = loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
    assert (ends[0] is ends[1]) == (base == "tied")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "LEFT"}]
    written = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert written == policy.language_model.tokenizer.encode_chat(messages)


@pytest.mark.slow
@pytest.mark.parametrize("saved", [None, ["lm_head"]])
@pytest.mark.parametrize("base", ["folder", "tied"])
def test_an_adapter_is_loaded_by_peft_on_the_base_that_it_names(request, tmp_path, base, saved):
    from peft import AutoPeftModelForCausalLM

    lora = LoRAConfig(r=2, alpha=4, modules_to_save=saved)
    policy = fit(tmp_path, request.getfixturevalue(base), model={"lora": lora})
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "model")
    base = json.loads((tmp_path / "model" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == policy.language_model.config.name
    assert torch.equal(logits(loaded), logits(policy.language_model.model))
    assert not torch.allclose(logits(loaded), logits(loaded.unload())), "the adapter has learned something"


@pytest.mark.slow
def test_a_warm_started_adapter_is_exported_without_its_reference(folder, tmp_path):
    from peft import AutoPeftModelForCausalLM

    fit(tmp_path / "first", folder, model={"lora": LORA})
    module = {"model": {"lora": LORA}, "kl": {"coef": 0.1}, "init_from": str(tmp_path / "warm.ckpt")}
    warm = grpo(folder, **module | {"init_from": None})
    warm.configure_model()
    with torch.no_grad():
        for weight in warm.parameters():
            if weight.requires_grad:
                weight.add_(0.1)
    torch.save({"state_dict": warm.state_dict()}, tmp_path / "warm.ckpt")
    policy = fit(tmp_path / "second", folder, **module)
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "second" / "model")
    assert list(loaded.peft_config) == ["default"]
    assert torch.equal(logits(loaded), logits(policy.language_model.model))


def test_a_custom_chat_template_is_exported_with_the_tokenizer(folder, tmp_path):
    from transformers import AutoTokenizer

    policy = fit(tmp_path, folder, model={"chat_template": "plain"})
    messages = [{"role": "user", "content": "LEFT"}]
    written = AutoTokenizer.from_pretrained(tmp_path / "model").apply_chat_template(messages, tokenize=False)
    template = policy.language_model.tokenizer.template
    assert written == template.render(messages, add_generation_prompt=False) == "user: LEFT\n"


def test_an_adapter_that_could_not_be_loaded_raises_before_training(folder, tmp_path):
    for key in ("random_init", "ordered_numbers", "number_tokens"):
        with pytest.raises(ValueError, match=f"{key} is true"):
            fit(tmp_path, folder, model={"lora": LORA, key: True})
    with pytest.raises(ValueError, match="first_layers is 1, which changes .*; it must be null, or lora null"):
        fit(tmp_path, folder, model={"lora": LORA, "first_layers": 1})
    whole = grpo(folder)
    whole.configure_model()
    torch.save({"state_dict": whole.state_dict()}, tmp_path / "whole.ckpt")
    with pytest.raises(ValueError, match="init_from is .*, which replaced the base"):
        fit(tmp_path, folder, model={"lora": LORA}, init_from=str(tmp_path / "whole.ckpt"))
    assert not (tmp_path / "model").exists()


# -- the hub ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("private", [True, False])
def test_the_repository_is_made_before_training_and_the_folder_pushed_after(folder, tmp_path, hub, private):
    fit(tmp_path, folder, ExportModel("me/lake", private=private))
    (_, who, _), (_, made, how), (_, _, pushed) = hub
    assert who == () and made == ("me/lake",) and how == {"private": private, "exist_ok": True}
    assert pushed["repo_id"] == "me/lake" and (pushed["folder_path"] / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("method", "error", "sentence"),
    [
        (
            "whoami",
            LocalTokenNotFoundError("none"),
            "'me/lake' cannot be pushed to .none.; check the network, the token",
        ),
        ("whoami", ConnectionError("no route to host"), "cannot be pushed to .no route to host.; check"),
        ("create_repo", PermissionError("403 Forbidden"), "cannot be pushed to .403 Forbidden.; check"),
    ],
)
def test_a_hub_error_is_raised_before_training(folder, tmp_path, hub, monkeypatch, method, error, sentence):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, method, refuse)
    with pytest.raises(ValueError, match=sentence):
        fit(tmp_path, folder, ExportModel("me/lake"))
    assert not (tmp_path / "model").exists()


def test_a_malformed_hub_name_raises(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", lambda self: {})
    monkeypatch.setenv("HF_TOKEN", "made-up")
    with pytest.raises(ValueError, match="'a/b/c' cannot be pushed to .*must be NAME or ORG"):
        fit(tmp_path, folder, ExportModel("a/b/c"))


def test_a_failed_push_is_logged_with_the_command_to_repeat_it(folder, tmp_path, hub, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise ConnectionError("broken pipe\nand a page of more")

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", fail)
    fit(tmp_path, folder, ExportModel("me/lake"))
    record = next(record for record in caplog.records if record.levelname == "ERROR")
    assert "broken pipe" in record.message and f"hf upload me/lake {tmp_path / 'model'}" in record.message
    assert "\n" not in record.message and (tmp_path / "model" / "model.safetensors").exists()


def test_a_demonstrated_policy_is_exported_as_well(folder, tmp_path):
    from tiny_runs import demonstrations
    from transformers import AutoModelForCausalLM

    module = sft(folder)
    trainer = make_trainer(tmp_path, ExportModel(), max_epochs=1, enable_checkpointing=False)
    trainer.fit(module, datamodule=demonstrations())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(loaded), logits(module.policy.language_model.model))


RECORDS = {
    "config.yaml": "model: {class_path: GRPOModule, init_args: {init_from: /home/me/weights/first}}\n"
    "data: {init_args: {env: {class_path: GymnasiumEnvs}}}\nseed_everything: 3\nrun_directory: RUN\n",
    "command.txt": "/home/me/lrl/__main__.py fit --config=/home/me/mine.yaml --run_directory RUN/again\n",
    "metrics.csv": "val/return,clock/env_steps\n2.0,10\n5.0,20\n4.0,30\n",
}


@pytest.mark.parametrize("base", ["someone/model", "assets/tiny-lm"])
def test_a_model_card_is_written_from_the_records_of_a_run(tmp_path, base):
    run, model = tmp_path / "run", tmp_path / "model"
    run.mkdir()
    model.mkdir()
    (model / "README.md").write_text("a template of another library")
    write_card(model, run, base, is_adapter=True)
    assert (model / "README.md").read_text() == "a template of another library"  # there is no configuration
    for name, text in RECORDS.items():
        (run / name).write_text(text.replace("RUN", str(run)))
    write_card(model, run, base, is_adapter=True)
    _, front, page = (model / "README.md").read_text().split("---\n", 2)
    hub = {"base_model": base} if base == "someone/model" else {}  # the hub does not have the other one
    tags = ["lrl", "reinforcement-learning", "GRPOModule"]
    assert yaml.safe_load(front) == {"library_name": "peft", **hub, "tags": tags}
    expected = (
        f"| base model | `{base}` |",
        "| seed | 3 |",
        "| command | `lrl fit --config=mine.yaml --run_directory again` |",
    )
    assert all(row in page for row in (*expected, "| `val/return` | 4 | 5 |", "class_path: GymnasiumEnvs"))
    assert "/home/me" not in page and str(tmp_path) not in page and "init_from: first" in page
