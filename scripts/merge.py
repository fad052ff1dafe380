"""Merge an adapter into its base model: the same as ``lrl merge``."""

import sys

from lrl.cli.merge import main

if __name__ == "__main__":
    main("merge.py", sys.argv[1:])
