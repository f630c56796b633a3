"""Verbs that inspect a run: its state, logs, pods, servers, rollouts and weights."""
