"""Draw a logged metric of runs: the same as ``lrl plot``."""

import sys

from lrl.cli.plot import main

if __name__ == "__main__":
    main("plot.py", sys.argv[1:])
