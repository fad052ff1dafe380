"""Tests of TRPO on a network, a head on a trunk, a scoring and a writing language model."""

import math
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_runs import from_settings, make_trainer, merged, rollout_data, save_tiny_model, text_policy
from torch.nn.attention import SDPBackend, sdpa_kernel

from lrl.algorithms import trpo
from lrl.algorithms.trpo import NaturalGradientConfig, TRPOModule
from lrl.chat.generator import ServedGenerator
from lrl.codecs.numbers import NumberFormat
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.envs.factory import GymnasiumEnvs
from lrl.functional.distributions import Categorical
from lrl.functional.trust_region import flatten, line_search
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.heads import ValueHeadConfig
from lrl.policies.head import HeadPolicy, ObservationCriticConfig
from lrl.policies.mlp import MLPPolicy
from lrl.policies.scoring import ScoringPolicy
from lrl.prompts import PromptTemplate
from lrl.training.checkpoint import CollectionCheckpoint
from lrl.training.collect import CollectionPlan, EpisodeCollector
from lrl.training.gradient_module import values_of
from lrl.training.value_fit import ValueFit, fit_values

LAKE = GymnasiumEnvs("FrozenLake-v1", max_episode_steps=8)
PENDULUM = GymnasiumEnvs("Pendulum-v1", max_episode_steps=6)
CARTPOLE = GymnasiumEnvs(  # numbers from 0 to 3, mostly: the tokenizer knows no others
    "CartPole-v1", max_episode_steps=8, numbers=NumberFormat(kind="integers", ranges=[(-0.05, 33.25)])
)
KINDS = ["mlp", "gaussian", "head", "text", "scoring"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def policy_of(kind, folder, dtype="float64", **model):
    """Return a connected policy whose critic has separate weights, and its environment."""
    env = {"gaussian": PENDULUM, "head": CARTPOLE}.get(kind, LAKE)
    language_model = LanguageModelConfig(name=folder, dtype=dtype, **model)
    critic = ValueHeadConfig(hidden_sizes=(4,), init_seed=0)
    if kind in ("mlp", "gaussian"):
        policy = MLPPolicy((4,), activation="tanh", init_seed=0)
    elif kind == "head":
        policy = HeadPolicy(language_model, (4,), critic=ObservationCriticConfig(hidden_sizes=(4,)), init_seed=0)
    elif kind == "text":
        policy = text_policy(folder, value_head=critic, dtype=dtype, **model)
    else:
        policy = ScoringPolicy(language_model, PromptTemplate(response_format="direct", system=""), value_head=critic)
    policy.connect(env.codec)
    if policy.response_format is None:
        policy.connect_spaces(*env.spaces)
    policy.configure()
    return policy.to(torch.float64) if dtype == "float64" else policy, env


def batch_of(module, env, groups=6):
    envs = env.make(groups, module.policy.response_format)
    plan = CollectionPlan(seed=0, collection=0, num_groups=groups, group_size=1)
    rollout = EpisodeCollector(module.policy, envs).collect(plan)
    envs.close()
    return module.prepare(rollout)


def prepared(kind, folder, **settings):
    """Return a module and one collection with advantages; only the initial weights of the policy are random."""
    model = settings.pop("model", {})
    policy, env = policy_of(kind, folder, **model)
    module = from_settings(TRPOModule, policy, **settings)
    return module, batch_of(module, env)


def of_torch(distribution):
    """Return a copy of a distribution of lrl as one of torch, without shared memory."""
    if isinstance(distribution, Categorical):
        return torch.distributions.Categorical(logits=distribution.coordinates.detach().clone())
    means, log_std = distribution.coordinates.detach().clone().chunk(2, -1)
    return torch.distributions.Independent(torch.distributions.Normal(means, log_std.exp()), 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_recorded_divergence_is_that_of_copied_distributions(folder, kind):
    module, batch = prepared(kind, folder, natural_gradient={"damping": 0.0}, max_kl=0.01)
    before = of_torch(module.policy.evaluate(batch).distribution)
    module._improve(batch)
    after = of_torch(module.policy.evaluate(batch).distribution)
    per_turn = (torch.distributions.kl_divergence(before, after) * batch.response_mask).sum() / len(batch)
    figures = module.flush()
    assert figures["train/step_accepted"] == 1
    assert figures["train/kl"] == pytest.approx(float(per_turn), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_update_stays_in_the_region_and_improves_the_surrogate(folder, kind):
    module, batch = prepared(kind, folder)
    parts, turns = batch.split(module.chunk_size), float(len(batch))
    _, gradient, old = module._surrogate_and_gradient(parts, module.actor_parameters(), turns)
    start = [weight.detach().clone() for weight in module.actor_parameters()]
    before, none = module._surrogate_and_kl(parts, old, turns)
    critic = [weight.detach().clone() for weight in module.policy.critic_parameters()]
    module.flush()
    module._improve(batch)
    after, kl = module._surrogate_and_kl(parts, old, turns)
    figures = module.flush()
    assert abs(none) < 1e-9 and 0.001 < kl <= 0.01 and figures["train/step_accepted"] == 1
    assert after > before and figures["train/kl"] == pytest.approx(kl)
    assert figures["train/improvement"] == pytest.approx(after - before)
    moved = torch.cat(
        [(new - old).detach().flatten() for new, old in zip(module.actor_parameters(), start, strict=True)]
    )
    assert figures["train/expected_improvement"] == pytest.approx(float(gradient @ moved), rel=1e-2)
    assert figures["train/ratio_error"] < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(critic, module.policy.critic_parameters()))


def test_the_surrogate_and_the_divergence_equal_their_formulas(folder):
    """Turns of one or two tokens: sums over a turn's tokens, means over turns, by plain loops over the vocabulary."""
    module, batch = prepared("text", folder, ent_coef=0.3)
    evaluation = module.policy.evaluate(batch)
    old = [evaluation.distribution.detach()]
    with torch.no_grad():
        for weight in module.actor_parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight))
    found = module._surrogate_and_kl([batch], old, float(len(batch)))
    with torch.no_grad():
        new = module.policy.evaluate(batch)
    surrogate = kl = 0.0
    for turn in range(len(batch)):
        for token in range(int(batch.response_mask[turn].sum())):
            ratio = math.exp(float(new.logprobs[turn, token] - batch.old_logprobs[turn, token]))
            p = torch.softmax(old[0].coordinates[turn, token], 0)
            q = torch.softmax(new.distribution.coordinates[turn, token], 0)
            surrogate += ratio * float(batch.advantages[turn, token]) + 0.3 * float(-(q * q.log()).sum())
            kl += float((p * (p / q).log()).sum())
    lengths = batch.response_mask.sum(1)
    assert len(set(lengths.tolist())) == 2
    assert found == pytest.approx((surrogate / len(batch), kl / len(batch)), rel=1e-6) and kl > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_of_the_fisher_product_agree_and_chunks_change_nothing(folder, kind):
    products = []
    for settings in ({}, {"natural_gradient": {"product": "double_backward"}}, {"chunk_size": 5}):
        module, batch = prepared(kind, folder, **settings)
        parameters = module.actor_parameters()
        size = sum(parameter.numel() for parameter in parameters)
        vector = torch.randn(size, generator=torch.Generator().manual_seed(3)).double()
        with sdpa_kernel(SDPBackend.MATH):
            _, gradient, _ = module._surrogate_and_gradient(
                batch.split(module.chunk_size), parameters, float(len(batch))
            )
            products.append(torch.stack([module._fisher_product(batch, parameters)(vector), gradient]))
    for other in products[1:]:
        torch.testing.assert_close(other, products[0], rtol=1e-4, atol=1e-6)  # some layers compute in float32
    assert float(vector @ (products[0][0] - 0.1 * vector)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "head"])
