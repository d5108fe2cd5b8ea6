"""Keys and certificates of one throw-away cluster.

In: a folder and the names and addresses that the API server answers to. Out: files in that folder:
``ca.crt``, ``apiserver.crt``/``.key`` signed by it, and the RSA pair ``sa.key``/``sa.pub`` that
signs service account tokens. The CA's key is never written. Knows nothing of the processes.
"""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

_LIFETIME = timedelta(days=365)


def write_certificates(folder: Path, names: list[str], addresses: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "plimsoll-local-ca")])
    ca = _builder(ca_name, ca_name, ca_key.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-apiserver")])
    serving = _builder(subject, ca_name, key.public_key()).add_extension(
        x509.SubjectAlternativeName(
            [
                *(x509.DNSName(name) for name in names),
                *(x509.IPAddress(ipaddress.ip_address(address)) for address in addresses),
            ]
        ),
        critical=False,
    )
    _write_certificate(folder / "ca.crt", ca.sign(ca_key, hashes.SHA256()))
    _write_certificate(folder / "apiserver.crt", serving.sign(ca_key, hashes.SHA256()))
    _write_key(folder / "apiserver.key", key)
    service_accounts = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    _write_key(folder / "sa.key", service_accounts)
    (folder / "sa.pub").write_bytes(
        service_accounts.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + _LIFETIME)
    )


def _write_certificate(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
