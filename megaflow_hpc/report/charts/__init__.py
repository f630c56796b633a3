"""Charts of figures as Vega-Lite specifications, and their PNGs.

``every.charts_of`` turns figures into plain dictionaries. The page passes them to Vega in the browser, and ``pictures``
to the same Vega without a browser. Charts compute nothing that is not among the figures.
"""