def test_the_fisher_product_is_that_of_the_explicit_matrix_on_an_adapter(folder, kind):
    """Fisher matrix of the weights of adapters and head: E[score score^T] over all choices at the sampled positions."""
    lora = LoRAConfig(r=1, alpha=2, target_modules=["q_proj"])
    module, batch = prepared(kind, folder, natural_gradient={"damping": 0.0}, model={"lora": lora})
    batch = batch[torch.arange(2)]
    with torch.no_grad():
        for name, weight in module.policy.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.1)
    parameters = module.actor_parameters()
    with sdpa_kernel(SDPBackend.MATH):
        distribution, explicit = module.policy.evaluate(batch).distribution, 0.0
        logprobs = torch.log_softmax(distribution.coordinates, -1)
        for turn, token in batch.response_mask.nonzero().tolist():
            for choice in logprobs[turn, token]:
                score = flatten(
                    torch.autograd.grad(choice, parameters, retain_graph=True, allow_unused=True), parameters
                )
                explicit = explicit + choice.detach().exp() * torch.outer(score, score) / len(batch)
        product = module._fisher_product(batch, parameters)
        vector = torch.randn(len(explicit), generator=torch.Generator().manual_seed(0)).double()
        torch.testing.assert_close(product(vector), explicit @ vector, rtol=1e-4, atol=1e-6)
    names = [name for name, weight in module.policy.named_parameters() if any(weight is p for p in parameters)]
    assert all("lora" in name or name.startswith("layers.") for name in names) and any("lora" in n for n in names)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rejected_step_leaves_the_weights_bit_identical(folder, kind, monkeypatch):
    monkeypatch.setattr("lrl.algorithms.trpo.line_search", partial(line_search, accept_ratio=1e6))
    module, batch = prepared(kind, folder)
    before = {name: weight.detach().clone() for name, weight in module.policy.named_parameters()}
    module._improve(batch)
    assert module.flush()["train/step_accepted"] == 0
    assert all(torch.equal(weight, before[name]) for name, weight in module.policy.named_parameters())


