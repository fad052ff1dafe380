"""Train one experiment on several seeds that follow a rule: the same as ``lrl run_seeds``."""

import sys

from lrl.cli.run_seeds import main

if __name__ == "__main__":
    main("run_seeds.py", sys.argv[1:])
