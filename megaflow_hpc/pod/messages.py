"""What the ranks of a pod say to each other. ``op`` names a message; the packing is :mod:`megaflow_hpc.host.wire`.

Master to worker: ``init`` ``start`` ``cancel`` ``endpoints`` ``images`` ``suspend`` ``mirror`` ``beat`` ``stop``.
Worker to master: ``ready`` ``result`` ``activity`` ``transcript`` ``beat`` ``left``;
a rank beside an engine server says ``engine`` for ``ready``.
"""

from __future__ import annotations

from megaflow_hpc.host.wire import pack

BEAT, STOP = pack({"op": "beat"}), pack({"op": "stop"})
"""Each travels as a parcel of its own, so that a rank knows it unopened."""
