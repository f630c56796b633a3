"""Services: programs in sandboxes of their own, which the sandboxes of a rollout reach by name.

A service shares nothing with the agent's sandbox but TCP connections. Each has a network namespace of its own, without
a way out. ``forwarding`` joins two such namespaces from outside, connection by connection: the agent's sandbox listens
at a loopback address that ``/etc/hosts`` gives the service's name, and this process carries the bytes to the service's
port. The listening sockets exist before the agent's first command, so an agent cannot take a service's place.

``running`` starts one service, checks its health and notices its end. ``group`` starts the services of a rollout in
order, and ends a rollout's work when one of them ends. Rollouts share services of a ``node``, and those that run in
jobs of the campaign (``model/server/service.py``); ``remote`` connects to both.
"""
