"""A critic on the trunk: which hidden state it reads."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_runs import batch_of, save_tiny_model, text_policy

from lrl.envs.factory import GymnasiumEnvs
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.heads import ValueHead, ValueHeadConfig
from lrl.lm.layouts import pad_prompts
from lrl.policies.scoring import ScoringPolicy
from lrl.prompts import PromptTemplate
from lrl.training.weights import shard_weights, take_weights
from lrl.types import RandomKeys, TurnBatch

LAKE = GymnasiumEnvs("FrozenLake-v1")


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)


def connected(folder, model=None, **head):
    policy = text_policy(folder, value_head=ValueHeadConfig(init_seed=0, **head), **model or {})
    policy.connect(LAKE.codec)
    policy.configure()
    return policy


def turns(policy):
    """Three turns of one to three tokens behind prompts of different length."""
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [5, 6, 7]]
    mask = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
    responses = torch.tensor([[7, 8, 3], [9, 0, 0], [10, 3, 0]])
    inputs = pad_prompts(prompts, torch.device("cpu")) | {"response_ids": responses}
    nothing = torch.zeros(mask.shape)
    return prompts, TurnBatch(inputs=inputs, response_mask=mask, old_logprobs=nothing, advantages=nothing)


@pytest.mark.parametrize("model", [{}, {"lora": LoRAConfig(r=2)}, {"share_prompts": False}])
def test_a_value_is_of_the_state_before_its_token(folder, model):
    policy = connected(folder, model, hidden_sizes=(4,))
    prompts, batch = turns(policy)
    values = policy.evaluate(batch).values
    trunk = policy.language_model.model
    for row, prompt in enumerate(prompts):
        ids = prompt + batch.inputs["response_ids"][row, : int(batch.response_mask[row].sum())].tolist()
        hidden = trunk(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        for token in range(len(ids) - len(prompt)):
            expected = policy.value_head.layers(hidden[len(prompt) - 1 + token])
            torch.testing.assert_close(values[row, token], expected[0], atol=1e-5, rtol=1e-5)
    assert not values[~batch.response_mask].any()


def test_init_from_can_load_only_the_value_head(folder):
    policy = connected(folder)
    weights = {name: weight + 1 for name, weight in policy.state_dict().items() if name.startswith("value_head.")}
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    take_weights(policy, weights, "run")
    loaded = policy.state_dict()
    assert weights and all(torch.equal(loaded[name], weight) for name, weight in (before | weights).items())


def test_packing_changes_no_value(folder):
    plain, packed = connected(folder), connected(folder)
    packed.pack_tokens = 32
    _, batch = turns(plain)
    torch.testing.assert_close(plain.evaluate(batch).values, packed.evaluate(batch).values, atol=1e-5, rtol=1e-5)


def test_its_gradient_reaches_the_trunk(folder):
    policy = connected(folder)
    _, batch = turns(policy)
    policy.evaluate(batch).values.sum().backward()
    trunk = [p.grad for p in policy.language_model.model.parameters() if p.grad is not None]
    assert sum(float(gradient.abs().sum()) for gradient in trunk) > 0


def test_it_computes_in_float32_under_autocast():
    head = ValueHead(ValueHeadConfig(init_seed=0), 6)
    states, mask = torch.randn(2, 3, 6), torch.ones(2, 3, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        values = head(states.to(torch.bfloat16), mask)
    assert values.dtype == torch.float32


def test_a_hidden_size_out_of_range_raises_its_name():
    with pytest.raises(ValueError, match=r"value_head.hidden_sizes is \[0\]"):
        ValueHeadConfig(hidden_sizes=(0,))


@pytest.mark.parametrize("detach", [False, True])
def test_a_detached_head_leaves_the_trunk_alone(detach):
    head = ValueHead(ValueHeadConfig(hidden_sizes=[4], detach=detach, init_seed=0), 3)
    states = torch.ones(2, 1, 3, requires_grad=True)
    head(states, torch.ones(2, 1, dtype=torch.bool)).sum().backward()
    assert (states.grad is None) == detach
    assert all(weight.grad is not None for weight in head.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_in_half_precision_is_initialised_and_computes_in_float32(dtype):
    """Create the model under a default data type, like true 16-bit precision of Lightning."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        head = ValueHead(ValueHeadConfig(hidden_sizes=[4], init_seed=0), 3)
    finally:
        torch.set_default_dtype(before)
    assert next(head.parameters()).dtype == dtype
    full = ValueHead(ValueHeadConfig(hidden_sizes=[4], init_seed=0), 3)
    for ours, wanted in zip(head.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(ours.float(), wanted, atol=0.01, rtol=0.01)
    states = torch.ones(2, 1, 3, dtype=dtype)
    assert head(states, torch.ones(2, 1, dtype=torch.bool)).dtype == torch.float32


def with_adapter(folder, kind, adapter=True, **model):
    """A policy with LoRA whose actor's adapter is no longer zero, and whose value head may have one of its own."""
    head = ValueHeadConfig(hidden_sizes=[4], init_seed=0, adapter=adapter)
    model = {"lora": LoRAConfig(r=2), "dtype": "float64"} | model
    if kind == "text":
        policy = text_policy(folder, value_head=head, **model)
    else:
        prompt = PromptTemplate(response_format="direct", system="")
        policy = ScoringPolicy(LanguageModelConfig(name=folder, **model), prompt, value_head=head)
    policy.connect(LAKE.codec)
    policy.configure()
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if ".default." in name:
                weight.add_(0.3)
    return policy


KEYS = RandomKeys(seed=0, purpose="rollout", collection=0, env=np.arange(2), turn=np.zeros(2, dtype=np.int64))


def played(policy):
    decisions = policy.act(["a b", "c"], [(), ()], KEYS, policy.sampling)
    return batch_of(decisions)


@pytest.mark.parametrize("kind", ["text", "scoring"])
def test_actor_and_critic_each_learn_an_adapter_of_their_own(folder, kind):
    policy = with_adapter(folder, kind)
    batch = played(policy)
    names = {"default": [], "critic": [], "value_head": []}
    for part in ("logprobs", "values"):
        policy.zero_grad()
        evaluation = policy.evaluate(batch)
        torch.testing.assert_close(evaluation.logprobs, batch.old_logprobs, msg="the actor's adapter speaks")
        getattr(evaluation, part).sum().backward()
        reached = [name for name, weight in policy.named_parameters() if weight.grad is not None and weight.grad.any()]
        kinds = {next(kind for kind in names if kind in name.split(".")) for name in reached}
        assert kinds == ({"default"} if part == "logprobs" else {"critic", "value_head"})
    own = {id(weight) for weight in policy.critic_parameters()}
    for name, weight in policy.named_parameters():
        assert (id(weight) in own) == bool({"critic", "value_head"} & set(name.split("."))), name
        assert weight.requires_grad == bool({"critic", "value_head", "default"} & set(name.split("."))), name


@pytest.mark.parametrize("kind", ["text", "scoring"])
def test_a_critics_adapter_starts_at_the_base(folder, kind):
    """The values are those of a head on the base without adapters, so they do not depend on the actor's adapter."""
    policy = with_adapter(folder, kind)
    batch = played(policy)
    with torch.no_grad():
        values = policy.evaluate(batch).values
        state = policy.state_values(["a b", "c"], [(), ()])
        for name, weight in policy.named_parameters():
            if ".default." in name:
                weight.zero_()
        bare = with_adapter(folder, kind, adapter=False)
        for name, weight in bare.named_parameters():
            if ".default." in name:
                weight.zero_()
        torch.testing.assert_close(values, bare.evaluate(batch).values)
    torch.testing.assert_close(state, values[:, 0])


def test_a_critics_adapter_needs_lora_and_no_second_forward_pass(folder):
    with pytest.raises(ValueError, match="value_head.adapter is true and language_model.lora null; set lora"):
        with_adapter(folder, "text", lora=None)
    with pytest.raises(ValueError, match="gradient_checkpointing are both true; one of them must be false"):
        with_adapter(folder, "text", gradient_checkpointing=True)
    with pytest.raises(ValueError, match="value_head.adapter is true, .* trainer.strategy must be ddp"):
        shard_weights(with_adapter(folder, "text"), {"tensor_parallel": SimpleNamespace(size=lambda: 1)})
    with pytest.raises(ValueError, match="the adapter would learn nothing"):
        ValueHeadConfig(adapter=True, detach=True)
