"""Write the documentation's tables and figures from kept results: the same as ``lrl results``."""

import sys

from lrl.cli.results import main

if __name__ == "__main__":
    main("results.py", sys.argv[1:])
