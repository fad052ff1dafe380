"""Program of one of two ranks. All cases run in one pair of processes, one after the other.

`python tests/distributed/ranks.py --json assets/results/ranks.json` compares all cases of ``equality.py`` instead.
"""

import argparse
import datetime
import json
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
import warnings
from functools import partial
from pathlib import Path

import equality
import lightning as L
import torch
import torch.distributed as dist
from equality import KeepFirst, whole_weights
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from tiny_runs import demonstrations, grpo, make_trainer, merged, ppo, rollout_data, sft, text_policy, trpo
from vllm_server import VLLMStandIn

from lrl.algorithms.ppo import PPOValueHeadModule
from lrl.chat.generator import ServedGenerator
from lrl.cli.consolidate import main as consolidate
from lrl.lm.config import LanguageModelConfig, LoRAConfig
from lrl.lm.heads import ValueHeadConfig
from lrl.policies.scoring import ScoringPolicy
from lrl.prompts import PromptTemplate
from lrl.training.checkpoint import CollectionCheckpoint
from lrl.training.export import ExportModel
from lrl.training.optimizer import OptimizerConfig

WORLD_SIZE = 2
TIMEOUT = datetime.timedelta(seconds=30)
COLLECTIONS = 2
SIZES = {"num_groups": 4, "group_size": 3, "num_epochs": 1, "num_minibatches": 2}
LORA = {"model": {"lora": LoRAConfig(r=2, alpha=4)}}
RUNS = {
    "ddp_full": ("ddp", {}),
    "ddp_lora": ("ddp", LORA),
    "ddp_sft": ("ddp", {"algorithm": "sft"}),
    "ddp_ppo": ("ddp", {"algorithm": "ppo"}),
    "fsdp2_ppo": ("fsdp2", {"algorithm": "ppo"}),
    "ddp_scoring": ("ddp", {"algorithm": "scoring"}),
    "fsdp2_scoring": ("fsdp2", {"algorithm": "scoring"}),
    "ddp_adapter": ("ddp", {"algorithm": "adapter"}),
    "ddp_trpo": (
        "ddp",
        {"algorithm": "trpo", "natural_gradient": {"fisher_fraction": 0.5, "cg_iterations": 3}, "value_iterations": 3},
    ),
    "fsdp2_full": ("fsdp2", {}),
    "fsdp2_lora": ("fsdp2", LORA),
    "fsdp2_sft": ("fsdp2", {"algorithm": "sft"}),
    "fsdp2_one_file_full": ("fsdp2_one_file", {}),
    "fsdp2_one_file_lora": ("fsdp2_one_file", LORA),
}
RESUMED = ("ddp_lora", "ddp_sft", "ddp_ppo", "fsdp2_ppo", "ddp_trpo", "fsdp2_lora", "fsdp2_sft", "fsdp2_one_file_lora")
"""Runs that both ranks resume after the first collection; those of ``SIGNALS`` resume the others that have a state of
their own."""
SIGNALS = [("ddp", "collecting"), ("ddp", "training"), ("fsdp2", "training"), ("fsdp2", "unsharding")]
EARLY = ("ddp_ppo", "fsdp2_ppo", "fsdp2_one_file_lora", "fsdp2_lora")
"""Runs that one device goes on with after the first collection."""
EXPORTED = ("ddp_full", "ddp_lora", "fsdp2_full", "fsdp2_lora", "fsdp2_warm", "fsdp2_tied")
"""Runs that write a folder for Hugging Face at their end."""
UNEVEN = {"num_groups": 2, "group_size": 2, "num_minibatches": 10, "num_epochs": 1}


def make_strategy(name):
    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo", timeout=TIMEOUT)
    return ModelParallelStrategy(
        data_parallel_size=WORLD_SIZE,
        tensor_parallel_size=1,
        process_group_backend="gloo",
        timeout=TIMEOUT,
        save_distributed_checkpoint=name == "fsdp2",
    )


