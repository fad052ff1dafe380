"""Write the Q-values of a FrozenLake expert as CSV: the same as ``lrl expert_q``."""

import sys

from lrl.cli.expert_q import main

if __name__ == "__main__":
    main("expert_q.py", sys.argv[1:])
