"""The table of trained policies on rephrased prompts, from the reports of ``lrl evaluate --rephrase FILE --json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def rephrased_table(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a Markdown table of success rates: a row per kind of policy, a column per phrasing.

    Args:
        reports: for each kind of policy one report per seed, all with the same phrasings.
    """
    phrasings = list(
        dict.fromkeys(name for seeds in reports.values() for report in seeds for name in report["rephrased"])
    )
    heads = ["policy", "as trained", *phrasings]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for policy, seeds in reports.items():
        known = ([report["rephrased"][name] for report in seeds if name in report["rephrased"]] for name in phrasings)
        columns = [seeds, *known]
        cells = [", ".join(f"{report['success_rate']:.3f}" for report in column) for column in columns]
        lines.append(f"| {' | '.join([policy, *cells])} |")
    return "\n".join(lines)
