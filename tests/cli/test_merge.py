"""The command that merges: from a checkpoint or an adapter to a folder, and the value head beside it."""

import huggingface_hub
import pytest
import torch
import yaml
from commands import run_words
from tiny_runs import save_tiny_model, text_policy

from lrl.algorithms.ppo import PPOValueHeadModule
from lrl.envs.factory import GymnasiumEnvs
from lrl.lm.adapters import save_pretrained
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.heads import ValueHeadConfig
from lrl.policies.head import HeadPolicy
from lrl.policies.mlp import MLPPolicy
from lrl.policies.scoring import ScoringPolicy
from lrl.prompts import PromptTemplate

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft under transformers 5
LORA = {"r": 2, "alpha": 8}
HEAD = {"hidden_sizes": [8], "init_seed": 0}
IDS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tied", tie_word_embeddings=True)


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def write(root, name, dtype="float32", head=None):
    """The checkpoint of a policy whose trainable weights have moved, and the policy."""
    policy = text_policy(
        name, dtype=dtype, lora=LoRAConfig(**LORA), value_head=None if head is None else ValueHeadConfig(**head)
    )
    policy.configure()
    init_args = {
        "language_model": {"name": name, "dtype": dtype, "lora": LORA},
        "prompt": {"response_format": "direct", "system": ""},
        "sampling": {"max_new_tokens": 2},
        "value_head": head,
    }
    return save(root, policy, init_args)


def save(root, policy, init_args, **data):
    """Move the trainable weights of a policy and write its checkpoint."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))
    kind = {"class_path": type(policy).__name__, "init_args": init_args}
    config = {"model": {"init_args": {"policy": kind}}, "data": {"init_args": data}}
    frozen = {name for name, weight in policy.named_parameters(remove_duplicate=False) if not weight.requires_grad}
    state = {f"policy.{name}": tensor for name, tensor in policy.state_dict().items() if name not in frozen}
    ours = {"config": yaml.safe_dump(config), "fingerprint": policy.fingerprint}
    (root / "checkpoints").mkdir(parents=True)
    torch.save({"state_dict": state, "lrl": ours}, root / "checkpoints" / "last.ckpt")
    return policy


def write_without_text(root, kind, **init_args):
    """The checkpoint of a policy on CartPole's native actions, and the policy."""
    given = dict(init_args)
    if "language_model" in given:
        given["language_model"] = LanguageModelConfig(name=given["language_model"]["name"], lora=LoRAConfig(**LORA))
    policy = kind(**given)
    envs = GymnasiumEnvs("CartPole-v1")
    policy.connect(envs.codec)
    policy.connect_spaces(*envs.spaces)
    policy.configure()
    env = {"class_path": "GymnasiumEnvs", "init_args": {"id": "CartPole-v1"}}
    return save(root, policy, init_args, env=env)


def merge(*words):
    return run_words(["python", "-m", "lrl", "merge", *map(str, words)])


@pytest.mark.slow
@pytest.mark.parametrize("source", ["--checkpoint", "--peft_model_id"])
def test_a_run_or_an_adapter_becomes_a_plain_folder(folder, tmp_path, source):
    from transformers import AutoModelForCausalLM

    policy = write(tmp_path / "run", folder)
    save_pretrained(policy.language_model, tmp_path / "adapter")
    path = tmp_path / ("run" if source == "--checkpoint" else "adapter")
    done = merge(source, path, "--output_dir", tmp_path / "new" / "merged")
    assert done.returncode == 0, done.stderr
    assert (
        "Difference of log-probabilities from the adapter model in float32: " in done.stdout
        and len(done.stdout.splitlines()) == 1
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "merged")
    torch.testing.assert_close(logits(loaded), logits(policy.language_model.model), atol=1e-5, rtol=0)
    assert [found.name for found in (tmp_path / "new").iterdir()] == ["merged"]
    again = merge(source, path, "--output_dir", tmp_path / "new" / "merged")
    assert again.returncode == 2 and again.stderr.endswith("merged', which is not empty; name a new folder.\n")


