"""Creates a TLS certificate for one start of one server. Clients trust it by its fingerprint alone.

The fingerprint is stored in the endpoint file, which only the campaign's user can read. The gateway checks it after
the handshake, before it sends any data. So a process that takes over a dead server's port sees neither key nor prompt.
Certificate authorities, host names and validity dates are not used.
"""

from __future__ import annotations

import datetime
import hashlib
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

VALIDITY_DAYS = 3650
"""Gateways ignore the validity period, but some TLS stacks reject certificates that expire soon."""


def make_context(private: Path) -> tuple[ssl.SSLContext, str]:
    """Returns a TLS context with a new key, and the SHA-256 of its certificate in hexadecimal.

    Args:
        private: A directory of mode 0700. The key is written there only while it is loaded.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "megaflow-hpc engine")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALIDITY_DAYS))
        .sign(key, hashes.SHA256())
    )
    der = certificate.public_bytes(serialization.Encoding.DER)
    pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file = private / "tls.pem"
    file.touch(mode=0o600)
    file.write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(file)
    file.unlink()
    return context, hashlib.sha256(der).hexdigest()