def test_advantages_of_zero_change_no_weights(folder):
    module, batch = prepared("text", folder)
    batch = batch.replace(advantages=torch.zeros_like(batch.advantages))
    before = [weight.detach().clone() for weight in module.actor_parameters()]
    module._improve(batch)
    figures = module.flush()
    assert figures["train/step_accepted"] == 0 and all(math.isfinite(value) for value in figures.values())
    assert all(torch.equal(a, b) for a, b in zip(before, module.actor_parameters()))


@pytest.mark.parametrize("kind", ["text", "scoring", "head", "mlp"])
def test_the_critic_view_gives_the_values_of_an_evaluation(folder, kind):
    module, batch = prepared(kind, folder)
    index = torch.tensor([2, 0, 3])
    values = module.policy.critic_view(batch)(index)
    mask = batch.response_mask[index]
    torch.testing.assert_close(values[mask], module.policy.evaluate(batch[index]).values[mask], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "mlp"])
def test_the_critic_is_fitted_to_the_least_squares_solution(folder, kind):
    """At the optimum of the bias of the last, linear layer the mean residual is 0."""
    module, batch = prepared(kind, folder)
    actor = [weight.detach().clone() for weight in module.actor_parameters()]
    before = ((batch.old_values - batch.returns).square() * batch.response_mask).sum() / batch.response_mask.sum() / 2
    after = fit_values(module, batch, ValueFit(l2=0.0, iterations=100))
    assert after < 0.9 * before
    values, mask = module.policy.critic_view(batch)(torch.arange(len(batch))), batch.response_mask
    assert abs(float((values - batch.returns)[mask].mean().detach())) < 5e-3
    assert all(torch.equal(a, b) for a, b in zip(actor, module.actor_parameters()))
    heavy = fit_values(module, batch, ValueFit(l2=10.0, iterations=100))
    assert heavy > after and sum(float(w.detach().abs().sum()) for w in module.policy.critic_parameters()) < 0.2


