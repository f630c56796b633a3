"""Verbs that look into a run: its state, its pods and servers, one rollout of it, the weights of its engines."""
