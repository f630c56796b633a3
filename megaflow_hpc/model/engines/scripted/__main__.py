"""``python -m megaflow_hpc.model.engines.scripted``: a scripted engine on a socket or port."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.address import LOOPBACK
from megaflow_hpc.model.engines.scripted.engine import ScriptedEngine
from megaflow_hpc.model.engines.scripted.script import Script, load


def main(argv: Sequence[str] | None = None) -> None:
    """Serves a script until a signal arrives. Exits with a message if the script is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m megaflow_hpc.model.engines.scripted", description="answers from a script"
    )
    parser.add_argument("--script", type=Path)
    parser.add_argument("--served-model-name", default="scripted")
    parser.add_argument("--max-model-len", type=int, default=1_000_000)
    parser.add_argument("--slots", type=int, default=0, help="concurrent answers; default: unlimited")
    parser.add_argument("--node-rank", type=int, default=0, help="of an engine over several nodes")
    parser.add_argument("--headless", action="store_true", help="serve nothing: another node does")
    listen = parser.add_mutually_exclusive_group(required=True)
    listen.add_argument("--uds")
    listen.add_argument("--port", type=int, help="on 127.0.0.1")
    arguments = parser.parse_args(argv)
    if arguments.headless:
        signal.pause()
    try:
        script = load(arguments.script) if arguments.script else Script()
    except ConfigError as error:
        raise SystemExit(f"error: invalid script: {error}") from None
    engine = ScriptedEngine(script, arguments.served_model_name, arguments.max_model_len, arguments.slots)
    address: dict[str, Any] = {"path": arguments.uds} if arguments.uds else {"host": LOOPBACK, "port": arguments.port}
    web.run_app(
        engine.application(), **address, access_log=None, print=lambda *_: print(json.dumps(address), flush=True)
    )


if __name__ == "__main__":
    main()
