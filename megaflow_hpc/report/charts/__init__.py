"""Builds charts of figures as Vega-Lite specifications.

A chart is a plain dictionary. The page passes it to Vega in the browser, and ``report.files`` renders it with the same
Vega without a browser. Charts only show values from the figures; they compute nothing themselves.
"""
