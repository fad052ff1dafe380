"""Follow one episode in the terminal: the same as ``lrl watch``."""

import sys

from lrl.cli.watch import main

if __name__ == "__main__":
    main("watch.py", sys.argv[1:])
