"""Compare estimated advantages with the exact ones on FrozenLake."""

import sys

from results.credit_truth import main

if __name__ == "__main__":
    main("credit_truth.py", sys.argv[1:])