def test_decay_is_part_of_what_the_critic_minimises(folder):
    module, batch = prepared("mlp", folder)
    fit_values(module, batch, ValueFit(l2=0.05, iterations=300))
    weights, values = module.policy.critic_parameters(), module.policy.critic_view(batch)(torch.arange(len(batch)))
    error = (values - batch.returns).square()[batch.response_mask].mean()
    total = error + 0.05 * sum(weight.square().sum() for weight in weights)
    assert all(slope.abs().max() < 1e-4 for slope in torch.autograd.grad(total, weights))
    assert max(float(slope.abs().max()) for slope in torch.autograd.grad(
        (module.policy.critic_view(batch)(torch.arange(len(batch))) - batch.returns).square().mean(), weights
    )) > 1e-3  # fmt: skip


def test_the_fisher_matrix_is_estimated_from_the_given_share_of_turns(folder, monkeypatch):
    module, batch = prepared("mlp", folder)
    seen, make = [], module._product
    monkeypatch.setattr(module, "_product", lambda part, parameters: seen.append(len(part)) or make(part, parameters))
    for share in (1.0, 0.3):
        module.natural_gradient = NaturalGradientConfig(fisher_fraction=share)
        module._fisher_product(batch, module.actor_parameters())
    assert seen == [len(batch), math.ceil(0.3 * len(batch))]


@pytest.mark.parametrize("kind", ["head", "mlp"])
def test_the_critic_is_fitted_under_autocast(folder, kind):
    """Autocast would otherwise use the copy of the weights that it cached before the fit."""
    policy, env = policy_of(kind, folder)
    policy.float()
    module = TRPOModule(policy)
    batch = batch_of(module, env)
    with torch.autocast("cpu", torch.bfloat16):
        before = ((values_of(policy, batch) - batch.returns).square() * batch.response_mask).sum()
        after = fit_values(module, batch, ValueFit(l2=0.0, iterations=100)) * 2 * batch.response_mask.sum()
        again = ((values_of(policy, batch) - batch.returns).square() * batch.response_mask).sum()
    assert after < 0.9 * before
    torch.testing.assert_close(again, after, rtol=2e-2, atol=1e-4)


def chain_data(**changes):
    """Return FrozenLake without slipping on two rows of two cells; the optimal actions are right, then down."""
    lake = GymnasiumEnvs("FrozenLake-v1", {"desc": ["SF", "HG"], "is_slippery": False}, max_episode_steps=6)
    sizes = {"num_envs": 8, "num_steps": 16, "validation": {"episodes": 8, "num_envs": 8}}
    return from_settings(RolloutDataModule, lake, **merged(sizes, changes))


def run(module, data, root, epochs=40, **changes):
    trainer = make_trainer(root, max_epochs=epochs, limit_val_batches=1, check_val_every_n_epoch=epochs, **changes)
    trainer.fit(module, datamodule=data)
    return trainer.logger.rows


FITS = {"lbfgs": ValueFit(), "adam": ValueFit(method="adam", lr=1e-2, num_epochs=4, num_minibatches=4)}


@pytest.mark.learning
@pytest.mark.parametrize("method", FITS)
def test_a_network_solves_a_lake_of_four_cells_inside_the_region(tmp_path, method):
    module = TRPOModule(MLPPolicy((16,), init_seed=0), max_kl=0.02, value_fit=FITS[method])
    rows = run(module, chain_data(), tmp_path)
    steps = [row for _, row in rows if "train/kl" in row]
    assert len(steps) == 40 and all(0 <= row["train/kl"] <= 0.02 for row in steps)
    assert sum(row["train/step_accepted"] for row in steps) > 20
    assert max(row["train/ratio_error"] for row in steps) < 1e-5
    assert [row["val/return"] for _, row in rows if "val/return" in row] == [1]


@pytest.mark.learning
def test_with_a_flipped_sign_the_network_does_not_learn(tmp_path):
    class Flipped(TRPOModule):
        def loss(self, batch, policy):
            tokens = super().loss(batch, policy)
            return replace(tokens, loss=-tokens.loss)

    module = Flipped(MLPPolicy((16,), init_seed=0), max_kl=0.02)
    rows = run(module, chain_data(), tmp_path, epochs=10)
    assert [row["val/return"] for _, row in rows if "val/return" in row] == [0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "head", "scoring"])
