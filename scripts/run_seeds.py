"""Train one experiment on seeds that nobody chose: the first 32 bits of the SHA-256 of "lrl-0", "lrl-1", and so on.

python scripts/run_seeds.py --config configs/frozen_lake/grpo.yaml --count 40 --folder runs/headline/grpo --jobs 2
"""

import argparse
from pathlib import Path

from lrl.evaluation.seeds import run_seeds

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the experiment's file")
    parser.add_argument("--count", type=int, default=10, help="number of seeds")
    parser.add_argument("--folder", type=Path, required=True, help="holds one run directory per seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, of one thread each")
    arguments, options = parser.parse_known_args()
    try:
        run_seeds(arguments.config, arguments.count, arguments.folder, arguments.jobs, options)
    except ValueError as error:
        parser.exit(2, f"run_seeds.py: {error}\n")
