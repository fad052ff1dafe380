"""Validate the diagnosis: train with mistakes in the code, and write what is found and when.

Each mistake is a patch of ``assets/faults``, written by someone who did not know the detectors. It is applied to a
copy of the code in which training differs from this one only by the mistake::

    python scripts/faults.py --code /tmp/copy --folder runs/faults --algorithm grpo --fault 01
    python scripts/faults.py --folder runs/faults --json assets/results/diagnosis_faults.json
    python scripts/faults.py --code . --folder runs/healthy --config configs/cartpole/ppo_mlp.yaml --seeds 10

A copy with the mistake is checked by ``lrl preflight`` and trained on five seeds. The first named cause is right if its
category is that of the patch. It is in time if it is reported before half of the return is lost that runs without the
mistake gain over these. The third command trains without a mistake; its folder is summarised like that of the others.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FAULTS = ROOT / "assets" / "faults"
SEEDS = [int(hashlib.sha256(f"lrl-{number}".encode()).hexdigest()[:8], 16) for number in range(10)]
"""The first seeds of ``lrl run_seeds``."""
RUNS = {
    "grpo": ["--config", "configs/frozen_lake/grpo.yaml", "--trainer.max_epochs", "8"],
    "ppo": [
        *("--config", "configs/cartpole/ppo_text.yaml", "--trainer.max_epochs", "5"),
        *("--data.num_envs", "16", "--data.num_epochs", "4", "--data.num_minibatches", "8"),
    ],
}
OPTIONS = ["--trainer.limit_val_batches", "0", "--trainer.callbacks+=Diagnosis"]
CATEGORIES = {
    "A": (
        "values are averaged over padding",
        "values are averaged over tokens",
        "values are those after the last token",
        "values are those of padding",
        "values are those of other tokens",
        "advantages are divided by the number of tokens",
        "padding trained",
        "wrong mask",
        "sampled tokens not trained",
        "tokens have wrong weights in the loss",
        "prompts do not contain the observation",
        "prompts do not contain the system message",
        "advantages are not normalised over the sampled tokens",
    ),
    "B": ("log-probabilities are those of other tokens", "shifted mask", "wrong mask", "sampled tokens not trained"),
    "C": ("end token not trained",),
    "D": (
        "rewards are shifted after invalid responses",
        "reward has the wrong sign",
        "reward has the wrong scale",
        "reward has an offset",
        "reward is clipped",
        "constant reward",
        "rewards are shifted by one turn",
        "rewards are not those of the environment",
        "advantages are negated",
        "advantages are scaled",
        "advantages are not scaled",
        "advantages are scaled wrongly",
        "advantages have an offset",
        "advantages are clipped",
        "rewards prefer failures",
        "Q-values are not those of the states",
    ),
    "E": (
        "time and environments are swapped",
        "returns run backwards in time",
        "values are those of other turns",
        "advantages leak between groups",
        "groups are interleaved",
        "groups are not those of the episodes",
        "advantages leak across episodes",
        "ends of episodes are shifted by one turn",
        "episodes of a group start from different states",
        "episodes have the advantages of others",
        "minibatches mix the fields of different turns",
        "minibatches are not shuffled",
        "advantages are returns without baseline",
        "advantages are scaled",
        "advantages are not scaled",
        "advantages are scaled wrongly",
        "advantages have an offset",
        "advantages are clipped",
        "negative advantages are missing",
        "wrong advantages",
        "baseline of a group is not its mean",
        "baselines are those of other groups",
        "advantages are not normalised over the sampled tokens",
        "another gamma or gae_lambda is used",
        "turns are not trained on equally often",
        "turns are left out of training",
        "advantages of first turns are wrong",
        "advantages of terminal turns are wrong",
        "advantages of truncated turns are wrong",
        "advantages of last turns are wrong",
    ),
    "F": (
        "ends of episodes are shifted by one turn",
        "episode goes on after its end",
        "environment is not reset after an episode",
        "advantages of terminal turns are wrong",
        "advantages of truncated turns are wrong",
        "advantages of last turns are wrong",
        "advantages at the end of a collection are wrong",
        "advantages before a termination are wrong",
        "advantages before a truncation are wrong",
        "invalid responses do not end the episode",
        "truncation treated as termination",
        "termination treated as truncation",
        "end of an episode is missed",
        "episodes end too early",
        "values after a cut are of another state",
        "end of the collection treated as termination",
    ),
    "G": (
        "log-probabilities are those of other tokens",
        "tokens are not sampled by the current weights",
        "sampling uses wrong log-probabilities",
        "training uses wrong log-probabilities",
        "sampling and training use wrong log-probabilities",
        "tokens are sampled from another distribution",
        "ratio does not depend on the policy",
        "ratio is inverted",
        "ratios are those of whole responses",
        "wrong surrogate objective",
        "sampling and training disagree",
    ),
    "H": (
        "wrong reference policy",
        "reference moves with the policy",
        "KL term has the wrong sign",
        "KL term has no effect",
        "KL penalty is missing",
        "KL penalty has the wrong sign",
        "KL term has the wrong size",
        "KL term to the sampling policy has the wrong size",
    ),
    "I": (
        "gradients are not clipped",
        "learning rate too high",
        "learning rate too low",
        "loss has the wrong sign",
        "update has the wrong sign",
        "weights are not trained",
        "advantages are negated",
        "advantages do not determine the update",
        "ratios are not clipped",
        "ratios are clipped on the wrong side",
        "ratio is inverted",
        "gradients accumulate over minibatches",
        "gradients have the wrong size",
        "gradients are not those of the minibatch",
        "wrong surrogate objective",
        "ratios are those of whole responses",
        "tokens have wrong weights in the loss",
        "learning rate does not follow its schedule",
        "weights do not follow the optimiser",
        "gradients shrink before the optimiser step",
        "minibatches are not shuffled",
        "updates end at another divergence than target_kl",
        "some weights are not trained",
        "turns are not trained on equally often",
    ),
    "J": (
        "values are averaged over padding",
        "values are averaged over tokens",
        "values are those after the last token",
        "values are those of padding",
        "values are those of other turns",
        "values are not used",
        "values are those of other tokens",
        "returns run backwards in time",
        "wrong targets of the critic",
        "critic is not trained",
        "value loss has the wrong sign",
        "critic is harmful",
        "critic learns nothing",
        "values are not those of the critic",
        "advantages are returns without baseline",
        "rewards are not discounted",
        "only the next reward counts",
        "gae_lambda is ignored",
        "gae_lambda is 0",
        "token_lambda is ignored",
        "another gamma or gae_lambda is used",
        "value loss has the wrong size",
        "some weights are not trained",
    ),
    "K": (
        "entropy bonus has the wrong sign",
        "entropy bonus has the wrong size",
        "entropy bonus has no effect",
        "entropy collapsed",
        "entropy rises",
        "entropy is not that of the policy",
        "KL term has the wrong sign",
        "KL term has the wrong size",
        "KL term to the sampling policy has the wrong size",
    ),
    "L": (
        "groups are dead",
        "random numbers are used again",
        "members of a group use the same random numbers",
        "advantages are all 0",
    ),
    "N": (
        "rewards are shifted after invalid responses",
        "invalid responses do not end the episode",
        "advantages of invalid responses are wrong",
        "advantages of valid responses are wrong",
        "codec accepts invalid responses",
        "codec rejects legal responses",
        "codec reads another action",
        "invalid responses have the wrong reward",
        "invalid responses are rewarded",
        "invalid responses are executed",
        "legal responses are rejected",
        "turns are left out of training",
    ),
    "P": (
        "prompts contain the answer",
        "held-out episodes are used in training",
        "the same episodes are played again",
        "episodes start in too few states",
    ),
    "R": (
        "episodes start in too few states",
        "environment is not reset after an episode",
        "codec accepts invalid responses",
        "codec rejects legal responses",
        "codec reads another action",
        "Q-values are not those of the states",
        "actions of the data set are not the best",
        "texts of the data set are of other states",
        "observations do not show the state",
        "environment is not deterministic",
        "episode goes on after its end",
        "turns of an episode are missing",
        "observations are not those of the environment",
        "rewards are shifted by one turn",
        "rewards are not those of the environment",
        "rewards prefer failures",
        "the same episodes are played again",
        "prompts do not contain the observation",
        "prompts do not contain the system message",
        "responses are not the sampled tokens",
    ),
}
"""Causes of each category of mistakes. Causes of new detectors are added between validations, and never while one runs;
a file of results has the categories of its own commit."""


def in_child(code: Path, arguments: Sequence[str], log: Path) -> None:
    """Run a command of ``lrl`` in a child process, which has imported the code of the copy already."""
    log.parent.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        output = log.open("w")
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        os.chdir(code)
        from lrl.cli.program import main

        sys.argv = ["lrl", *arguments]
        main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def preflight(code: Path, arguments: Sequence[str], log: Path) -> list[str]:
    """Return the causes that ``lrl preflight`` names, in its order."""
    in_child(code, ["preflight", *arguments], log)
    lines = log.read_text(encoding="utf-8").splitlines()
    return [line.split(None, 2)[2].split(":")[0] for line in lines if line.startswith(("error ", "warning "))]


def returns(run: Path) -> list[float]:
    """Return the mean reward per turn of each collection."""
    with (run / "metrics.csv").open(newline="") as lines:
        return [float(row["rollout/return"]) for row in csv.DictReader(lines) if row.get("rollout/return")]


def outcome(run: Path) -> dict[str, Any]:
    """Return what was found in a run, and its returns."""
    from lrl.diagnosis.metrics import diagnose

    finished = (run / "metrics.csv").exists()
    found = [(finding.cause, finding.collection) for finding in diagnose(run)] if finished else []
    return {"findings": found, "returns": returns(run) if finished else []}


def judged(algorithm: str, fault: str, found: dict[str, Any], healthy: Sequence[float]) -> dict[str, Any]:
    """Return whether the first named cause of a run is right and in time.

    Args:
        algorithm: name of the algorithm.
        fault: name of the patch.
        found: result of :func:`outcome` for a run with the mistake.
        healthy: returns of the run without the mistake and with the same seed.
    """
    letters = (FAULTS / algorithm / fault / "category.txt").read_text().strip().replace(" ", "").split(",")
    expected = {cause for letter in letters for cause in CATEGORIES.get(letter, ())}
    causes = [cause for cause, _ in found["findings"]]
    first = next(iter(causes), None)
    when = min((collection for cause, collection in found["findings"] if cause in expected), default=None)
    losses = [one - other for one, other in zip(healthy, found["returns"], strict=False)]
    total = sum(losses)
    lost = None if when is None or total <= 0 else sum(losses[: when + 1]) / total
    right = first in expected
    return {
        "first": first,
        "others": causes[1:],
        "right": right,
        "preflight": found.get("preflight"),
        "right_before": bool(expected.intersection(found.get("preflight", ())[:1])),
        "named": any(cause in expected for cause in causes),
        "collection": when,
        "lost_share": None if lost is None else round(lost, 4),
        "in_time": right and when is not None and (lost is None or lost < 0.5),
        "finished": bool(found["returns"]),
    }


def summary(folder: Path) -> dict[str, Any]:
    """Return the judgement of all runs, with their counts."""
    rows: list[dict[str, Any]] = []
    for algorithm in RUNS:
        healthy = {path.stem: json.loads(path.read_text()) for path in (folder / algorithm / "none").glob("*.json")}
        for patch in sorted((FAULTS / algorithm).iterdir()):
            paths = sorted((folder / algorithm / patch.name).glob("*.json"))
            found = {path.stem: json.loads(path.read_text()) for path in paths}
            runs = {
                seed: judged(algorithm, patch.name, one, healthy[seed]["returns"])
                for seed, one in found.items()
                if seed in healthy
            }
            facts = {name: (patch / f"{name}.txt").read_text().strip() for name in ("description", "category")}
            rows.append({"algorithm": algorithm, "fault": patch.name, **facts, "runs": runs})
        rows.append({"algorithm": algorithm, "fault": "none", "alarms": {k: v["findings"] for k, v in healthy.items()}})
    faulty = [run for row in rows for run in row.get("runs", {}).values()]
    counts = {
        name: sum(run[name] for run in faulty) for name in ("finished", "right", "right_before", "named", "in_time")
    }
    return {"totals": {"started": len(faulty), **counts}, "rows": rows}


def whole_runs(folder: Path) -> dict[str, Any]:
    """Return the findings of whole runs of configurations without a mistake, by configuration and seed."""
    runs: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("whole/*/*.json")):
        found = json.loads(path.read_text())
        runs.setdefault(path.parent.name, {})[path.stem] = found["findings"] if found["returns"] else "failed"
    everything = [one for of_seeds in runs.values() for one in of_seeds.values()]
    failed = everything.count("failed")
    alarms = sum(len(one) for one in everything if one != "failed")
    counts = {"started": len(everything), "failed": failed, "alarms": alarms}
    return {"totals": counts, "findings": runs}


def main() -> None:
    """Train the copy with one patch, or without one, on all seeds; or write what was found in all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", type=Path, help="a clone of the repository, which is changed")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--algorithm", choices=RUNS)
    parser.add_argument("--config", help="train whole runs of this configuration, without a mistake")
    parser.add_argument("--fault", default="none", help="name of the patch; none trains without a mistake")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write what was found in all runs of the folder, and train nothing")
    args = parser.parse_args()
    algorithm: str = args.algorithm or ""
    if args.json is not None:
        commit = subprocess.check_output(["git", "-C", str(ROOT), "rev-parse", "HEAD"], text=True)
        command = f"python scripts/faults.py --folder RUNS --json {args.json}"
        results = whole_runs if (args.folder / "whole").exists() else summary
        args.json.write_text(
            json.dumps({"command": command, "commit": commit.strip(), **results(args.folder)}, indent=1) + "\n"
        )
        return
    if args.code is None or (args.algorithm is None) == (args.config is None):
        parser.error("--code and one of --algorithm and --config must be given.")
    git = ["git", "-C", str(args.code)]
    if not (args.code / ".git").is_dir():
        parser.error(f"--code is {str(args.code)!r}; it must be a clone of the repository.")
    lock = (args.code / ".git" / "faults.lock").open("w")  # held until this process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        parser.error(f"--code is {str(args.code)!r}, in which another process trains; it must be a clone of its own.")
    if args.algorithm is not None:
        subprocess.run([*git, "checkout", "-q", "."], check=True)
    if args.fault != "none":
        patch = FAULTS / algorithm / args.fault / "fault.patch"
        subprocess.run([*git, "apply", "--recount", str(patch.resolve())], check=True)
    sys.path.insert(0, str(args.code.resolve()))
    import lightning.pytorch  # noqa: F401 (imported once, before the children are forked)

    import lrl.cli.main  # noqa: F401

    assert Path(lrl.cli.main.__file__).is_relative_to(args.code.resolve()), lrl.cli.main.__file__
    folder, arguments = args.folder.resolve(), ["--config", args.config or ""]
    if args.config is None:
        folder, arguments = folder / algorithm / args.fault, RUNS[algorithm]
    else:
        folder = folder / "whole" / Path(args.config).with_suffix("").as_posix().replace("/", "_")
    for seed in SEEDS[: args.seeds]:
        run = folder / str(seed)
        path = run.with_suffix(".json")
        if not path.exists():
            options = [*arguments, "--seed_everything", str(seed)]
            shutil.rmtree(run, ignore_errors=True)
            before = preflight(args.code.resolve(), options, run.with_suffix(".preflight.log"))
            options += [*OPTIONS, "--run_directory", str(run)]
            in_child(args.code.resolve(), ["fit", *options], run.with_suffix(".log"))
            path.write_text(json.dumps({**outcome(run), "preflight": before}, indent=1))
        found = json.loads(path.read_text())
        print(folder.name, seed, found["findings"], flush=True)


if __name__ == "__main__":
    main()