def test_a_language_model_runs_in_lightning_and_stays_in_the_region(folder, tmp_path, kind):
    policy = {
        "text": lambda: text_policy(folder, value_head=ValueHeadConfig(hidden_sizes=(4,), init_seed=0)),
        "head": lambda: HeadPolicy(LanguageModelConfig(name=folder), (8,), init_seed=0),
        "scoring": lambda: policy_of("scoring", folder, "float32")[0],
    }[kind]()
    data = chain_data() if kind != "head" else RolloutDataModule(CARTPOLE, num_envs=8, num_steps=16)
    rows = run(
        TRPOModule(policy, natural_gradient=NaturalGradientConfig(fisher_fraction=0.5), chunk_size=50),
        data,
        tmp_path,
        epochs=4,
    )
    steps = [row for _, row in rows if "train/kl" in row]
    assert len(steps) == 4 and all(0 < row["train/kl"] <= 0.01 for row in steps if row["train/step_accepted"])
    assert sum(row["train/step_accepted"] for row in steps) >= 2
    assert all(row["train/ratio_error"] < 1e-4 for row in steps)


@pytest.mark.parametrize(
    ("setting", "value", "needed"), [("gradient_clip_val", 0.5, "null"), ("accumulate_grad_batches", 2, "1")]
)
def test_settings_of_automatic_optimisation_raise(tmp_path, setting, value, needed):
    data = RolloutDataModule(GymnasiumEnvs("CartPole-v1", max_episode_steps=9), num_envs=4, num_steps=6)
    trainer = make_trainer(tmp_path, max_epochs=1, **{setting: value})
    with pytest.raises(ValueError, match=f"^trainer.{setting} is {value}; it must be {needed}, because TRPOModule"):
        trainer.fit(TRPOModule(MLPPolicy((8,))), datamodule=data)


@pytest.mark.slow
@pytest.mark.parametrize("method", FITS)
@pytest.mark.parametrize("kind", ["network", "text"])
def test_a_run_that_is_resumed_ends_bit_identical(folder, tmp_path, kind, method):
    def fit(name, epochs, **given):
        network = MLPPolicy((8,), normalise_observations=True, init_seed=0)
        writer = text_policy(folder, value_head=ValueHeadConfig(hidden_sizes=(4,), init_seed=0))
        module = TRPOModule(
            network if kind == "network" else writer,
            natural_gradient=NaturalGradientConfig(fisher_fraction=0.5),
            value_fit=FITS[method],
        )
        env = GymnasiumEnvs("CartPole-v1", max_episode_steps=9)
        data = RolloutDataModule(env, num_envs=4, num_steps=6) if kind == "network" else chain_data()
        trainer = make_trainer(tmp_path / name, CollectionCheckpoint(1), max_epochs=epochs)
        trainer.fit(module, datamodule=data, **given)
        return trainer

    whole, _ = fit("whole", 4), fit("stopped", 2)
    saved = tmp_path / "stopped" / "checkpoints" / "last.ckpt"
    resumed = fit("stopped", 4, ckpt_path=saved, weights_only=True)
    ours, theirs = (trainer.lightning_module.state_dict() for trainer in (resumed, whole))
    assert sorted(ours) == sorted(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert resumed.logger.rows == whole.logger.rows[-len(resumed.logger.rows) :] and len(resumed.logger.rows) == 2
    assert len(resumed.optimizers) == (method == "adam")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["line search", "critic"])
