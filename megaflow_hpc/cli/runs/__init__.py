"""Verbs that inspect a run: its state, logs, pods, servers, rollouts, usage and weights."""
