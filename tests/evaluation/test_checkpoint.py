"""Policies are loaded for evaluation."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import run_words

from lrl.codecs.numbers import NumberFormat
from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.episodes import evaluate_policy
from lrl.evaluation.load import Loaded, load_baseline, load_model, load_policy, saved_numbers
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.merging import merge_adapters_of
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.types import SamplingConfig

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft under transformers 5
LAKE = {"class_path": "GymnasiumEnvs", "init_args": {"id": "FrozenLake-v1"}}


def trained(model: str, lora: bool) -> TextPolicy:
    """A policy whose trainable weights have moved."""
    config = LanguageModelConfig(name=model, lora=LoRAConfig(r=2, alpha=4) if lora else None)
    policy = TextPolicy(config, PromptTemplate(), SamplingConfig(max_new_tokens=4))
    policy.connect(GymnasiumEnvs("FrozenLake-v1").codec)
    policy.configure()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    return policy


def write_checkpoint(folder: Path, model: str, lora: bool, **changes: Any) -> tuple[Path, TextPolicy]:
    """Checkpoint of a run: trainable weights and the configuration."""
    policy = trained(model, lora)
    language_model = {"name": model} | ({"lora": {"r": 2, "alpha": 4}} if lora else {})
    init_args = {"language_model": language_model, "prompt": {}, "sampling": {"max_new_tokens": 4}}
    prompts = {"class_path": "PromptEnvs", "init_args": {}}
    config = {
        "model": {"init_args": {"policy": {"class_path": "TextPolicy", "init_args": init_args}}},
        "data": {"init_args": {"env": prompts, "validation": {"env": LAKE}}},
    }
    learned = {name for name, p in policy.named_parameters(remove_duplicate=False) if p.requires_grad}
    state = {f"policy.{name}": tensor for name, tensor in policy.state_dict().items() if name in learned}
    ours = {"config": yaml.safe_dump(config), "env_steps": 7, "fingerprint": policy.fingerprint}
    checkpoint = {"state_dict": state, "lrl": ours} | changes
    path = folder / "checkpoints" / "last.ckpt"
    path.parent.mkdir()
    torch.save(checkpoint, path)
    return path, policy


def lengths(loaded: Loaded) -> list[int]:
    return evaluate_policy(loaded.policy, loaded.env_factory, 3, 0, 2).lengths.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False])
def test_a_checkpoint_contains_policy_and_validation_environment(tmp_path: Path, tiny_model: str, lora: bool) -> None:
    path, policy = write_checkpoint(tmp_path, tiny_model, lora)
    loaded = load_policy(path)
    assert loaded.info["env_id"] == "FrozenLake-v1" and loaded.info["env_steps"] == 7
    for name, tensor in policy.state_dict().items():
        assert torch.equal(loaded.policy.state_dict()[name], tensor), name
    assert lengths(loaded) == lengths(Loaded(policy, loaded.env_factory, {}))


def test_a_run_directory_loads_its_last_checkpoint(tmp_path: Path, tiny_model: str) -> None:
    write_checkpoint(tmp_path, tiny_model, lora=True)
    other = GymnasiumEnvs("FrozenLake-v1", kwargs={"map_name": "8x8"})
    assert load_policy(tmp_path, other).env_factory is other


@pytest.mark.slow
def test_merged_adapters_act_identically(tmp_path: Path, tiny_model: str) -> None:
    write_checkpoint(tmp_path, tiny_model, lora=True)
    plain, merged = load_policy(tmp_path), load_policy(tmp_path)
    merge_adapters_of(merged.policy, "run")
    assert not any("lora" in name for name, _ in merged.policy.named_parameters())
    assert lengths(merged) == lengths(plain)
    ids = torch.arange(4, 12)[None]
    base = load_model(tiny_model, GymnasiumEnvs("FrozenLake-v1"), {})
    logits = [loaded.policy.language_model.model(ids).logits for loaded in (plain, merged, base)]  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    assert (logits[0] - logits[2]).abs().max() > 0.1


@pytest.mark.slow
def test_merging_reaches_the_command_line(tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, tiny_model, lora=True)
    merged: list[Any] = []
    monkeypatch.setattr("lrl.lm.merging.merge_adapters_of", lambda *told: merged.append(told[1]))
    options = ["--checkpoint", str(tmp_path), "--episodes", "1", "--merge_adapters"]
    assert run_words(["python", "-m", "lrl", "evaluate", *options]).returncode == 0
    assert run_words(["python", "-m", "lrl", "success_table", *options, "--env_id", "FrozenLake-v1"]).returncode == 0
    assert merged == [str(tmp_path)] * 2
    monkeypatch.undo()
    refused = run_words(["python", "-m", "lrl", "evaluate", "--policy", "random", "--merge_adapters"])
    assert refused.returncode == 2 and "but 'random' is a RandomActor without adapters; leave it out." in refused.stderr


@pytest.mark.slow
def test_a_policy_that_cannot_be_merged_is_an_error_before_any_is_played(
    tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, lora in (("a", True), ("b", False)):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name, tiny_model, lora=lora)
    monkeypatch.setattr("lrl.evaluation.episodes.evaluate_policy", None)
    words = [
        "--checkpoint",
        f"a={tmp_path / 'a'}",
        f"b={tmp_path / 'b'}",
        "--env_id",
        "FrozenLake-v1",
        "--merge_adapters",
    ]
    refused = run_words(["python", "-m", "lrl", "success_table", *words])
    assert refused.returncode == 2 and "but 'b' is a TextPolicy without adapters" in refused.stderr
    loaded = load_policy(tmp_path / "a")
    loaded.policy.language_model.has_critic_adapter = True  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="the critic of 'a' has an adapter of its own"):
        merge_adapters_of(loaded.policy, "a")


def test_missing_and_unknown_weights_raise(tmp_path: Path, tiny_model: str) -> None:
    path, _ = write_checkpoint(tmp_path, tiny_model, lora=True)
    checkpoint = torch.load(path, weights_only=True)
    name, tensor = checkpoint["state_dict"].popitem()
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match="are missing") as missing:
        load_policy(path)
    assert name.removeprefix("policy.") in str(missing.value)
    checkpoint["state_dict"] |= {name: tensor, "policy.stranger": tensor}
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match=r"\['stranger'\] are unknown"):
        load_policy(path)


def test_another_base_model_raises(tmp_path: Path, tiny_model: str) -> None:
    path, _ = write_checkpoint(tmp_path, tiny_model, lora=True)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["lrl"]["fingerprint"] = "0123"
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match="trained on base weights '0123'"):
        load_policy(path)


def test_a_path_without_checkpoint_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it must be a checkpoint, or a run directory"):
        load_policy(tmp_path / "nothing")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(ValueError, match="that contains one, but it does not exist; its folder has foreign.ckpt"):
        load_policy(tmp_path / "best.ckpt")
    with pytest.raises(ValueError, match="which holds no config"):
        load_policy(tmp_path / "foreign.ckpt")
    (tmp_path / ".metadata").touch()
    with pytest.raises(ValueError, match="is not a checkpoint or is damaged"):
        load_policy(tmp_path)


def test_a_config_that_cannot_be_built_raises_one_sentence(tmp_path: Path, tiny_model: str) -> None:
    config = {"model": {"init_args": {"policy": {"class_path": "lrl.policies.text.GonePolicy"}}}, "data": {}}
    ours = {"config": yaml.safe_dump(config), "fingerprint": ""}
    path, _ = write_checkpoint(tmp_path, tiny_model, lora=True, lrl=ours)
    with pytest.raises(ValueError, match="whose Policy cannot be built"):
        load_policy(path)


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize(
    "numbers",
    [
        {"kind": "integers", "ranges": [[-1, 1], [-1, 1], [-6, 6]]},
        {"kind": "normalised", "statistics": [[0.1, 0.5], [0, 0.7], [0, 3]], "precision": 5},
    ],
)
def test_numbers_are_those_that_the_policy_was_trained_on(tmp_path: Path, offline: bool, numbers) -> None:
    """Ranges and statistics are saved too. A policy trained on rows reads the numbers of the rows' environment."""
    env = {"class_path": "GymnasiumEnvs", "init_args": {"id": "Pendulum-v1", "numbers": numbers}}
    rows = {"class_path": "MinariRows", "init_args": {"dataset_id": "lrl/pendulum-v0", "env": env}}
    prompts = {"class_path": "PromptEnvs", "init_args": {"rows": rows, "rewards": []}}
    config = {"model": {}, "data": {"init_args": {"env": prompts if offline else env, "validation": {"env": None}}}}
    torch.save({"lrl": {"config": yaml.safe_dump(config)}}, tmp_path / "last.ckpt")
    for wanted in (None, numbers["kind"], yaml.safe_dump(numbers, default_flow_style=True)):
        assert saved_numbers(tmp_path / "last.ckpt", wanted) == NumberFormat(**numbers)
    for wanted in ("decimals", "{kind: integers, ranges: [[-1, 1]]}"):
        with pytest.raises(ValueError, match=r"numbers is .* but the checkpoint was trained with another format"):
            saved_numbers(tmp_path / "last.ckpt", wanted)