@pytest.mark.parametrize("method", FITS)
def test_a_job_that_is_requeued_while_weights_move_resumes_bit_identical(tmp_path, monkeypatch, method, moment):
    """Slurm's signal writes a checkpoint at any time; here it arrives in the update of the second collection."""
    path = tmp_path / "requeue.ckpt"

    def fit(name, **given):
        network = MLPPolicy((8,), normalise_observations=True, init_seed=0)
        data = RolloutDataModule(GymnasiumEnvs("CartPole-v1", max_episode_steps=9), num_envs=4, num_steps=6)
        trainer = make_trainer(tmp_path / name, max_epochs=4, enable_checkpointing=False)
        signal.signal(signal.SIGUSR1, lambda *_: trainer.save_checkpoint(path))
        trainer.fit(TRPOModule(network, max_kl=0.1, value_fit=FITS[method]), datamodule=data, **given)
        return trainer

    evaluate, fit_values, sent = TRPOModule._surrogate_and_kl, trpo.fit_values, []

    def hit(module, at):
        if (module.current_epoch, at) == (1, moment) and not sent:
            sent.append(at)
            signal.raise_signal(signal.SIGUSR1)
            assert not path.exists()

    def search(self, *given):
        hit(self, "line search")
        return evaluate(self, *given)

    def fitted(module, *given):
        hit(module, "critic")
        return fit_values(module, *given)

    monkeypatch.setattr(TRPOModule, "_surrogate_and_kl", search)
    monkeypatch.setattr(trpo, "fit_values", fitted)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        whole = fit("whole")
        assert sent and path.exists()
        resumed = fit("resumed", ckpt_path=path, weights_only=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
    ours, theirs = (trainer.lightning_module.state_dict() for trainer in (resumed, whole))
    assert sorted(ours) == sorted(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert resumed.logger.rows == whole.logger.rows[-len(resumed.logger.rows) :] and len(resumed.logger.rows) == 3


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"policy": MLPPolicy(critic=False)}, "model.policy is a MLPPolicy without critic; TRPOModule needs one"),
        ({"credit": {"kind": "episode"}}, "model.credit.kind is 'episode'"),
        ({"max_kl": 0.0}, "model.max_kl is 0.0; it must be positive"),
        ({"natural_gradient": {"damping": -0.1}}, "model.natural_gradient.damping is -0.1"),
        ({"natural_gradient": {"cg_iterations": 0}}, "model.natural_gradient.cg_iterations is 0"),
        (
            {"natural_gradient": {"fisher_fraction": 0.0}},
            "model.natural_gradient.fisher_fraction is 0.0; it must be in (0, 1]",
        ),
        (
            {"natural_gradient": {"product": "exact"}},
            "model.natural_gradient.product is 'exact'; it must be one of gauss_newton",
        ),
        ({"chunk_size": 0}, "model.chunk_size is 0"),
        ({"ent_coef": -0.1}, "model.ent_coef is -0.1; it must be 0 or positive"),
        ({"schedule": "lineer"}, "model.schedule is 'lineer'; it must be one of constant, linear, cosine"),
    ],
)
def test_inconsistent_settings_raise_their_name(settings, complaint):
    with pytest.raises(ValueError) as error:
        from_settings(TRPOModule, **{"policy": MLPPolicy()} | settings)
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"method": "sgd"}, "ValueFit.method is 'sgd'"),
        ({"l2": -1.0}, "ValueFit.l2 is -1.0"),
        ({"method": "adam", "lr": 0.0}, "ValueFit.lr is 0.0; it must be positive"),
        ({"method": "adam", "num_epochs": 0}, "ValueFit.num_epochs is 0; it must be at least 1"),
        ({"iterations": 0}, "ValueFit.iterations is 0"),
    ],
)
def test_invalid_settings_of_a_fit_raise_their_name(changes, complaint):
    with pytest.raises(ValueError) as error:
        ValueFit(**changes)
    assert complaint in str(error.value)


