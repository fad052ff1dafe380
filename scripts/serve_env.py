"""Serve an environment by OpenEnv's protocol: the same as ``lrl serve_env``."""

import sys

from lrl.openenv.command import main

if __name__ == "__main__":
    main("serve_env.py", sys.argv[1:])
