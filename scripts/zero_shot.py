"""Evaluate an untrained language model beside random actions: the same as ``lrl zero_shot``."""

import sys

from lrl.cli.zero_shot import main

if __name__ == "__main__":
    main("zero_shot.py", sys.argv[1:])