def test_runs_that_do_not_support_a_trust_region_raise(folder, tmp_path):
    mlp = lambda **changes: TRPOModule(MLPPolicy((4,), init_seed=0, **changes))  # noqa: E731
    text = lambda **changes: TRPOModule(text_policy(folder, value_head=ValueHeadConfig(), **changes))  # noqa: E731
    for module, data, settings, complaint in (
        (mlp(), {"num_minibatches": 2}, {}, "data.num_minibatches is 2; it must be 1, because TRPO makes one update"),
        (mlp(), {"num_epochs": 3}, {}, "data.num_epochs is 3; it must be 1, because TRPO makes one update"),
        (mlp(), {}, {"precision": "bf16-mixed"}, "trainer.precision is bf16-mixed"),
        (
            text(attention="flash_attention_2"),
            {},
            {},
            "attention is flash_attention_2, which does not support second derivatives",
        ),
        (text(liger_kernels=True), {}, {}, "liger_kernels is True, which does not support second derivatives"),
    ):
        with pytest.raises(ValueError, match=complaint):
            run(module, chain_data(**data), tmp_path, epochs=1, **settings)
    shrinking, endless = (TRPOModule(MLPPolicy((4,), init_seed=0), schedule="linear"), chain_data())
    with pytest.raises(ValueError, match="model.schedule is 'linear'; it needs trainer.max_epochs"):
        make_trainer(tmp_path, max_epochs=-1).fit(shrinking, datamodule=endless)
    assert endless.clocks["env_steps"] == 0
    make_trainer(tmp_path, max_epochs=9).fit(shrinking, datamodule=chain_data(max_env_steps=256))
    assert shrinking.current_epoch == 2 and shrinking.radius == 0
    assert rollout_data("continuing").num_minibatches == 2


def test_weights_in_16_bits_raise(folder, tmp_path):
    policy = text_policy(folder, value_head=ValueHeadConfig(), dtype="bfloat16")
    with pytest.raises(
        ValueError, match="language_model.dtype is bfloat16; it must be float32 if the model's weights are trained"
    ):
        run(TRPOModule(policy), chain_data(), tmp_path, epochs=1)


def test_importance_weights_raise(folder, tmp_path):
    head, server = ValueHeadConfig(), {"generator": ServedGenerator("http://localhost:1", str(tmp_path))}
    policy = text_policy(folder, value_head=head, recompute_logprobs=True, **server)
    with pytest.raises(ValueError, match="generator.importance_cap is 3 .* TRPO supports no importance weights"):
        run(TRPOModule(policy), chain_data(), tmp_path, epochs=1)


def test_a_critic_with_an_adapter_raises(folder, tmp_path):
    head = ValueHeadConfig(adapter=True)
    policy = text_policy(folder, value_head=head, lora=LoRAConfig(r=2))
    with pytest.raises(ValueError, match="value_head.adapter is true; it must be false, TRPO fits the critic"):
        run(TRPOModule(policy), chain_data(), tmp_path, epochs=1)


def test_optimiser_steps_do_not_end_a_run_that_counts_collections(tmp_path):
    with pytest.raises(ValueError, match="trainer.max_steps is 2, but TRPO counts collections"):
        run(TRPOModule(MLPPolicy((4,))), chain_data(), tmp_path, epochs=3, max_steps=2)


def test_settings_of_the_other_fit_method_raise_their_name():
    for changes, complaint in (
        ({"lr": 1e-2}, "ValueFit.lr is 0.01; it must be left out, lbfgs does not read it"),
        ({"method": "adam", "iterations": 5}, "ValueFit.iterations is 5; it must be left out, adam does not read it"),
    ):
        with pytest.raises(ValueError, match=complaint):
            ValueFit(**changes)
    assert ValueFit().iterations == 25 and ValueFit(method="adam").num_epochs == 10


def test_the_sampled_distribution_is_stored_once():
    logits = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    constant = Categorical(logits).detach()
    assert constant.all_logprobs is constant.coordinates
    torch.testing.assert_close(constant.kl(Categorical(logits)), torch.zeros(3, 2), atol=1e-6, rtol=0)


@pytest.mark.slow
def test_the_region_may_shrink_over_the_run(tmp_path):
    module = TRPOModule(MLPPolicy((16,), init_seed=0), max_kl=0.02, schedule="linear")
    steps = [row["train/kl"] for _, row in run(module, chain_data(), tmp_path, epochs=10) if "train/kl" in row]
    assert all(kl <= 0.02 * (1 - index / 10) + 1e-9 for index, kl in enumerate(steps)) and len(steps) == 10
    assert sum(kl > 0 for kl in steps) > 5
