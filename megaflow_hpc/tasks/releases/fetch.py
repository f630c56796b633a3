"""Downloads source distributions with pip's configuration, without building them. Runs as a script.

``pip download`` of a source distribution also runs its build backend in a fresh environment. Building takes seconds,
and fails with old backends, but pip has no option to download only the file. This script therefore uses the internals
of pip's ``download`` command, which respect the user's indexes, credentials, certificates and proxies. If these
internals have changed (exit status :data:`CHANGED`), :mod:`~megaflow_hpc.tasks.releases.sdists` uses
``pip download`` instead.

``python fetch.py -d DIR NAME==VERSION…`` prints one JSON line per argument: ``[argument, file name or null]``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

CHANGED = 90


def main() -> int:
    """Downloads files like ``pip download``. Returns pip's exit status, or ``CHANGED`` if its internals changed."""
    try:
        from pip._internal.commands.download import DownloadCommand
        from pip._vendor.packaging.specifiers import SpecifierSet
    except ImportError:
        return CHANGED

    class Fetch(DownloadCommand):
        def run(self, options: Any, args: list[str]) -> int:
            session: Any = self.get_default_session(options)
            finder: Any = self._build_package_finder(options, session)
            for argument in args:
                name, _, version = argument.partition("==")
                best = finder.find_best_candidate(name, SpecifierSet(f"=={version}")).best_candidate
                if best is not None:
                    self.fetch(session, best.link, os.path.join(options.download_dir, best.link.filename))
                print(json.dumps([argument, best and best.link.filename]), flush=True)
            return 0

        def fetch(self, session: Any, link: Any, target: str) -> None:
            response = session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"})
            response.raise_for_status()
            if link.hash_name:
                import hashlib

                digest = hashlib.new(link.hash_name, response.content).hexdigest()
                if digest != link.hash:
                    raise ValueError(f"{link.filename}: {link.hash_name} is {digest}, the index says {link.hash}")
            with open(target, "wb") as file:
                file.write(response.content)

    try:
        return int(Fetch("fetch", "").main(["--no-binary", ":all:", "--no-input", *sys.argv[1:]]))
    except (AttributeError, TypeError):
        return CHANGED


if __name__ == "__main__":
    sys.exit(main())
