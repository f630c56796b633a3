"""Verbs that inspect a run: its state and logs, its pods and servers, its rollouts and its weights."""