def test_a_model_is_evaluated_as_it_is(tiny_model: str) -> None:
    loaded = load_model(tiny_model, GymnasiumEnvs("FrozenLake-v1"), {}, max_new_tokens=4)
    assert lengths(loaded) == [5, 5, 5], "it does not know the format, and five invalid answers end an episode"


def test_a_model_can_be_prompted_with_examples_of_the_expert(tiny_model: str) -> None:
    loaded = load_model(tiny_model, GymnasiumEnvs("FrozenLake-v1"), {"num_examples": 2}, max_new_tokens=4)
    assert isinstance(loaded.policy, TextPolicy) and len(loaded.policy.prompt.examples) == 2


def test_a_checkpoint_is_shown_the_examples_of_its_training_wherever_it_is_evaluated(tmp_path, tiny_model) -> None:
    path, _ = write_checkpoint(tmp_path, tiny_model, lora=True)
    checkpoint = torch.load(path, weights_only=True)
    config = yaml.safe_load(checkpoint["lrl"]["config"])
    config["model"]["init_args"]["policy"]["init_args"]["prompt"] = {"num_examples": 2}
    config["data"]["init_args"]["env"] = LAKE
    checkpoint["lrl"]["config"] = yaml.safe_dump(config)
    torch.save(checkpoint, path)
    loaded = load_policy(path, GymnasiumEnvs("FrozenLake8x8-v1"))
    assert isinstance(loaded.policy, TextPolicy)
    assert [len(turn.observation.splitlines()) for turn in loaded.policy.prompt.examples] == [1 + 4] * 2


@pytest.mark.parametrize("name", ["random", "constant", "expert"])
def test_baselines_are_known_by_name(name: str) -> None:
    assert min(lengths(load_baseline(name, GymnasiumEnvs("FrozenLake-v1")))) >= 1


def test_an_unknown_baseline_is_named() -> None:
    with pytest.raises(ValueError, match="policy is 'best'; it must be one of random, constant, expert"):
        load_baseline("best", GymnasiumEnvs("FrozenLake-v1"))
