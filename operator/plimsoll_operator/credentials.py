"""Makes what the control channel is secured with: a self-signed certificate and a bearer token.

In: the name of an LLMDeployment and the time. Out: :class:`Credentials`, kept in the deployment's Secret.
The certificate is its own authority: client and server hold the same one, and it names no address,
because pods come and go; the client asks for SERVER_NAME instead.

Rotation: new ones are put into the Secret, with the certificate and token before them. The kubelet hands
a changed Secret on within a minute or two, and engines read it with every handshake and call, so no pod
is restarted; until OVERLAP_SECONDS have passed the client tries both (control.py).
"""

from __future__ import annotations

import datetime
import secrets
from dataclasses import replace

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from plimsoll_operator.observed import Credentials
from plimsoll_operator.spec import Deployment

SERVER_NAME = "engine.plimsoll.dev"
# Of a deployment whose credentials are not rotated the channel must outlast everything.
VALIDITY = datetime.timedelta(days=10 * 365)
CLOCK_SKEW = datetime.timedelta(hours=1)
# A kubelet hands a Secret on within its sync period and the life of its cache: 2 minutes by default.
OVERLAP_SECONDS = 600.0

# All that parsing raises.
_UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
)


def renew_credentials(
    found: Credentials | None, deployment: Deployment, now: float, *, rotate_after: float | None
) -> Credentials:
    """Those that were found, if they are younger than ``rotate_after`` seconds (None: any), with what
    they lack."""
    credentials = found or make_credentials(deployment.name, now)
    age = now - _made_at(credentials)
    if rotate_after is not None and age >= rotate_after:
        previous = Credentials(credentials.certificate, b"", credentials.token)
        fresh = make_credentials(deployment.name, now)
        credentials = replace(fresh, group=credentials.group, previous=previous)
    elif age >= OVERLAP_SECONDS:
        credentials = replace(credentials, previous=None)
    if deployment.in_groups and not credentials.group:
        return replace(credentials, group=make_token())
    return credentials


def _made_at(credentials: Credentials) -> float:
    certificate = x509.load_pem_x509_certificate(credentials.certificate)
    return (certificate.not_valid_before_utc + CLOCK_SKEW).timestamp()


def make_credentials(deployment: str, now: float) -> Credentials:
    """A fresh P-256 key, its certificate for SERVER_NAME, and a token of 256 random bits."""
    key = ec.generate_private_key(ec.SECP256R1())
    start = datetime.datetime.fromtimestamp(now, datetime.UTC) - CLOCK_SKEW
    # A common name holds at most 64 characters.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"plimsoll {deployment}"[:64])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + VALIDITY)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Credentials(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        token=make_token(),
    )


def make_token() -> bytes:
    """256 random bits, as text that fits into a header."""
    return secrets.token_urlsafe(32).encode()


def are_usable(credentials: Credentials) -> bool:
    """A certificate for SERVER_NAME, its own key and a token that fits into a header. Somebody may
    have written anything into the Secret."""
    try:
        certificate = x509.load_pem_x509_certificate(credentials.certificate)
        key = serialization.load_pem_private_key(credentials.key, password=None)
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        token = credentials.token.decode("ascii")
    except _UNREADABLE:
        return False
    names = alternatives.value.get_values_for_type(x509.DNSName)
    same = certificate.public_key() == key.public_key()
    # The engine strips white space around its files; a token with any would never match.
    return same and SERVER_NAME in names and token.isprintable() and token.split() == [token]
