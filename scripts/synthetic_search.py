"""Write synthetic optimisation histories, or compare searchers on held-out functions: as ``lrl synthetic_search``."""

import sys

from lrl.cli.synthetic_search import main

if __name__ == "__main__":
    main("synthetic_search.py", sys.argv[1:])
