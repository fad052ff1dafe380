"""Evaluate policies in several environments as a Markdown table: the same as ``lrl success_table``."""

import sys

from lrl.cli.success_table import main

if __name__ == "__main__":
    main("success_table.py", sys.argv[1:])
