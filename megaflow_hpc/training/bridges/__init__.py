"""Bridges to other projects' trainers. Each converts the dataflow's training steps to batches of one trainer.

Each bridge names the version of the project for which it was written. No other module of the package imports a bridge.
"""
