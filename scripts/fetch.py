"""Fetch a pretrained language model: the same as ``lrl fetch``."""

import sys

from lrl.cli.fetch import main

if __name__ == "__main__":
    main("fetch.py", sys.argv[1:])
