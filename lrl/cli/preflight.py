"""The command ``lrl preflight``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence

HELP = """usage: lrl preflight --config <env>/<algorithm>.yaml [options of lrl fit]

Check a configuration before it is trained: rewards, environment, tokens, advantages, and one optimiser step.

The command creates the same objects as `lrl fit` with the same options. It plays episodes with random, constant and
expert actions and with responses that contain no action. It collects up to 64 turns in each of up to 16 environments
(two groups, if groups are larger), repeats the computations of training by separate code, and takes one optimiser
step, whose weights are thrown away. It writes no files. One line per check shows what was measured; a line that
begins with `error` is certainly a mistake, one with `warning` may be intended. The exit status is 1 if there is an
error.

Example:

  lrl preflight --config frozen_lake/grpo.yaml
"""


def main(prog: str, args: Sequence[str]) -> None:
    """Run the command.

    Raises:
        SystemExit: With status 1 if a check has found a mistake, with 2 if a user caused an error.
    """
    if not args or {"-h", "--help"} & set(args):
        sys.stdout.write(HELP)
        return
    from lrl.cli.error_messages import user_errors
    from lrl.cli.keys import check_keys

    with user_errors(prog, args=args), tempfile.TemporaryDirectory() as folder:
        for number, arg in enumerate(args):
            if arg.partition("=")[0] == "--resume":
                value = arg.partition("=")[2] or " ".join(args[number + 1 : number + 2])
                raise ValueError(f"resume is {value!r}; it must be left out, because preflight checks new runs.")
        for sentence in check_keys(["fit", *args]):
            sys.stderr.write(f"lrl: {sentence}\n")
        from lrl.cli.preflight_run import run

        findings = run(args, folder)
    if any(finding.severity == "error" for finding in findings):
        raise SystemExit(1)
