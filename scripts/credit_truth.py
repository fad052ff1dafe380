"""Compare estimated advantages with the exact ones on FrozenLake: the same as ``lrl credit_truth``."""

import sys

from lrl.cli.credit_truth import main

if __name__ == "__main__":
    main("credit_truth.py", sys.argv[1:])