def fit(folder, root, strategy, *callbacks, sizes=None, ckpt_path=None, limit_val_batches=0, **module):
    """Two collections of episodes, of which ranks play different numbers of turns; or two passes of SFT."""
    algorithm, max_epochs = module.pop("algorithm", "grpo"), module.pop("max_epochs", COLLECTIONS)
    rollouts = rollout_data("episodes", **SIZES | (sizes or {}))
    if algorithm == "sft":
        module, data = sft(folder, **module), demonstrations()
    elif algorithm == "ppo":
        module = ppo(folder, "all", optimizer={"schedule": "constant"})
        data = rollout_data("continuing", num_epochs=1)
    elif algorithm == "trpo":
        module, data = trpo(folder, **module), rollout_data("continuing", num_epochs=1, num_minibatches=1)
    elif algorithm in ("scoring", "adapter"):
        module, data = PPOValueHeadModule(critic_of(folder, algorithm), optimizer=OptimizerConfig(lr=1e-2)), rollouts
    else:
        module, data = grpo(folder, **merged({"optimizer": {"schedule": "constant"}}, module)), rollouts
    trainer = make_trainer(
        root,
        CollectionCheckpoint(1),
        *([ExportModel()] if root.name in EXPORTED else []),
        *callbacks,
        max_epochs=max_epochs,
        strategy=make_strategy(strategy),
        devices=WORLD_SIZE,
        gradient_clip_val=None if algorithm == "trpo" else 1.0,
        limit_val_batches=limit_val_batches,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return trainer


def critic_of(folder, kind):
    """Choices, or a critic with its own adapter, which makes two forward passes before each backward one."""
    head = ValueHeadConfig(hidden_sizes=(8,), init_seed=0, adapter=kind == "adapter")
    if kind == "adapter":
        return text_policy(folder, history="all", value_head=head, lora=LoRAConfig(r=2, alpha=4))
    prompt = PromptTemplate(response_format="direct", system="", history="all")
    return ScoringPolicy(LanguageModelConfig(name=folder), prompt, value_head=head)


def resume_inside(folder, root, strategy):
    """A checkpoint from between the parts of the second collection, of which each rank has its own."""
    whole = fit(folder, root, strategy, SaveInside(root / "inside.ckpt"))
    return whole, fit(folder, root, strategy, ckpt_path=root / "inside.ckpt")


class SaveInside(L.Callback):
    """Saves a checkpoint after the first minibatch of the second collection."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 0):
            trainer.save_checkpoint(self.path)


class SpoilLoss(L.Callback):
    """Makes the loss of the second rank alone NaN, in the second minibatch of the second collection."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.global_rank, trainer.current_epoch, batch_idx) == (1, 1, 1):
            batch.advantages[0, 0] = float("nan")


class SignalRank(L.Callback):
    """Sends SIGTERM to the second rank alone, in the second collection: as it begins to collect, collects or trains."""

    def __init__(self, moment):
        self.moment = moment

    def send(self, trainer, moment):
        if trainer.global_rank == 1 and trainer.current_epoch == 1 and moment == self.moment:
            self.moment = None
            os.kill(os.getpid(), signal.SIGTERM)

    def on_fit_start(self, trainer, pl_module):
        act = pl_module.policy.act

        def sending(*args, **kwargs):
            self.send(trainer, "collecting")
            return act(*args, **kwargs)

        pl_module.policy.act = sending
        attempt = pl_module.interruption.attempt

        def interrupting(work):
            def begun():  # before the weights are gathered, which all ranks must do
                self.send(trainer, "unsharding")
                return work()

            return attempt(begun)

        pl_module.interruption.attempt = interrupting

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.send(trainer, "training")


def interrupted(folder, root, strategy, moment):
    """Return runs that a signal to one rank ends on both, and the results after they are resumed."""
    status = None
    try:
        fit(folder, root, strategy, SignalRank(moment))
    except SystemExit as end:
        status = end.code
    return outcome(fit(folder, root, strategy, ckpt_path=root / "checkpoints" / "last.ckpt")) | {"status": status}


def served(folder, root):
    """A run of both ranks with one server, which rank 0 starts."""
    address, server = root.with_name("served.txt"), VLLMStandIn(folder)
    if os.environ["RANK"] == "0":
        server.start()
        address.with_suffix(".part").write_text(server.url)
        address.with_suffix(".part").rename(address)
    while not address.exists():
        time.sleep(0.01)
    generator = ServedGenerator(address.read_text(), str(root / "weights"))
    trainer = fit(folder, root, "ddp", model={"generator": generator, **LORA["model"]})
    return outcome(trainer) | {"loads": len(server.loads), "violations": server.violations}


def outcome(trainer):
    """Results of a run on this rank: whole weights, rows, and the last responses."""
    local = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in trainer.model.parameters()]
    rollout = getattr(trainer.datamodule, "rollout", None)
    return {
        "weights": whole_weights(trainer.lightning_module),
        "rows": trainer.logger.rows,
        "early_weights": getattr(trainer.lightning_module, "early_weights", None),
        "local_size": sum(weight.numel() for weight in local),
        "responses": rollout and rollout.responses,
        "turns": rollout and rollout.num_turns,
    }


