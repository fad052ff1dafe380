"""Adapters are merged into plain folders whose logits are those of the adapter model, for every kind of adapter."""

import warnings

import pytest
import torch
from safetensors import SafetensorError
from tiny_architectures import EXPERTS, load, trainable
from tiny_runs import save_tiny_model

from lrl.faults import DiskFullError
from lrl.lm import merging
from lrl.lm.adapters import BASE_FILE, save_pretrained
from lrl.lm.attention import in_float32
from lrl.lm.config import LoRAConfig
from lrl.lm.files import written_whole
from lrl.lm.merging import check_new_folder, load_adapter, save_merged

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # peft under transformers 5
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),  # that is what is tested
]
IDS = torch.arange(20)[None]
LORA = {"r": 2, "alpha": 8}
WITH_EXPERTS = {
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "llama4": ("llama4_text", {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 32}),
}
WITH_ADAPTED_EXPERTS = ("mixtral", "qwen3_moe", "olmoe")
"""Those of which ``all-linear`` adapts the experts; peft leaves out those of the others."""
EVERYTHING = LoRAConfig(**LORA, target_modules="all-linear")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    wide = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "initializer_range": 0.05}
    return {
        "llama": save_tiny_model(root / "llama"),
        "tied": save_tiny_model(root / "tied", tie_word_embeddings=True),
        "gpt2": save_tiny_model(root / "gpt2", kind="gpt2", tie_word_embeddings=False),
        "wide": save_tiny_model(root / "wide", **wide, tie_word_embeddings=True),
        **{name: save_tiny_model(root / name, kind, **changes) for name, (kind, changes) in WITH_EXPERTS.items()},
        "opt": save_tiny_model(root / "opt", "opt", word_embed_proj_dim=8, ffn_dim=32, do_layer_norm_before=False),
    }