def test_the_language_model_under_a_head_is_written_without_the_head(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    given = {"language_model": {"name": folder, "lora": LORA}, "hidden_sizes": [4], "init_seed": 0}
    policy = write_without_text(tmp_path / "run", HeadPolicy, **given)
    done = merge("--checkpoint", tmp_path / "run", "--output_dir", tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(loaded), logits(policy.language_model.model), atol=1e-5, rtol=0)


def test_a_policy_that_scores_actions_is_written_without_an_environment(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    prompt, packs = {"response_format": "direct", "system": ""}, {"pack_tokens": 64}
    policy = ScoringPolicy(LanguageModelConfig(name=folder, lora=LoRAConfig(**LORA)), PromptTemplate(**prompt), **packs)
    policy.connect(GymnasiumEnvs("FrozenLake-v1").codec)
    policy.configure()
    save(tmp_path / "run", policy, {"language_model": {"name": folder, "lora": LORA}, "prompt": prompt} | packs)
    done = merge("--checkpoint", tmp_path / "run", "--output_dir", tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(loaded), logits(policy.language_model.model), atol=1e-5, rtol=0)


def test_in_sixteen_bits_the_distance_is_printed(folder, tmp_path):
    write(tmp_path / "run", folder, "bfloat16")
    done = merge("--checkpoint", tmp_path / "run", "--output_dir", tmp_path / "merged")
    assert done.returncode == 0 and "of log-probabilities from the adapter model in float32: " in done.stdout


def test_the_value_head_is_written_and_a_run_starts_from_it(folder, tmp_path):
    policy = write(tmp_path / "run", folder, head=HEAD)
    done = merge("--checkpoint", tmp_path / "run", "--output_dir", tmp_path / "merged", "--value_head")
    assert done.returncode == 0, done.stderr
    merged, lora = str(tmp_path / "merged"), LoRAConfig(**LORA)
    wanted = policy.value_head.state_dict()
    assert [file.name for file in (tmp_path / "merged").glob("*.safetensors")] == ["model.safetensors"], "for vLLM"
    for source, model in ((f"{merged}/value_head/value_head.safetensors", {"lora": lora}), (merged, {})):
        policy = text_policy(merged, value_head=ValueHeadConfig(**HEAD | {"init_seed": 7}), **model)
        started = PPOValueHeadModule(policy, init_from=source)
        started.configure_model()
        found = started.policy.value_head.state_dict()
        assert wanted and all(torch.equal(found[name], wanted[name]) for name in wanted)
        torch.testing.assert_close(
            logits(started.policy.language_model.model), logits(policy.language_model.model), atol=1e-5, rtol=0
        )
        assert not started.overwritten_names


@pytest.mark.parametrize("fails", [False, True])
def test_the_folder_is_pushed_to_a_repository_that_is_created_first(folder, tmp_path, monkeypatch, fails):
    asked = []

    def answer(name):
        def call(self, *args, **kwargs):
            asked.append(name)
            if fails and name == "upload_folder":
                raise ConnectionError("broken pipe")

        return call

    for name in ("whoami", "create_repo", "upload_folder"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, answer(name))
    write(tmp_path / "run", folder)
    words = ["--output_dir", tmp_path / "merged", "--push_to_hub", "me/lake"]
    done = merge("--checkpoint", tmp_path / "run", *words)
    assert asked == ["whoami", "create_repo", "upload_folder"]
    assert done.returncode == (2 if fails else 0) and (tmp_path / "merged" / "config.json").exists()
    assert ("broken pipe" in done.stderr) == fails == ("pushed to me/lake" not in done.stdout)


def test_a_policy_that_cannot_be_merged_raises_one_sentence(folder, tmp_path):
    write(tmp_path / "run", folder)
    write(tmp_path / "adapted", folder, head=HEAD | {"adapter": True})
    write_without_text(tmp_path / "network", MLPPolicy, hidden_sizes=[4], init_seed=0)
    cases = {
        ("--checkpoint", tmp_path / "network"): "a MLPPolicy, which has no language model.",
        ("--checkpoint", tmp_path / "run", "--value_head"): "the TextPolicy of --checkpoint has none; leave it out.",
        ("--checkpoint", tmp_path / "adapted", "--value_head"): "which the merged model lacks; leave it out.",
        ("--peft_model_id", folder, "--value_head"): "an adapter of peft has none; leave it out.",
        ("--peft_model_id", folder): "a folder without adapter_config.json; it must hold an adapter of peft.",
        ("--checkpoint", tmp_path / "none"): "that contains one, but it does not exist.",
    }
    for words, sentence in cases.items():
        done = merge(*words, "--output_dir", tmp_path / "merged")
        assert done.returncode == 2 and done.stderr.endswith(f"{sentence}\n"), done.stderr
        assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "merged").exists()
