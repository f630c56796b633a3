"""Masks secrets in stored verification results, both verbatim and in encodings that tools print."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from urllib.parse import quote, quote_plus

from megaflow_hpc.types import Verdict

MASK = b"[masked]"
MIN_SECRET_LENGTH = 6
"""Minimum length of a secret in characters. Masking shorter values would make test output unreadable."""


class Mask:
    """Masks secrets in bytes, strings and verdicts.

    Args:
        values: The secrets to mask.
    """

    def __init__(self, values: Iterable[str]) -> None:
        forms = {form for value in values if len(value) >= MIN_SECRET_LENGTH for form in _forms(value)}
        words = sorted(forms, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, words))) if words else None

    def data(self, data: bytes) -> bytes:
        """Returns ``data`` with all secrets masked."""
        return self._pattern.sub(MASK, data) if self._pattern else data

    def text(self, text: str) -> str:
        """Returns ``text`` with all secrets masked."""
        return self.data(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")

    def verdict(self, verdict: Verdict) -> Verdict:
        """Returns a verdict with all secrets masked in output, error, reward names and artifacts."""
        if self._pattern is None:
            return verdict
        return replace(
            verdict,
            rewards={self.text(name): value for name, value in verdict.rewards.items()},
            output=self.text(verdict.output),
            error=self.text(verdict.error),
            agent_error=self.text(verdict.agent_error),
            artifacts=[
                replace(artifact, name=self.text(artifact.name), data=self.data(artifact.data))
                for artifact in verdict.artifacts
            ],
        )


def _forms(value: str) -> Iterator[bytes]:
    raw = value.encode("utf-8", "surrogateescape")
    percent = [quote(raw, safe=safe) for safe in ("", "/", "/:?&=+,;@")] + [quote_plus(raw)]
    lower = [re.sub("%..", lambda match: match[0].lower(), text) for text in percent]
    yield raw
    for text in (*percent, *lower, json.dumps(value)[1:-1], raw.hex(), raw.hex().upper(), repr(value)[1:-1]):
        yield text.encode("utf-8", "surrogatepass")
    for offset in range(3):  # the base64 form depends on the value's byte offset modulo 3
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            encoded = encode(bytes(offset) + raw)
            form = encoded[-(-offset * 8 // 6) : (offset + len(raw)) * 8 // 6]
            if len(form) >= MIN_SECRET_LENGTH:
                yield form
