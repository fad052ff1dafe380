"""Record episodes as a Minari data set: the same as ``lrl collect``."""

import sys

from lrl.cli.collect import main

if __name__ == "__main__":
    main("collect.py", sys.argv[1:])
