"""Search for small policies on the tasks of ProPS, without gradients: the same as ``lrl search_table``."""

import sys

from lrl.search.table_command import main

if __name__ == "__main__":
    main("search_table.py", sys.argv[1:])
