"""Tests of the policy that is a small network, and of running statistics."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tiny_runs import batch_of, on_two_ranks, sampled_values

from lrl.envs.factory import GymnasiumEnvs
from lrl.evaluation.episodes import evaluate_policy
from lrl.functional.distributions import Gaussian
from lrl.lm.heads import RunningNorm, RunningWhitening, mlp
from lrl.policies.mlp import MLPPolicy
from lrl.training import value_fit
from lrl.types import NativeTurn, RandomKeys, SamplingConfig


def network(observation_space, action_space, **settings):
    policy = MLPPolicy(**{"hidden_sizes": (8, 8), "init_seed": 0} | settings)
    policy.connect_spaces(observation_space, action_space)
    policy.configure()
    return policy


def keys(rows, collection=0):
    return RandomKeys(seed=0, purpose="rollout", collection=collection, env=np.arange(rows), turn=np.zeros(rows, int))


BOX = spaces.Box(-1, 1, (3,), np.float32)
SPACES = {
    "discrete": (BOX, spaces.Discrete(4)),
    "shifted": (BOX, spaces.Discrete(4, start=-1)),
    "box": (BOX, spaces.Box(-2.0, 2.0, (2,), np.float32)),
    "one-hot": (spaces.Discrete(5), spaces.Discrete(3)),
    "dict": (spaces.Dict(a=BOX, b=spaces.MultiBinary(2)), spaces.Discrete(3)),
}


@pytest.mark.parametrize("kind", SPACES)
def test_evaluated_logprobs_equal_sampled_ones(kind):
    observed, acted = SPACES[kind]
    policy = network(observed, acted)
    observed.seed(0)
    seen = [observed.sample() for _ in range(50)]
    decisions = policy.act(seen, [()] * 50, keys(50), policy.sampling)
    assert all(acted.contains(action) for action in np.asarray(decisions.actions, dtype=acted.dtype))
    evaluation = policy.evaluate(batch_of(decisions))
    torch.testing.assert_close(evaluation.logprobs, decisions.logprobs)
    assert decisions.values is None  # values are computed once for a whole collection
    torch.testing.assert_close(sampled_values(policy, batch_of(decisions)), evaluation.values)
    torch.testing.assert_close(policy.state_values(seen, [()] * 50), evaluation.values[:, 0])
    assert evaluation.entropy.shape == evaluation.logprobs.shape == (50, 1)
    assert (policy.action_std is None) == (kind != "box")


def test_the_gaussian_equals_that_of_torch():
    generator = torch.Generator().manual_seed(0)
    actions, means, log_std = (torch.randn(size, generator=generator) for size in ((5, 3), (5, 3), (3,)))
    theirs = torch.distributions.Normal(means, log_std.exp()).log_prob(actions).sum(-1, keepdim=True)
    torch.testing.assert_close(Gaussian(means[:, None], log_std).logprobs(actions[:, None]), theirs)
    policy = network(*SPACES["box"], initial_log_std=-0.3)
    decisions = policy.act([BOX.sample() for _ in range(4000)], [()] * 4000, keys(4000), policy.sampling)
    noise = decisions.inputs["action"] - policy(decisions.inputs["observation"]).detach()
    assert noise.std(0) == pytest.approx([np.exp(-0.3)] * 2, rel=0.05) and noise.mean(0).abs().max() < 0.05
    entropy = policy.evaluate(batch_of(decisions)).entropy[0]
    assert float(entropy.detach()) == pytest.approx(2 * float(torch.distributions.Normal(0.0, np.exp(-0.3)).entropy()))


def test_frequencies_of_samples_equal_their_probabilities():
    policy = network(*SPACES["discrete"])
    with torch.no_grad():
        policy.actor[-1].bias.copy_(torch.tensor([0.0, 1.0, 2.0, -1.0]))
    seen = [np.zeros(3, np.float32)] * 8000
    actions = policy.act(seen, [()] * 8000, keys(8000), policy.sampling).inputs["action"]
    wanted = torch.softmax(policy(torch.zeros(1, 3))[0], -1)
    assert (torch.bincount(actions, minlength=4) / 8000 - wanted).abs().max() < 0.02
    greedy = policy.act(seen[:3], [()] * 3, keys(3), SamplingConfig(temperature=0)).actions
    assert greedy.tolist() == [2, 2, 2]


def test_actions_are_clipped_to_the_box_and_unclipped_samples_are_trained_on():
    policy = network(*SPACES["box"], initial_log_std=2.0)
    decisions = policy.act([BOX.sample() for _ in range(100)], [()] * 100, keys(100), policy.sampling)
    assert np.abs(decisions.actions).max() == 2 and decisions.inputs["action"].abs().max() > 2
    calm = policy.act([BOX.sample()], [()], keys(1), SamplingConfig(temperature=0))
    torch.testing.assert_close(calm.inputs["action"], policy(calm.inputs["observation"]).detach())


def test_statistics_cover_all_collections_and_are_saved():
    policy = network(BOX, spaces.Discrete(2), normalise_observations=True)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 3, generator=generator) * 5 + 2 for n in (7, 1, 40)]
    for number, part in enumerate(parts):
        decisions = policy.act(list(part.numpy()), [()] * len(part), keys(len(part)), policy.sampling)
        before = policy(policy.norm(part))
        for _ in range(2):  # a collection that is credited again after a resume counts once
            policy.settle_statistics(number)
            policy.learn_statistics(batch_of(decisions), number)
        assert torch.equal(policy(policy.norm(part)), before)
        policy.settle_statistics(number + 1)
    seen = torch.cat(parts).double()
    count, mean, squares = policy.norm.counting
    torch.testing.assert_close(mean, seen.mean(0), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close((squares / count).sqrt(), seen.std(0, correction=0), atol=1e-6, rtol=1e-6)
    other = network(BOX, spaces.Discrete(2), normalise_observations=True, init_seed=1)
    other.load_state_dict(policy.state_dict())
    torch.testing.assert_close(other(other.norm(parts[2])), policy(policy.norm(parts[2])))


@pytest.mark.parametrize("kind", [RunningNorm, RunningWhitening])
def test_two_ranks_have_the_statistics_of_one(kind):
    vectors = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together, ranks = kind(3), [kind(3), kind(3)]
    for collection, rows in enumerate(vectors.split([40, 20])):
        together.learn(rows, collection)
        together.settle(collection + 1)
        parts = rows.split([7, len(rows) - 7])

        def learn(rank, reduce, parts=parts, collection=collection):
            ranks[rank].learn(parts[rank], collection, reduce)

        on_two_ranks(learn)
        for norm in ranks:
            norm.settle(collection + 1)
            torch.testing.assert_close(norm.counting, together.counting)
            torch.testing.assert_close(norm(vectors), together(vectors))


@pytest.mark.parametrize("kind", [RunningNorm, RunningWhitening])
def test_statistics_keep_their_precision_if_weights_are_converted_to_16_bits(kind):
    norm = kind(2)
    norm.learn(torch.randn(3000, 2, generator=torch.Generator().manual_seed(0)), 0)
    kept = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    norm.to(torch.bfloat16)
    assert all(torch.equal(buffer, kept[name]) for name, buffer in norm.named_buffers())
    assert norm.counting.dtype == torch.float64
    norm.settle(1)


@pytest.mark.parametrize("kind", [RunningNorm, RunningWhitening])
def test_cached_values_are_computed_again_when_the_statistics_change(kind):
    """Statistics change by learning, by loading, after copying, and by conversion to another type and back."""
    vectors = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1
    norm, other = kind(2), kind(2)
    assert torch.equal(norm(vectors), vectors) and torch.equal(other(vectors), vectors)
    norm.learn(vectors, 0)
    norm.settle(1)
    once = norm(vectors)
    assert not torch.equal(once, vectors)
    other.load_state_dict(norm.state_dict())
    assert torch.equal(other(vectors), once)
    copied = copy.deepcopy(norm)
    norm.learn(vectors * 5, 1)
    norm.settle(2)
    assert not torch.equal(norm(vectors), once)
    unasked = copy.deepcopy(copied)
    assert torch.equal(copied(vectors), once)
    for each in (copied, unasked):
        each.load_state_dict(norm.state_dict())
        assert torch.equal(each(vectors), norm(vectors))
    assert torch.equal(copied.to(torch.bfloat16).float()(vectors), norm(vectors)) or kind is RunningWhitening


def test_whitened_states_have_unit_covariance_except_in_directions_below_the_floor():
    generator = torch.Generator().manual_seed(0)
    mixing = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))[0]
    drawn = torch.randn(4000, 4, generator=generator, dtype=torch.float64)
    vectors = 3 + (drawn - drawn.mean(0)) * torch.tensor([10.0, 1.0, 0.1, 0.001]) @ mixing
    norm = RunningWhitening(4, clip=100.0, floor=0.01)
    for number, part in enumerate(vectors.split([1000, 1, 2999])):
        norm.learn(part, number)
        norm.learn(part, number)
        assert torch.equal(norm(part), part) or number > 0
        norm.settle(number + 1)
    centred = vectors - vectors.mean(0)
    covariance = centred.T @ centred / len(vectors)
    torch.testing.assert_close(norm.counting[2:] / norm.counting[0], covariance)
    white = norm(vectors)
    variances = torch.linalg.eigvalsh(white.T @ white / len(white))
    torch.testing.assert_close(variances, variances.new_tensor([1e-4, 1, 1, 1]), rtol=0.05, atol=0)
    torch.testing.assert_close(norm.matrix, norm.matrix.T)
    assert norm(vectors[:1] + 1e6).abs().max() == 100
    other = RunningWhitening(4, clip=100.0, floor=0.01)
    other.load_state_dict(norm.state_dict())
    assert torch.equal(other(vectors), white)


def test_a_constant_observation_is_not_normalised_to_nan():
    for rows in (300, 77, 1001):
        norm = RunningNorm(1)
        for number in range(3):
            norm.learn(torch.full((rows, 1), 0.1), number)
            norm.settle(number + 1)
        assert torch.isfinite(norm(torch.tensor([[0.1], [0.2]]))).all()


def test_probabilities_and_values_are_computed_in_float32_under_autocast():
    policy = network(*SPACES["box"])
    seen = [BOX.sample() for _ in range(5)]
    with torch.autocast("cpu", torch.bfloat16):
        decisions = policy.act(seen, [()] * 5, keys(5), policy.sampling)
        batch = batch_of(decisions)
        evaluation, values = policy.evaluate(batch), sampled_values(policy, batch)
        behind = policy.state_values(seen, [()] * 5)
    exact = policy.evaluate(batch)
    assert not torch.equal(exact.values, exact.values.bfloat16().float())
    for told in (evaluation.values, values, behind[:, None]):
        torch.testing.assert_close(told, exact.values, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(evaluation.logprobs, exact.logprobs, atol=1e-6, rtol=1e-6)


def test_values_of_many_turns_equal_those_of_single_turns(monkeypatch):
    policy = network(*SPACES["box"])
    batch = batch_of(policy.act([BOX.sample() for _ in range(50)], [()] * 50, keys(50), policy.sampling))
    monkeypatch.setattr(value_fit, "_CHUNK", 8)
    torch.testing.assert_close(value_fit.values_of(policy, batch), policy.evaluate(batch).values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16-true", "16-true"])
@torch.no_grad()
def test_sampled_and_demonstrated_actions_are_not_rounded_to_sixteen_bits(dtype):
    policy = network(*SPACES["box"], initial_log_std=-0.3).to(dtype)
    seen = [BOX.sample() for _ in range(50)]
    decisions = policy.act(seen, [()] * 50, keys(50), policy.sampling)
    off = (policy.evaluate(batch_of(decisions)).logprobs - decisions.logprobs).abs().max()
    assert off < 1e-5, f"{float(off):.1e} nats"
    told = policy.encode_turns([NativeTurn(seen[0], np.float32([0.7, 1.999]))])["clipped_action"]
    assert torch.equal(told, torch.tensor([[0.7, 1.999]])), told


@torch.no_grad()
def test_the_reference_is_converted_with_the_policy():
    policy = network(*SPACES["box"])
    policy.build_reference(warm_started=False)
    policy.to(torch.bfloat16)
    batch = batch_of(policy.act([BOX.sample() for _ in range(20)], [()] * 20, keys(20), policy.sampling))
    assert torch.equal(policy.reference_logprobs(batch), policy.evaluate(batch).logprobs)


def test_updates_do_not_change_the_reference():
    policy = network(*SPACES["discrete"])
    policy.build_reference(warm_started=False)
    decisions = policy.act([BOX.sample() for _ in range(10)], [()] * 10, keys(10), policy.sampling)
    with torch.no_grad():
        policy.actor[-1].weight.add_(1.0)
    torch.testing.assert_close(policy.reference_logprobs(batch_of(decisions)), decisions.logprobs)
    assert not any(name.startswith("_reference") for name, _ in policy.named_parameters())


def test_weights_are_orthogonal_and_biases_zero():
    layers = mlp((16, 8, 8, 1), "tanh", output_gain=0.01)
    assert [type(layer).__name__ for layer in layers] == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
    for layer, gain in ((layers[2], 5 / 3), (layers[4], 0.01)):
        product = layer.weight @ layer.weight.T
        torch.testing.assert_close(product, gain**2 * torch.eye(len(product)), atol=1e-5, rtol=1e-5)
        assert not layer.bias.any()


def test_the_seed_determines_the_initial_weights():
    first, same, other = (network(*SPACES["discrete"], init_seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.actor[0].weight, same.actor[0].weight)
    assert not torch.equal(first.actor[0].weight, other.actor[0].weight)


@pytest.mark.parametrize(
    ("spaces_", "complaint"),
    [
        ((BOX, spaces.MultiDiscrete([2, 2])), "they must be Discrete or a Box"),
        ((spaces.Text(5), spaces.Discrete(2)), "they must be numeric"),
        ((spaces.Dict(a=BOX, b=spaces.Sequence(BOX)), spaces.Discrete(2)), "they must be numeric"),
    ],
)
def test_unsupported_spaces_raise(spaces_, complaint):
    with pytest.raises(ValueError, match=complaint):
        network(*spaces_)


def test_settings_out_of_range_raise_with_their_key():
    with pytest.raises(ValueError, match=r"policy.hidden_sizes is \[\]"):
        MLPPolicy(hidden_sizes=())
    with pytest.raises(ValueError, match="policy.activation is 'swish'; it must be one of relu, tanh, gelu, silu"):
        MLPPolicy(activation="swish")


def test_a_network_can_be_evaluated_like_any_policy():
    envs = GymnasiumEnvs("CartPole-v1")
    policy = network(*envs.spaces)
    results = [evaluate_policy(policy, envs, 6, 100, count, SamplingConfig(temperature=0)) for count in (1, 4)]
    assert results[0].returns.tolist() == results[1].returns.tolist()
    native = gym.make("CartPole-v1")
    observation, _ = native.reset(seed=100)
    total, ended = 0.0, False
    while not ended:
        action = int(policy(policy.norm(torch.as_tensor(observation)[None])).argmax())
        observation, reward, terminated, truncated, _ = native.step(action)
        total, ended = total + reward, terminated or truncated
    assert results[0].returns[0] == total


def test_networks_of_another_size_raise():
    policy = network(spaces.Box(-1, 1, (4,)), spaces.Discrete(2))
    policy.connect_spaces(spaces.Box(-2, 2, (4,)), spaces.Discrete(2))
    told = "made for 4 numbers and Discrete actions of size 2; the environment has 6 numbers and Discrete .* size 3"
    with pytest.raises(ValueError, match=told):
        policy.connect_spaces(spaces.Box(-1, 1, (6,)), spaces.Discrete(3))
    with pytest.raises(ValueError, match="the environment has 4 numbers and Box actions of size"):
        policy.connect_spaces(spaces.Box(-1, 1, (4,)), spaces.Box(-1, 1, (2,)))
