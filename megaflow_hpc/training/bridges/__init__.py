"""Bridges that convert steps of the dataflow to the batches of other projects' trainers.

Each bridge names the version of the project that it was written for. No other module of the package imports a bridge.
"""
