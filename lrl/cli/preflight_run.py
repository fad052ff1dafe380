"""The run behind ``lrl preflight``: the objects of ``lrl fit``, one small collection, one update, and their checks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import monotonic, process_time
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lrl.cli.main import LRLCLI
from lrl.cli.quiet import silence_libraries
from lrl.cli.trainer_settings import check_settings
from lrl.data.rollout_buffer import RolloutDataModule
from lrl.diagnosis import detectors
from lrl.diagnosis import preflight as checks
from lrl.diagnosis.environments import new_episodes, start_states
from lrl.diagnosis.episodes import success_and_return
from lrl.diagnosis.preflight import Played, Update
from lrl.diagnosis.sample import Finding, Sample
from lrl.envs.factory import EnvFactory
from lrl.envs.prompt_env import PromptEnvs
from lrl.envs.text import text_of
from lrl.policies.actor import Actor
from lrl.policies.baselines import RandomActor, baseline_actors
from lrl.policies.text import TextPolicy
from lrl.rollouts.runner import EnvRunner, observation_key
from lrl.training.gradient_module import GradientModule
from lrl.training.recomputed import compared_gradients, evaluated
from lrl.training.replay import Replay
from lrl.training.samples import demonstrated_sample, sample_of
from lrl.types import History, RandomKeys, Rollout, TurnBatch

_ENVS, _TURNS = 16, 64
"""Maximum number of environments, and of turns of each, in the collection."""
_UPDATED = 512
"""Maximum number of turns on which the update is measured."""


def run(args: Sequence[str], folder: str) -> list[Finding]:
    """Run all checks, print one line for each, and return what they found.

    Args:
        args: options of ``lrl fit``.
        folder: temporary folder for files of libraries.
    """
    silence_libraries()  # again, because importing Lightning sets the level of its messages
    preflight = Preflight()
    with suppress(Finished):
        PreflightCLI(args, preflight, folder)
    preflight.report.finish()
    return preflight.report.findings


_EPISODES, _HORIZON, _SECONDS = 32, 200, 2.0
"""Number of episodes of an actor without weights, their maximum number of turns, and seconds of processor time after
which all of them are cut."""
_PROMPTS = 256
"""Maximum number of prompts that are encoded again."""


class Report:
    """Prints one line per check."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        """The findings so far, one per cause."""
        self._started = monotonic()

    def add(self, name: str, measured: str, findings: Iterable[Finding]) -> None:
        """Print a check, and its findings, each cause once.

        Args:
            name: name of the check.
            measured: what it measured.
            findings: what it found.
        """
        known, found = {finding.cause for finding in self.findings}, list(findings)
        if not found:
            print(f"ok       {name:<13} {measured}")
        for finding in found:
            details = f"{finding.evidence}; {finding.remedy}" if finding.cause not in known else "see above"
            print(f"{finding.severity:<8} {name:<13} {finding.cause}: {details}")
        self.findings += [finding for finding in found if finding.cause not in known]

    def finish(self) -> None:
        """Print the number of findings."""
        seconds = monotonic() - self._started
        counts = Counter(finding.severity for finding in self.findings)
        print(f"errors: {counts['error']}, warnings: {counts['warning']}, in {seconds:.0f} seconds")


class Finished(Exception):  # noqa: N818 (not an error)
    """Ends the training loop after the one update."""


class PreflightCLI(LRLCLI):
    """The command line of ``lrl fit`` for one small collection, without loggers, callbacks and run directory.

    Args:
        args: options of ``lrl fit``.
        preflight: callback that checks.
        folder: temporary folder for files of libraries.
    """

    def __init__(self, args: Sequence[str], preflight: Preflight, folder: str) -> None:
        self._preflight, self._folder = preflight, folder
        super().__init__(["fit", *args])

    def before_instantiate_classes(self) -> None:
        """Reduce the configuration to one collection, or some batches of demonstrations.

        Raises:
            ValueError: If a checkpoint is given.
        """
        config = self.config["fit"]
        if config.get("ckpt_path"):
            raise ValueError(f"ckpt_path is {config.ckpt_path!r}; it must be null, because preflight checks new runs.")
        self.save_config_callback = None
        check_settings(config.trainer, "fit")
        config.trainer.callbacks, config.trainer.logger, config.trainer.profiler = [], False, None
        config.trainer.enable_checkpointing, config.trainer.limit_val_batches = False, 0
        config.trainer.strategy, config.trainer.devices, config.trainer.num_nodes = "auto", 1, 1
        config.trainer.accumulate_grad_batches, config.trainer.default_root_dir = 1, self._folder
        reduce_data(config.data.init_args)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Return the trainer with the callback that checks."""
        trainer: Any = super().instantiate_trainer(**kwargs)
        trainer.callbacks.append(self._preflight)
        return trainer

    def after_instantiate_classes(self) -> None:
        """Check that the algorithm trains a policy by gradients.

        Raises:
            ValueError: If it does not.
        """
        if not isinstance(self.model, GradientModule):
            raise ValueError(
                f"model is a {type(self.model).__name__}; it must train a policy by gradients, as GRPOModule, "
                "PPOValueHeadModule, REINFORCEPlusPlusModule, TRPOModule and SFTModule do."
            )

    def report(self) -> None:
        """Do nothing, because there is no run directory."""

    def after_fit(self) -> None:
        """Do nothing, because there is no checkpoint."""


