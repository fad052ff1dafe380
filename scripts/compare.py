"""Compare runs with baseline runs, paired by seed: the same as ``lrl compare``."""

import sys

from lrl.cli.compare import main

if __name__ == "__main__":
    main("compare.py", sys.argv[1:])
