"""``lrl`` and ``python -m lrl``: answers for help at once, and hands everything else to :mod:`lrl.cli`."""

from __future__ import annotations

import sys
import time

USAGE = """usage: lrl {fit,validate,test,predict} --config configs/<env>/<algorithm>.yaml [options]

Language models as reinforcement-learning policies.

  fit         train a policy
  validate    play held-out episodes with a checkpoint (--ckpt_path)
  test        the same, logged under test/
  predict     the same, and return the episodes

  --config FILE            an experiment; a second one is an overlay, e.g. configs/overlays/wandb.yaml
  --ckpt_path PATH         resume from a checkpoint or a run directory
  --run_directory PATH     where the run is kept (default: runs/<env>/<algorithm>/<date>-seed<k>)
  --push_to_hub NAME       export the trained model and push it to the Hugging Face hub
  --model.init_args.lr 1e-4, --data.init_args.group_size 8, --trainer.max_epochs 50, --seed_everything 1 ...
                           override anything

`lrl fit --help` lists every option. Example:

  lrl fit --config configs/frozen_lake/grpo.yaml
"""


def main() -> None:
    """Run the command line; a user's mistake is one sentence and exit status 2."""
    if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return
    if sys.argv[1] == "--version":
        from importlib.metadata import version

        sys.stdout.write(f"lrl {version('lrl')}\n")
        return
    started = time.monotonic()
    from lrl.cli import run

    run(started=started)


if __name__ == "__main__":
    main()
