"""Charts of figures as Vega-Lite specifications, and their PNGs.

In come figures; out come plain dictionaries (``every.charts_of``) that the page hands to Vega in the browser and
``pictures`` to the same Vega without one. No chart computes what is not among the figures.
"""
