"""Access to the API server: tokens, the signing key of service accounts, and kubeconfigs."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

ADMIN: Final = "admin"
CONTROLLER_MANAGER: Final = "system:kube-controller-manager"
SCHEDULER: Final = "system:kube-scheduler"
PROXY: Final = "system:kube-proxy"
OPERATOR: Final = "kuberay-operator"
_GROUPS: Final = {ADMIN: "system:masters", CONTROLLER_MANAGER: "", SCHEDULER: "", PROXY: "", OPERATOR: "system:masters"}
_NODES: Final = "system:nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Credentials of all users, in the files of one directory.

    Attributes:
        directory: directory of these files and of the kubeconfigs.
        tokens: token of each user.
    """

    directory: Path
    tokens: dict[str, str]

    @property
    def token_file(self) -> Path:
        """File for ``--token-auth-file``: https://kubernetes.io/docs/reference/access-authn-authz/authentication/."""
        return self.directory / "tokens.csv"

    @property
    def service_account_key(self) -> Path:
        """Key that signs the tokens of service accounts."""
        return self.directory / "service-account.key"

    @property
    def kubelet_client_certificate(self) -> Path:
        """Certificate that the API server presents to kubelets, for logs and exec."""
        return self.directory / "kubelet-client.crt"

    @property
    def kubelet_client_key(self) -> Path:
        """Key of ``kubelet_client_certificate``."""
        return self.directory / "kubelet-client.key"

    def kubeconfig(self, server: str, ca_file: Path, *, user: str = ADMIN, token: str = "") -> Path:
        """Write a kubeconfig for a user or for a token.

        Args:
            server: URL of the API server.
            ca_file: CA of the API server's certificate.
            user: name of the context, cluster and user in the file.
            token: token of a service account; empty for the user's own token.
        """
        named = {
            "clusters": {"cluster": {"server": server, "certificate-authority": str(ca_file)}},
            "users": {"user": {"token": token or self.tokens[user]}},
            "contexts": {"context": {"cluster": user, "user": user}},
        }
        body = {kind: [{"name": user, **value}] for kind, value in named.items()}
        path = self.directory / f"{user.replace(':', '-')}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": user, **body}))
        return path


def kubelet_user(node: str) -> str:
    """Name of a kubelet's user for the node authorizer: https://kubernetes.io/docs/reference/access-authn-authz/node/."""
    return f"system:node:{node}"


def make_access(directory: Path, nodes: Sequence[str] = ()) -> Access:
    """Create new tokens and keys.

    Args:
        directory: directory for the files.
        nodes: names of the nodes with a kubelet.
    """
    groups = _GROUPS | {kubelet_user(node): _NODES for node in nodes}
    access = Access(directory=directory, tokens={user: secrets.token_hex(16) for user in groups})
    lines = [f'{access.tokens[user]},{user},{user},"{group}"' for user, group in groups.items()]
    access.token_file.touch(mode=0o600)
    access.token_file.write_text("\n".join(lines) + "\n")
    _write_key(access.service_account_key)
    if nodes:
        _write_certificate(access.kubelet_client_certificate, _write_key(access.kubelet_client_key))
    return access


def _write_key(path: Path) -> rsa.RSAPrivateKey:
    key = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    path.touch(mode=0o600)
    path.write_bytes(pem)
    return key


def _write_certificate(path: Path, key: rsa.RSAPrivateKey) -> None:
    """Write a self-signed certificate: kubelets trust this one certificate and no CA."""
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, "kube-apiserver"),
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, _GROUPS[ADMIN]),
        ]
    )
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=365))
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