def trained(name, **settings):
    """A model whose trainable weights have moved, as training would move them."""
    model = load(name, **settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in trainable(model).values():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


@torch.no_grad()
def logits(model, ids=IDS):
    return model.eval()(input_ids=ids).logits


def merged(model, folder, dtype=None):
    return save_merged(model.model, folder, model.tokenizer.save, model.config, dtype)


def plain(folder, **settings):
    """Load the folder with transformers, without adapters."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **settings)


KINDS = {
    "untied": ("llama", {"lora": LoRAConfig(**LORA)}),
    "tied": ("tied", {"lora": LoRAConfig(**LORA)}),
    "conv1d": ("gpt2", {"lora": LoRAConfig(**LORA)}),
    "adapted_ends": ("llama", {"lora": LoRAConfig(**LORA, target_modules=["lm_head", "embed_tokens", "q_proj"])}),
    "saved": ("llama", {"lora": LoRAConfig(**LORA, modules_to_save=["lm_head"])}),
    "tied_saved": ("tied", {"lora": LoRAConfig(**LORA, modules_to_save=["embed_tokens"])}),
    "numbers": ("llama", {"lora": LoRAConfig(**LORA), "number_tokens": True}),
    "tied_numbers_saved": ("tied", {"lora": LoRAConfig(**LORA, modules_to_save=["lm_head"]), "number_tokens": True}),
    "first_layers": ("llama", {"lora": LoRAConfig(**LORA), "first_layers": 1}),
    "last_layers": ("llama", {"lora": LoRAConfig(**LORA, last_layers=1)}),
    "random": ("llama", {"lora": LoRAConfig(**LORA), "random_init": True}),
    "whole": ("tied", {}),
    "four_bits": ("wide", {"lora": LoRAConfig(**LORA), "quantization": "nf4"}),
    "four_bits_saved": ("wide", {"lora": LoRAConfig(**LORA, modules_to_save=["embed_tokens"]), "quantization": "nf4"}),
    "four_bits_tokens": (
        "wide",
        {
            "lora": LoRAConfig(**LORA, modules_to_save=["embed_tokens"]),
            "quantization": "nf4",
            "added_tokens": ["<action>", "</action>"],
        },
    ),
}


@pytest.fixture(scope="module")
def digits(folders, tmp_path_factory):
    """The folder of a model whose tokenizer knows all digits, so that tokens of numbers can be added."""

    def folder(name):
        from transformers import AutoTokenizer

        target = tmp_path_factory.mktemp("digits") / name
        save_tiny_model(target, tie_word_embeddings=name == "tied", vocab_size=32)
        tokenizer = AutoTokenizer.from_pretrained(target)
        tokenizer.add_tokens(list("456789"))
        tokenizer.save_pretrained(target)
        return str(target)

    return folder


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if "four_bits" in kind else kind for kind in KINDS]
)
def test_the_folder_has_the_logits_of_the_adapter_model(folders, digits, tmp_path, kind):
    base, settings = KINDS[kind]
    model = trained(digits(base) if "numbers" in kind else folders[base], **settings)
    before, tied = logits(model.model), base in ("tied", "wide")
    messages = [{"role": "user", "content": "LEFT 42"}]
    prompt = model.tokenizer.encode_chat(messages)
    distance = merged(model, tmp_path / "merged")
    loaded = plain(tmp_path / "merged")
    torch.testing.assert_close(logits(loaded), before, atol=1e-5, rtol=0)
    assert distance.merged <= 1e-5
    ends = loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
    assert (ends[0] is ends[1]) == tied and not [name for name, _ in loaded.named_modules() if "lora" in name]
    written = {file.name for file in (tmp_path / "merged").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= written
    assert sum(name.endswith(".safetensors") for name in written) == 1 and "adapter_config.json" not in written
    again = load(str(tmp_path / "merged"))  # as language_model.name
    assert again.tokenizer.encode_chat(messages) == prompt
    torch.testing.assert_close(logits(again.model), before, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_in_sixteen_bits_the_distance_to_float32_is_reported(folders, tmp_path, name):
    model = trained(folders[name], dtype="bfloat16", lora=LoRAConfig(**LORA))
    weight = model.model.get_base_model().model.layers[0].mlp.up_proj
    sum_of_both = (
        weight.base_layer.weight.float()
        + 4 * weight.lora_B["default"].weight.float() @ weight.lora_A["default"].weight.float()
    )
    distance = merged(model, tmp_path / "merged")
    loaded = plain(tmp_path / "merged")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.model.layers[0].mlp.up_proj.weight, sum_of_both.bfloat16()), "rounded once"
    assert 0 < distance.merged < 3 * distance.adapter < 0.5


@pytest.mark.slow
def test_four_bits_in_sixteen_bits_are_merged_within_rounding(folders, tmp_path):
    """The settings of the QLoRA overlay."""
    model = trained(folders["wide"], dtype="bfloat16", lora=LoRAConfig(**LORA), quantization="nf4")
    before = logits(model.model).float()
    distance = merged(model, tmp_path / "merged")
    assert 0 < distance.merged < 3 * distance.adapter < 0.5
    after = logits(plain(tmp_path / "merged")).float()
    assert (after - before).abs().max() < 0.05 * before.abs().max()


def test_another_data_type_than_that_of_the_weights_can_be_asked_for(folders, tmp_path):
    model = trained(folders["tied"], dtype="bfloat16", lora=LoRAConfig(**LORA))
    with in_float32(model.model):
        exact = logits(model.model)
    distance = merged(model, tmp_path / "merged", "float32")
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), exact, atol=1e-5, rtol=0)
    assert plain(tmp_path / "merged").dtype == torch.float32 and distance.merged < 1e-5 and distance.adapter == 0
    small = trained(folders["llama"], lora=LoRAConfig(**LORA))
    distance = merged(small, tmp_path / "small", "bfloat16")
    assert plain(tmp_path / "small").dtype == torch.bfloat16 and 1e-5 < distance.merged < 3 * distance.adapter


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_adapters_on_experts_are_trained_merged_and_exported(folders, tmp_path, name):
    model = trained(folders[name], lora=EVERYTHING)
    experts = [weight for path, weight in trainable(model).items() if ".experts." in path]
    before = model.model(input_ids=IDS).logits
    before.sum().backward()
    assert bool(experts) == (name in WITH_ADAPTED_EXPERTS)
    assert all(weight.grad is not None for weight in trainable(model).values())
    save_pretrained(model, tmp_path / "exported")
    merged(model, tmp_path / "merged")
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), before.detach(), atol=2e-5, rtol=0)
    torch.testing.assert_close(logits(load_adapter(str(tmp_path / "exported")).model), before.detach())


def test_experts_in_sixteen_bits_are_merged_within_rounding(folders, tmp_path):
    distance = merged(trained(folders["mixtral"], dtype="bfloat16", lora=EVERYTHING), tmp_path / "merged", "float32")
    assert distance.merged < 1e-5
    assert plain(tmp_path / "merged").dtype == torch.float32


def test_a_router_gets_no_adapter(folders):
    adapted = [name for name in trainable(trained(folders["llama4"], lora=EVERYTHING)) if "lora_A" in name]
    assert adapted and not any("router" in name for name in adapted)
    router = LoRAConfig(**LORA, target_modules=["q_proj", "router"])
    with pytest.raises(ValueError, match="^lora.target_modules names 'router', a Llama4Router, whose output is not"):
        trained(folders["llama4"], lora=router)


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("llama", {"target_modules": ["lm_head"]}),
        ("llama", {"target_modules": ["lm_head", "embed_tokens", "q_proj"]}),
        ("llama", {"modules_to_save": ["lm_head"]}),
        ("opt", {"target_modules": ["project_in", "project_out"]}),
        ("mixtral", {"target_modules": "all-linear"}),
    ],
)
@pytest.mark.parametrize("types", [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "float32")])
def test_adapters_anywhere_are_merged_into_another_data_type(folders, tmp_path, name, lora, types):
    trained_in, written_in = types
    model = trained(folders[name], dtype=trained_in, lora=LoRAConfig(**LORA, **lora))
    distance = merged(model, tmp_path / "merged", written_in)
    assert str(plain(tmp_path / "merged").dtype) == f"torch.{written_in}" and distance.merged < 0.1


@pytest.mark.slow
def test_four_bits_of_a_run_in_sixteen_bits_are_written_in_thirty_two(folders, tmp_path):
    """The settings of the QLoRA overlay, and --dtype float32: nothing is rounded."""
    model = trained(folders["wide"], dtype="bfloat16", lora=LoRAConfig(**LORA), quantization="nf4")
    with in_float32(model.model):
        exact = logits(model.model)
    distance = merged(model, tmp_path / "merged", "float32")
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), exact, atol=1e-4, rtol=0)
    assert distance.merged < 1e-4


# -- adapters of peft --------------------------------------------------------------------------------------------------


def foreign(base, folder, **settings):
    """An adapter that peft trained without lrl; how often its logits were before and after is what is asked."""
    import peft
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(r=2, lora_alpha=8, task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers` to `True`")  # as it is to be
        model.save_pretrained(folder)
    return logits(model)


@pytest.mark.parametrize(
    ("base", "settings", "stays_tied"),
    [
        ("llama", {"target_modules": "all-linear"}, False),
        ("llama", {"target_modules": ["q_proj"], "use_dora": True}, False),
        ("llama", {"target_modules": ["q_proj"], "use_rslora": True}, False),
        ("tied", {"target_modules": ["q_proj"]}, True),
        ("tied", {"target_modules": ["q_proj", "lm_head"]}, False),
        ("tied", {"target_modules": ["q_proj", "embed_tokens"]}, False),
        ("tied", {"target_modules": ["lm_head", "embed_tokens"]}, False),
        ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
        ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False),
        ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True}, True),
        ("tied", {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True}, True),
        ("tied", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}, True),
    ],
)
def test_an_adapter_of_peft_is_merged_and_tied_embeddings_are_untied_where_they_differ(
    folders, tmp_path, base, settings, stays_tied
):
    before = foreign(folders[base], tmp_path / "adapter", **settings)
    loaded = load_adapter(str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(loaded.model), before, atol=1e-5, rtol=0)
    save_merged(loaded.model, tmp_path / "merged", loaded.tokenizer.save_pretrained, loaded.config)
    after = plain(tmp_path / "merged")
    torch.testing.assert_close(logits(after), before, atol=1e-5, rtol=0)
    ends = after.get_input_embeddings().weight, after.get_output_embeddings().weight
    assert (ends[0] is ends[1]) == stays_tied == after.config.tie_word_embeddings


@pytest.mark.parametrize("kind", ["untied", "tied_saved", pytest.param("four_bits_tokens", marks=pytest.mark.slow)])
def test_what_a_run_exports_is_merged_as_well(folders, tmp_path, kind):
    base, settings = KINDS[kind]
    model = trained(folders[base], **settings)
    before = logits(model.model)
    save_pretrained(model, tmp_path / "exported")
    loaded = load_adapter(str(tmp_path / "exported"))
    save_merged(loaded.model, tmp_path / "merged", loaded.tokenizer.save_pretrained, loaded.config)
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), before, atol=1e-5, rtol=0)
    assert load(str(tmp_path / "merged")).tokenizer.encode_text("LEFT") == model.tokenizer.encode_text("LEFT")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", "nf4"), ("bfloat16", None)])
def test_the_base_of_an_exported_adapter_is_loaded_as_it_was_in_training(folders, tmp_path, dtype, quantization):
    model = trained(folders["wide"], dtype=dtype, lora=LoRAConfig(**LORA), quantization=quantization)
    save_pretrained(model, tmp_path / "exported")
    loaded = load_adapter(str(tmp_path / "exported"))
    assert (loaded.config.dtype, loaded.config.quantization) == (dtype, quantization)
    with in_float32(model.model), in_float32(loaded.model):
        torch.testing.assert_close(logits(loaded.model), logits(model.model))
    for text in ("{", "[]", '{"dtype": "float32"}'):
        (tmp_path / "exported" / BASE_FILE).write_text(text)
        with pytest.raises(ValueError, match=r"^peft_model_id is '.*', whose lrl_base.json is damaged"):
            load_adapter(str(tmp_path / "exported"))


def test_missing_adapters_raise_one_sentence(folders, tmp_path):
    with pytest.raises(ValueError, match="a folder without adapter_config.json"):
        load_adapter(str(folders["llama"]))
    foreign(folders["llama"], tmp_path / "adapter", target_modules=["q_proj"])
    settings = (tmp_path / "adapter" / "adapter_config.json").read_text()
    pinned = settings.replace(folders["llama"], "owner/base").replace('"revision": null', '"revision": "abc123"')
    (tmp_path / "adapter" / "adapter_config.json").write_text(pinned)
    with pytest.raises(ValueError, match="whose base is 'owner/base' in the revision 'abc123', and the newest would"):
        load_adapter(str(tmp_path / "adapter"))
    (tmp_path / "adapter" / "adapter_config.json").write_text(pinned.replace("owner/base", folders["llama"]))
    assert load_adapter(str(tmp_path / "adapter")).config.name == folders["llama"], "a folder is of one revision"
    for base, message in (
        ("no-such-base", "which is not a local folder"),
        (folders["wide"], r"does not fit its base .*wide"),
    ):
        (tmp_path / "adapter" / "adapter_config.json").write_text(settings.replace(folders["llama"], base))
        with pytest.raises(ValueError, match=message):
            load_adapter(str(tmp_path / "adapter"))


# -- the folder --------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_empty_is_not_changed(tmp_path):
    check_new_folder(tmp_path / "new", "--output_dir")
    check_new_folder(tmp_path, "--output_dir")
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match=r"--output_dir is '.*', which is not empty; name a new folder\."):
            check_new_folder(path, "--output_dir")


def test_a_disk_that_is_full_during_a_merge_leaves_no_folder(folders, tmp_path):
    model = load(folders["llama"], lora=LoRAConfig(r=2))

    def full_disk(path):
        (path / "half").touch()
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    model.tokenizer.save = full_disk
    with pytest.raises(
        DiskFullError, match=rf"the merged model '{tmp_path}/out', which needs about \d+ bytes, was not"
    ):
        merged(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_written_completely_or_not_at_all(tmp_path):
    def fail():
        with written_whole(tmp_path / "a" / "out") as draft:
            (draft / "half").touch()
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert list((tmp_path / "a").iterdir()) == []
    (tmp_path / "a" / "out").mkdir()
    with written_whole(tmp_path / "a" / "out") as draft:
        (draft / "all").touch()
    assert [file.name for file in (tmp_path / "a").rglob("*")] == ["out", "all"]


def test_a_model_that_is_not_the_same_after_merging_is_not_written(folders, tmp_path, monkeypatch):
    model = trained(folders["llama"], lora=LoRAConfig(**LORA))
    monkeypatch.setattr(merging, "merge", lambda given, dtype: given.unload())  # forgets the adapter
    with pytest.raises(ValueError, match=r"differs from the adapter model by .* nothing was written"):
        merged(model, tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def forgotten(model, dtype):
    """Return the base model without the adapter."""
    return model.unload().to(dtype or model.dtype)


def corrupted(model, dtype):
    """Return a merged model in which one matrix is wrong."""
    whole = MERGE(model, dtype)
    whole.model.layers[1].mlp.down_proj.weight.data.neg_()
    return whole


MERGE = merging.merge


@pytest.mark.slow
@pytest.mark.parametrize("broken", [forgotten, corrupted])
@pytest.mark.parametrize(
    ("trained_in", "written_in"),
    [("bfloat16", None), ("float16", None), ("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")],
)
def test_in_sixteen_bits_a_wrong_model_is_distinguished_from_rounding(
    folders, tmp_path, monkeypatch, trained_in, written_in, broken
):
    merged(trained(folders["llama"], dtype=trained_in, lora=LoRAConfig(**LORA)), tmp_path / "whole", written_in)
    monkeypatch.setattr(merging, "merge", broken)
    with pytest.raises(
        ValueError, match=r"differs from the adapter model by .* more than rounding .* nothing was written"
    ):
        merged(trained(folders["llama"], dtype=trained_in, lora=LoRAConfig(**LORA)), tmp_path / "broken", written_in)
    assert [file.name for file in tmp_path.iterdir()] == ["whole"]
