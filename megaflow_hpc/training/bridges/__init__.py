"""Bridges that convert steps of the dataflow to the batches of other projects' trainers.

Each bridge states the version of the project for which it was written. No other module of the package imports a bridge.
"""
