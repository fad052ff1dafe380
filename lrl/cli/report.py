"""The command ``lrl report``, and the report at the end of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lrl.cli.command import command

REPORT = "report.html"
"""Name of the report in a run directory."""


def report(runs: list[str], *, baseline: list[str] | None = None, out: Path | None = None) -> None:
    """Write what runs did as one HTML file: verdict, alarms, curves, episodes, settings and commands.

    lrl report runs/frozen_lake/grpo/20260101-120000-seed0
    lrl report runs/rates/lr=1e-3/* --baseline runs/rates/lr=2e-4/* --out rates.html

    The file needs neither a server nor the network. A run that is still training can be reported as well. Several runs
    are compared: runs with the same configuration are one row and one curve, and configurations are paired by seed.

    Args:
        runs: run directories.
        baseline: run directories with which they are compared. For one run, the differing settings are shown.
        out: the HTML file to write; default: report.html in the run directory, or in the current folder for several
            runs.
    """
    from lrl.evaluation.report_page import write_report

    paths, compared = _directories(runs, "run"), _directories(baseline or [], "baseline")
    target = out or (paths[0] / REPORT if len(paths) == 1 else Path(REPORT))
    for problem in write_report(paths, target, compared, findings):
        print(problem, file=sys.stderr)
    print(f"wrote the report to {target}")


def _directories(names: Sequence[str], key: str) -> list[Path]:
    """Return existing run directories; those of evaluations are left out, and files that a shell expands from ``*``.

    Raises:
        ValueError: If one does not exist, or none is a directory.
    """
    from lrl.evaluation.run_records import training_runs

    paths = [Path(name) for name in names]
    for path in paths:
        if not path.exists():
            raise ValueError(f"{key} is {str(path)!r}, which does not exist; name a run directory.")
    directories = training_runs(path for path in paths if path.is_dir())
    if paths and not directories:
        raise ValueError(f"{key} is {str(paths[0])!r}, which is a file; name a run directory.")
    return directories


def findings(run: Path) -> Sequence[Any]:
    """Return what the detectors of ``lrl.diagnosis`` find in a run."""
    from lrl.diagnosis.metrics import diagnose

    return diagnose(run)


main = command(report)
