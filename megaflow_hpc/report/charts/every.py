"""The charts of a report, as Vega-Lite specifications for the page and for :mod:`.pictures`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megaflow_hpc.report.charts import resources, results
from megaflow_hpc.report.charts.specs import Chart
from megaflow_hpc.report.comparison import Difference, labels_of
from megaflow_hpc.report.figures import RunFigures
from megaflow_hpc.report.timeline import Bar
from megaflow_hpc.texts import in_one_line


def charts_of(
    runs: Sequence[RunFigures], bars: Sequence[Sequence[Bar]], differences: Sequence[Difference]
) -> list[Chart]:
    """Returns the charts for which these runs have data, in the order of the page.

    Args:
        bars: the timeline of each run.
    """
    labels = labels_of(runs)
    named = list(zip(labels, runs, strict=True))
    makers = (
        results.pass_at(named),
        results.differences(differences),
        results.rewards(named),
        *(resources.timeline(label, run, own, len(runs) > 1) for (label, run), own in zip(named, bars, strict=True)),
        resources.concurrency(named),
        resources.phases(named),
        resources.stages(named),
        *results.tokens(named),
        *results.use(named),
        resources.failures(named),
        resources.tasks(named),
        resources.cost(named),
        resources.efficiency(named),
        *results.training(named),
    )
    return [_printable(chart) for chart in makers if chart]


def _printable(chart: Chart) -> Chart:
    """Returns the chart without control characters, NaN and infinities, which SVG and JSON lack."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return in_one_line(value)
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, dict):
            return {key: clean(one) for key, one in value.items()}
        return [clean(one) for one in value] if isinstance(value, list) else value

    return Chart(
        name=chart.name, title=in_one_line(chart.title), note=chart.note, spec=clean(chart.spec), wide=chart.wide
    )
