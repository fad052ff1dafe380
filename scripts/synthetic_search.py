"""Write synthetic optimisation histories, or compare searchers on held-out functions: as ``lrl synthetic_search``."""

import sys

from lrl.search.synthetic_command import main

if __name__ == "__main__":
    main("synthetic_search.py", sys.argv[1:])