def refused(run):
    """Error message of a run that does not start."""
    try:
        run()
    except ValueError as error:
        return {"sentence": str(error)}
    raise AssertionError("it began")


def cases(folder, root):
    """Name and function of everything that is run."""
    for name, (strategy, changes) in RUNS.items():
        first = root / f"{name}.ckpt"
        yield name, lambda at, s=strategy, c=changes, k=first: outcome(fit(folder, at, s, KeepFirst(k), **c))
        if name in RESUMED:
            yield (
                f"{name}_resumed",
                lambda at, s=strategy, c=changes, k=first: outcome(fit(folder, at, s, ckpt_path=k, **c)),
            )
    for strategy in ("ddp", "fsdp2"):
        once = {"max_epochs": 1, "sizes": {"num_epochs": 2}}  # the first of four parts moves, the second measures it
        yield f"{strategy}_kl_trips", lambda at, s=strategy, c=once: outcome(fit(folder, at, s, target_kl=1e-4, **c))
        yield f"{strategy}_kl_free", lambda at, s=strategy, c=once: outcome(fit(folder, at, s, **c))
        yield (
            f"{strategy}_uneven",
            lambda at, s=strategy: outcome(fit(folder, at, s, sizes=UNEVEN, target_kl=1.0, limit_val_batches=1)),
        )
        yield f"{strategy}_loss", lambda at, s=strategy: refused(lambda: fit(folder, at, s, SpoilLoss()))
    for strategy, moment in SIGNALS:
        yield f"{strategy}_{moment}", lambda at, s=strategy, m=moment: interrupted(folder, at, s, m)
    critic = {"value_head": ValueHeadConfig(hidden_sizes=(8,), init_seed=0)}
    yield "ddp_sft_critic", lambda at: refused(lambda: fit(folder, at, "ddp", algorithm="sft", **critic))
    yield "fsdp2_trpo", lambda at: refused(lambda: fit(folder, at, "fsdp2", algorithm="trpo"))
    warm = {"init_from": str(root / "ddp_lora" / "checkpoints" / "last.ckpt"), "max_epochs": 1, **LORA}
    yield "fsdp2_warm", lambda at: outcome(fit(folder, at, "fsdp2", **warm))
    yield "ddp_warm", lambda at: outcome(fit(folder, at, "ddp", **warm))
    yield "fsdp2_tied", lambda at: outcome(fit(f"{folder}-tied", at, "fsdp2", max_epochs=1))
    yield "ddp_served", lambda at: served(folder, at)
    yield from equal_cases(f"{folder}-double", root, equality.SAMPLE)
    yield "ddp_inside", lambda at: dict(zip(("whole", "resumed"), map(outcome, resume_inside(folder, at, "ddp"))))


def collectives():
    """Return the number of collective calls of each process group of this rank."""
    if not dist.is_initialized():
        return []
    return [group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map]


def work(rank, folder, root, port):
    """Run every case and write its results."""
    work_on(cases, rank, folder, root, port)


def compare(names, rank, folder, root, port):
    """Run cases of ``equality.py`` and write their results."""
    work_on(partial(equal_cases, names=names, collections=equality.COLLECTIONS), rank, folder, root, port)


