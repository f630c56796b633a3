"""Services: programs in their own sandboxes, to which the sandboxes of a rollout connect by name.

A service and the agent's sandbox share only TCP connections. Each has its own isolated network namespace.
``forwarding`` connects the two from outside. ``/etc/hosts`` in the agent's sandbox maps the service's name to a
loopback address. ``forwarding`` accepts connections at this address and forwards the bytes to the service's port. The
listening sockets exist before the agent's first command, so an agent cannot take a service's place.

``running`` starts and monitors one service. ``group`` starts the services of a rollout in order, and cancels the
rollout's work if one of them ends. ``node`` runs services that are shared by the rollouts of a node. Services of the
whole campaign run in their own Slurm jobs (``model/server/service.py``). ``remote`` connects to shared services of both
kinds.
"""
