"""Charts of figures as Vega-Lite specifications.

A chart is a plain dictionary. The page passes it to Vega in the browser, and ``report.files`` to the same Vega without
a browser. Charts compute nothing that is not among the figures.
"""
