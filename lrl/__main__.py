"""``lrl`` and ``python -m lrl``: answers for help at once, and hands everything else to :mod:`lrl.cli.main`."""

from __future__ import annotations

import sys
import time

USAGE = """usage: lrl {fit,validate,test,predict} --config <env>/<algorithm>.yaml [options]
       lrl evaluate --checkpoint PATH [options]

Language models as reinforcement-learning policies.

  fit         train a policy
  validate    play held-out episodes with a checkpoint (--ckpt_path)
  test        the same, logged under test/
  predict     the same, and write the episodes to predictions.json in the run directory
  evaluate    play episodes with a checkpoint, any language model or a baseline (lrl evaluate --help)

  --config FILE            an experiment; a second one is an overlay, e.g. overlays/wandb.yaml; what is no file here is
                           looked up among the configurations that ship with lrl
  --ckpt_path PATH         resume from a checkpoint or a run directory
  --run_directory PATH     where the run is kept (default: runs/<env>/<algorithm>/<date>-seed<k>)
  --push_to_hub NAME       export the trained model and push it to the Hugging Face hub
  --model.init_args.optimizer.lr 1e-4, --data.init_args.group_size 8, --trainer.max_epochs 50, --seed_everything 1 ...
                           override anything

`lrl fit --help` lists every option. Example:

  lrl fit --config frozen_lake/grpo.yaml
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
    if sys.argv[1] == "evaluate":
        from lrl.cli.evaluate import main as evaluate

        evaluate("lrl evaluate", sys.argv[2:])
        return
    started = time.monotonic()
    from lrl.cli.main import run

    run(started=started)


if __name__ == "__main__":
    main()
