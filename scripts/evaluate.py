"""The same as ``lrl evaluate``: play N seeded episodes and print return, length, success and invalid actions.

python scripts/evaluate.py --checkpoint runs/frozen_lake/grpo/<run>
python scripts/evaluate.py --model HuggingFaceTB/SmolLM2-135M-Instruct --env_id FrozenLake-v1 --episodes 20
python scripts/evaluate.py --policy expert --json expert.json
"""

import sys

from lrl.cli.evaluate import main

if __name__ == "__main__":
    main("evaluate.py", sys.argv[1:])
