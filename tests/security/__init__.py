"""Attacks: each as a hostile task, agent, file or second user of the node would make it, and what holds it."""
