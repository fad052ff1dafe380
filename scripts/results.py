"""Write the documentation's tables and figures from kept results."""

import sys

from results.command import main

if __name__ == "__main__":
    main("results.py", sys.argv[1:])
