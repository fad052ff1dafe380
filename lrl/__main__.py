"""The entry point of ``lrl`` and ``python -m lrl``."""

from lrl.cli.program import main

if __name__ == "__main__":
    main()
