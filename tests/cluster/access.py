"""Who may talk to the API server: tokens, the key of service accounts' tokens, and kubeconfigs."""

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

ADMIN: Final = "admin"
CONTROLLER_MANAGER: Final = "system:kube-controller-manager"
SCHEDULER: Final = "system:kube-scheduler"
OPERATOR: Final = "kuberay-operator"
_GROUPS: Final = {ADMIN: "system:masters", CONTROLLER_MANAGER: "", SCHEDULER: "", OPERATOR: "system:masters"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The files of a directory that say who is who.

    Attributes:
        directory: of these files and of the kubeconfigs.
        tokens: by user.
    """

    directory: Path
    tokens: dict[str, str]

    @property
    def token_file(self) -> Path:
        """For ``--token-auth-file``: https://kubernetes.io/docs/reference/access-authn-authz/authentication/."""
        return self.directory / "tokens.csv"

    @property
    def service_account_key(self) -> Path:
        """Signs the tokens of service accounts."""
        return self.directory / "service-account.key"

    def kubeconfig(self, server: str, ca_file: Path, *, user: str = ADMIN, token: str = "") -> Path:
        """Writes the kubeconfig of a user, or that of a given token; its context is named like its user.

        Args:
            server: the API server's URL.
            ca_file: who signed its certificate.
            user: the name of context, cluster and user in it.
            token: of a service account; empty for that of the user.
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


def make_access(directory: Path) -> Access:
    """Makes new tokens and a new key."""
    access = Access(directory=directory, tokens={user: secrets.token_hex(16) for user in _GROUPS})
    lines = [f'{access.tokens[user]},{user},{user},"{group}"' for user, group in _GROUPS.items()]
    access.token_file.touch(mode=0o600)
    access.token_file.write_text("\n".join(lines) + "\n")
    key = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    access.service_account_key.touch(mode=0o600)
    access.service_account_key.write_bytes(pem)
    return access
