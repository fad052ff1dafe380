"""Play episodes and print the results: the same as ``lrl evaluate``."""

import sys

from lrl.cli.evaluate import main

if __name__ == "__main__":
    main("evaluate.py", sys.argv[1:])