def reduce_data(settings: Any) -> None:
    """Reduce a data module to a collection of at most :data:`_ENVS` environments, and to two passes over it.

    Args:
        settings: its arguments, changed in place.
    """
    if "num_minibatches" not in settings:
        return
    size = settings.group_size or 1
    if settings.num_groups is not None:
        settings.num_groups = min(settings.num_groups, max(2, _ENVS // size))
    if settings.num_envs is not None:
        settings.num_envs = min(settings.num_envs, _ENVS)
    if settings.num_steps is not None:
        settings.num_steps = min(settings.num_steps, _TURNS)
    else:
        settings.max_turns = min(settings.max_turns or _TURNS, _TURNS)
    settings.num_epochs, settings.num_minibatches = min(settings.num_epochs, 2), 1


class Preflight(L.Callback):
    """Checks the environment at the start, then the first collection or batch, and the first update."""

    def __init__(self) -> None:
        self.report = Report()
        self._weights: dict[str, Tensor] = {}
        self._before: dict[str, Any] = {}
        self._without_gradient: list[str] = []
        self._gradient: dict[str, Any] = {}
        self._update: dict[str, Any] = {}

    # -- before the collection --------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check the rewards and the environment."""
        data: Any = getattr(trainer, "datamodule", None)
        check_environment(self.report, one_process(data.env), data.seed, isinstance(pl_module.policy, TextPolicy))

    # -- before and after the update --------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Check the first collection or batch; in the second pass, record its log-probabilities and end."""
        module, data = pl_module, getattr(trainer, "datamodule", None)
        assert isinstance(module, GradientModule)
        compared = _array(batch.old_logprobs[batch.response_mask])
        if batch_idx > 0:
            self._finish((self._compared, compared))
        self._compared = compared
        with trainer.precision_plugin.forward_context():
            if isinstance(data, RolloutDataModule):
                assert data.rollout is not None
                check_collection(self.report, module, data, data.rollout.to(torch.device("cpu")))
            else:
                check_demonstrations(self.report, demonstrated_sample(module, batch))
            self._begin_update(module, batch)

    def _begin_update(self, module: GradientModule, batch: TurnBatch) -> None:
        """Record the policy before the update."""
        self._batch = batch
        self._part = batch[torch.arange(min(len(batch), _UPDATED), device=batch.response_mask.device)]
        self._before = evaluation(module, self._part)
        self._weights = {name: _copied(weight) for name, weight in module.policy.named_parameters()}

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Record weights without gradient, and raise a learning rate that a warm-up begins with 0."""
        trainable = {name: one for name, one in pl_module.named_parameters() if one.requires_grad}
        self._without_gradient = [name for name, one in trainable.items() if one.grad is None]
        assert isinstance(pl_module, GradientModule)
        self._gradient = compared_gradients(trainer, pl_module, self._batch)
        for group in optimizer.param_groups:
            if group["lr"] == 0:
                group["lr"] = group.get("initial_lr", 0)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compare the policy with that before the update."""
        module = pl_module
        assert isinstance(module, GradientModule)
        with trainer.precision_plugin.forward_context():
            self._update = self._changes(trainer, module)
        data = getattr(trainer, "datamodule", None)
        if not isinstance(data, RolloutDataModule) or data.minibatches_per_collection == 1:
            self._finish(None)

    def _changes(self, trainer: Any, module: GradientModule) -> dict[str, Any]:
        """Return the fields of :class:`Update`."""
        part, before, after = self._part, self._before, evaluation(module, self._part)
        weights = dict(module.policy.named_parameters())
        moved = {name: _largest(_copied(weights[name]) - old) for name, old in self._weights.items()}
        trainable = {name for name, weight in weights.items() if weight.requires_grad}
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        owned = {id(weight) for group in groups for weight in group["params"]}
        own_steps, wanted = not module.automatic_optimization, {id(weight) for weight in module.optimized_parameters()}
        rollouts = isinstance(module.run_data, RolloutDataModule)
        critic = set[int]() if rollouts else {id(weight) for weight in module.policy.critic_parameters()}
        is_trained = [name for name in trainable if id(weights[name]) not in critic]  # demonstrations train no critic
        fields: dict[str, Any] = {
            "mask": part.response_mask.cpu().numpy(),
            "advantages": _array(part.advantages),
            "before": before["evaluated"],
            "after": after["evaluated"],
            "left_out": [] if own_steps else sorted(name for name in is_trained if id(weights[name]) in wanted - owned),
            "without_gradient": sorted({*self._without_gradient} & {f"policy.{name}" for name in is_trained}),
            "moved": max((moved[name] for name in trainable), default=0.0),
            "frozen_moved": sorted(name for name, change in moved.items() if change > 0 and name not in trainable),
            "trust_region": own_steps,
            "gradient": self._gradient,
            "half_precision": trainer.precision not in ("32-true", "64-true")
            or bool(module.policy.trunk and module.policy.trunk.language_model.recomputes),
        }
        if rollouts:
            fields["sampled"] = _array(part.old_logprobs)
        if not own_steps:
            fields["learning_rates"] = _learning_rates(trainer)
        if "reference" in before:
            fields["reference"] = (before["reference"], after["reference"])
        if part.returns is not None and before["evaluated_values"] is not None:
            fields["critic"] = (before["evaluated_values"], after["evaluated_values"], _array(part.returns))
        return fields

    def _finish(self, passes: tuple[np.ndarray, np.ndarray] | None) -> None:
        """Check the update, and end the run.

        Raises:
            Finished: Always.
        """
        step = Update(**self._update, passes=passes)
        largest = float(np.abs(step.after - step.before)[step.mask].max(initial=0.0))
        self.report.add(
            "update",
            f"one optimiser step changed log-probabilities by up to {largest:.2g} nats, in the right direction",
            checks.update(step),
        )
        raise Finished


# -- the environment ------------------------------------------------------------------------------------------------


def one_process(env: EnvFactory) -> EnvFactory:
    """Return a factory that steps all environments in this process."""
    return env.with_settings(vectorization="sync") if hasattr(env, "vectorization") else env


def check_environment(report: Report, env: EnvFactory, seed: int, writes: bool) -> None:
    """Check rewards and repeated episodes; ``writes`` says whether the policy can respond without an action."""
    if not env.replayable:
        report.add("environment", "not played, because its server may limit the number of sessions", [])
        return
    env = copy.copy(env)
    if isinstance(env, PromptEnvs):  # a reward knows the format of the responses of one environment
        env.rewards = tuple(map(copy.copy, env.rewards))
    played = {name: play(actor, env, seed) for name, actor in baseline_actors(env) if writes or name != "unreadable"}
    if "random" in played:
        again = RandomActor()
        again.connect(env.codec)
        second = play(again, env, seed)
        turns = min(len(second.rewards), len(played["random"].rewards))
        report.add(
            "environment",
            f"{_EPISODES} episodes of at most {turns} turns are the same when they are played again",
            checks.repeated(played["random"], second),
        )
    horizon = checks.common_horizon(played)
    means = ", ".join(f"{name} {one.returns(horizon).mean():.3g}" for name, one in played.items())
    measured = f"mean return of at most {horizon} turns: {means}"
    report.add("rewards", measured if played else "no actor without weights is known", checks.baselines(played))


def play(actor: Actor, env: EnvFactory, seed: int) -> Played:
    """Play episodes side by side until all have ended, or have reached the maximum number of turns or seconds."""
    envs = env.make(_EPISODES, actor.response_format)
    runner, active = EnvRunner(actor, envs), np.ones(_EPISODES, dtype=bool)
    index, deadline, latest = np.arange(_EPISODES), process_time() + _SECONDS, monotonic() + 10 * _SECONDS
    rows: dict[str, list[np.ndarray]] = {"rewards": [], "active": [], "states": []}
    success: np.ndarray | None = None
    try:
        while active.any() and len(rows["active"]) < _HORIZON and process_time() < deadline and monotonic() < latest:
            runner.reset(seed + index, index, idle=~active)
            slots = np.flatnonzero(active)
            keys = RandomKeys(seed=seed, purpose="preflight", collection=0, env=slots, turn=runner.lengths[slots])
            step = runner.turn(keys, slots)
            turn = {
                "rewards": step.rewards,
                "active": np.ones(len(slots), dtype=bool),
                "states": _keys(step.observations),
            }
            for name, values in turn.items():
                row = np.zeros(_EPISODES, values.dtype)
                row[slots] = values
                rows[name].append(row)
            active[slots] = ~step.ended
            if "success" in step.infos:
                success = np.zeros(_EPISODES, dtype=bool) if success is None else success
                success[slots] = step.infos["success"]
    finally:
        envs.close()
    stacked = {name: np.stack(values) for name, values in rows.items()}
    return Played(**stacked, cut=bool(active.any()), success=success)


def _keys(observations: Sequence[Any]) -> np.ndarray:
    return np.array([observation_key(text_of(one)) for one in observations], dtype=np.int64)


# -- the collection -------------------------------------------------------------------------------------------------


def check_collection(report: Report, module: GradientModule, data: RolloutDataModule, rollout: Rollout) -> None:
    """Check a collection before the first update."""
    check_responses(report, module, rollout)
    check_prompts(report, module, data, rollout)
    if data.group_size > 1:
        group, returns = rollout.group.numpy(), rollout.episode_returns.double().numpy()
        spread = [np.std(returns[group == number]) for number in np.unique(group)]
        measured = f"{np.count_nonzero(spread)} of {len(spread)} groups have different returns"
        report.add("groups", measured, checks.groups(returns, group))
    again = Replay(data.env, module.policy.response_format, data.max_turns) if data.env.replayable else None
    try:
        sample, _ = sample_of(module, data, _UPDATED, again)
    finally:
        if again is not None:
            again.close()
    turns, tokens = len(sample), int(sample["mask"].sum())
    names = {
        "episodes": (f"rewards, observations and ends of {turns} turns are as played again", detectors.OF_EPISODES),
        "tokens": (f"mask and log-probabilities of {tokens} tokens are as recomputed", detectors.OF_TOKENS),
        "advantages": ("as computed by separate code", detectors.CREDIT_DETECTORS),
        "loss": ("its terms have the right signs, and large ratios are clipped", detectors.OF_LOSS),
    }
    for name, (measured, of_part) in names.items():
        found = [finding for detector in of_part for finding in detector(sample)]
        if name == "episodes":
            found += [one for of_all in (success_and_return, start_states, new_episodes) for one in of_all([sample])]
        report.add(name, measured, found + (list(detectors.sampled_distribution([sample])) if name == "tokens" else []))


def check_demonstrations(report: Report, sample: Sample) -> None:
    """Check a batch of demonstrations."""
    if "ids" not in sample:
        return
    found = [*detectors.trained_tokens(sample), *detectors.recorded_logprobs(sample)]
    found += checks.ends(sample["mask"], np.isin(sample["ids"], sample.settings["stop_ids"]))
    tokens = int(sample["mask"].sum())
    report.add("tokens", f"mask and log-probabilities of {tokens} tokens are as recomputed", found)


def check_responses(report: Report, module: GradientModule, rollout: Rollout) -> None:
    """Check which responses are legal, and that they were sampled independently."""
    cells = torch.nonzero(rollout.active).tolist()
    texts = [str(rollout.responses[time][env]) for time, env in cells]
    lengths = rollout.flatten(rollout.response_mask).sum(-1).numpy()
    valid = rollout.metrics.get("action_valid", torch.ones(len(cells))).numpy() > 0.5
    first = [turn for turn, (time, _) in enumerate(cells) if time == 0]
    logprobs = rollout.flatten(rollout.logprobs * rollout.response_mask).sum(-1).double().numpy()
    found = [
        *checks.responses(valid, texts, lengths, module.max_response_tokens),
        *checks.random_numbers([texts[turn] for turn in first], logprobs[first], first_states(rollout)),
    ]
    report.add("responses", f"{valid.mean():.0%} of {len(valid)} contain a legal action", found)


def first_states(rollout: Rollout) -> np.ndarray:
    """Return a hash of what the policy observed first in each environment, int64 ``(env,)``."""
    vectors = rollout.inputs.get("observation")
    if vectors is None:
        return _keys(rollout.observations[0])
    return np.array([observation_key(vector) for vector in vectors[0].numpy()])


def check_prompts(report: Report, module: GradientModule, data: RolloutDataModule, rollout: Rollout) -> None:
    """Encode the recorded observations and past turns again, with and without the limit of tokens."""
    policy: Any = module.policy
    template, has_prompts = getattr(policy, "prompt", None), "prompt_ids" in rollout.inputs
    if template is None or not has_prompts or (isinstance(data.env, PromptEnvs) and template.history):
        return
    turns: list[tuple[str, History]] = []
    recorded: list[list[int]] = []
    for env in range(len(rollout.group)):
        memory: History = ()
        for time in torch.nonzero(rollout.active[:, env])[:, 0].tolist():
            seen = rollout.observations[time][env]
            memory = () if int(rollout.turn[time, env]) == 0 else memory
            turns.append((seen, memory))
            recorded.append(rollout.inputs["prompt_ids"][time, env][rollout.inputs["prompt_mask"][time, env]].tolist())
            memory = template.extend_history(policy.codec, memory, seen, rollout.responses[time][env])
    chosen = range(0, len(turns), -(-len(turns) // _PROMPTS))
    turns, recorded = [turns[turn] for turn in chosen], [recorded[turn] for turn in chosen]
    limit = policy.trunk.max_prompt_tokens
    expected = policy.encode_all(turns)
    tokenizer = policy.language_model.tokenizer
    whole = [tokenizer.encode_prompt(template, policy.codec, *turn, 10**9) for turn in turns]
    cut = np.array([len(full) > len(short) for full, short in zip(whole, expected, strict=True)])
    wrong = np.array([one != other for one, other in zip(recorded, expected, strict=True)])
    longest = max(map(len, recorded))
    measured = f"{len(turns)} prompts belong to their observations; the longest has {longest} of at most {limit} tokens"
    report.add("prompts", measured, checks.prompts(cut, wrong, limit))


# -- the policy -----------------------------------------------------------------------------------------------------


def evaluation(module: GradientModule, batch: TurnBatch) -> dict[str, Any]:
    """Return log-probabilities and values of a batch, and those of the reference if it has one, ``(turn, token)``."""
    found = evaluated(module.policy, batch)
    if module.needs_reference:
        found["reference"] = module.policy.reference_logprobs(batch)
    return {name: None if tensor is None else _array(tensor) for name, tensor in found.items()}


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().cpu().numpy()


def _copied(weight: Tensor) -> Tensor:
    """Return a copy of a trainable weight, and only the sum of a frozen one, which may be large."""
    return weight.detach().clone() if weight.requires_grad else weight.detach().sum(dtype=torch.float64)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _learning_rates(trainer: Any) -> list[float]:
    """Return learning rates at 20 steps of the run, and the one of the first step."""
    rates = [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
    steps = trainer.estimated_stepping_batches
    for config in trainer.lr_scheduler_configs:
        factors: Sequence[Callable[[int], float]] = getattr(config.scheduler, "lr_lambdas", ())
        bases = config.scheduler.base_lrs
        if np.isfinite(steps):
            rates += [
                base * factor(int(step))
                for base, factor in zip(bases, factors, strict=False)
                for step in np.linspace(0, steps, 20)
            ]
    return rates