def work_on(cases, rank, folder, root, port):
    """Run cases and write their results."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(WORLD_SIZE),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }
    results = {}
    for name, run in cases(folder, Path(root)):
        (Path(root) / f"rank{rank}.txt").write_text(name)  # for whoever looks for what hangs
        try:
            results[name] = run(Path(root) / name)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        results[name]["collectives"] = collectives()
        if "error" in results[name]:
            break
    torch.save(results, Path(root) / f"rank{rank}.pt")


def start_pair(processes, program, folder, root):
    """Run a program in two processes, the ranks 0 and 1, until both have ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = [processes.Process(target=program, args=(rank, folder, str(root), port)) for rank in range(WORLD_SIZE)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(2000)
        worker.kill()


def results_of(root):
    """Return the results of each rank."""
    last = [(root / f"rank{rank}.txt").read_text() for rank in range(WORLD_SIZE)]
    assert all((root / f"rank{rank}.pt").exists() for rank in range(WORLD_SIZE)), f"the ranks hung in {last}"
    found = [torch.load(root / f"rank{rank}.pt", weights_only=False) for rank in range(WORLD_SIZE)]
    errors = [outcome["error"] for rank in found for outcome in rank.values() if "error" in outcome]
    assert not errors, errors[0]
    return found


def equal_cases(folder, root, names, collections=equality.FEW):
    """Name and function of the runs of two ranks that must end with the weights of one process."""
    for name in names:
        for strategy in equality.CASES[name].strategies:
            yield (
                f"{name}, {strategy}",
                lambda at, n=name, s=strategy: equality.run(n, folder, at, make_strategy(s), collections=collections),
            )
    case, one = equality.RESUMED, root / "one.ckpt"
    run_resumed = partial(equality.run, case, folder, collections=collections)
    for strategy in equality.CASES[case].strategies if one.exists() else ():
        kept = root / f"two_{strategy}.ckpt"
        yield (f"two_{strategy}", lambda at, s=strategy, k=kept: run_resumed(at, make_strategy(s), keep=k))
        yield (f"one_to_two_{strategy}", lambda at, s=strategy: run_resumed(at, make_strategy(s), ckpt_path=one))


def save_first(folder, root, collections=equality.FEW):
    """Save the checkpoint of one process that :func:`equal_cases` resumes; return the whole run."""
    return equality.run(equality.RESUMED, folder, root / "one", keep=root / "one.ckpt", collections=collections)


def resumed_rows(folder, root, whole, ranks, collections=equality.FEW):
    """Return a row of the report for each change of the number of devices after the first collection."""
    rows = []
    for strategy in equality.CASES[equality.RESUMED].strategies:
        path = root / f"two_{strategy}.ckpt"
        if strategy == "fsdp2":
            consolidate("lrl consolidate", ["--checkpoint", str(path), "--output", f"{path}.whole"])
            path = path.with_name(f"{path.name}.whole")
        alone = equality.run(equality.RESUMED, folder, root / "alone", ckpt_path=path, collections=collections)
        to_two = [rank[f"one_to_two_{strategy}"] for rank in ranks]
        for about, resumed in (("resumed by one process after two", [alone]), ("resumed by two after one", to_two)):
            rows.append(row_of(equality.RESUMED, strategy, whole, resumed) | {"case": f"AdamW, {about}"})
    return rows


def compared(name, strategy, alone, ranks):
    """Check a case, and return its row of the report."""
    equality.check_shown(name, alone, ranks)
    return row_of(name, strategy, alone, ranks)


def row_of(name, strategy, alone, ranks):
    """Return a row of the report: the largest difference between a weight of one process and of each rank."""
    case = equality.CASES[name]
    algorithm, _, about = name.partition(", ")
    return {
        "algorithm": algorithm,
        "strategy": strategy,
        "case": about,
        "difference": max(equality.difference(alone["weights"], rank["weights"]) for rank in ranks),
        "tolerance": case.tolerance,
        "largest_change": equality.difference(alone["start"], alone["weights"]),
    }


def main():
    """Compare all cases and write the report."""
    from benchmarks.timing import provenance

    parser = argparse.ArgumentParser(description=equality.__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file of the report")
    parser.add_argument("--cases", nargs="+", default=list(equality.CASES), help="names of cases; default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    rows = []
    with tempfile.TemporaryDirectory() as root:
        folder, root = equality.save_model(f"{root}/double"), Path(root)
        whole = save_first(folder, root, equality.COLLECTIONS) if equality.RESUMED in options.cases else None
        start_pair(multiprocessing.get_context("forkserver"), partial(compare, options.cases), folder, root)
        ranks = results_of(root)
        for name in options.cases:
            alone = equality.run(name, folder, root / "alone", collections=equality.COLLECTIONS)
            for strategy in equality.CASES[name].strategies:
                rows.append(compared(name, strategy, alone, [rank[f"{name}, {strategy}"] for rank in ranks]))
        rows += [] if whole is None else resumed_rows(folder, root, whole, ranks, equality.COLLECTIONS)
    for row in rows:
        print("{algorithm}, {strategy}, {case}: {difference:.1e}, at most {tolerance:.0e}".format(**row))
    report = provenance() | {"command": f"PYTHONPATH=tests:scripts {provenance()['command']}", "two_ranks": rows}
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    assert all(row["difference"] <= row["tolerance"] for row in rows)


if __name__ == "__main__":
    main()
