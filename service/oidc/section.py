"""The section ``oidc`` of a stack file, which the service reads from ``CLOISTER_OIDC`` as JSON."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from service.config_sections import Section, key
from service.scopes import Scope


def _check_https(value: str) -> str:
    parts = urlsplit(value)
    is_local = parts.hostname in {"127.0.0.1", "::1", "localhost"}
    if not parts.hostname or parts.password or not (parts.scheme == "https" or (parts.scheme == "http" and is_local)):
        raise ValueError("must be an https:// URL without a password")
    return value


HttpsUrl = Annotated[str, AfterValidator(_check_https)]


class GrantSection(Section):
    """Permissions of the members of a group in a project."""

    group: Annotated[str, Field(min_length=1)] = key("the group, as tokens name it", "ml-team")
    project: Annotated[str, Field(min_length=1)] = key("name of the project, which must exist", "research")
    scopes: Annotated[list[Annotated[Scope, BeforeValidator(Scope)]], Field(min_length=1)] = key(
        "the permissions, as those of an API key", ["read", "submit"], default=[Scope.READ, Scope.SUBMIT]
    )


class OidcSection(Section):
    """Sign-in of people with tokens of one OpenID Connect issuer. API keys keep working."""

    issuer: HttpsUrl = key(
        "the issuer, exactly as its tokens name it (`iss`)", "https://login.acme.example/realms/acme"
    )
    audience: Annotated[str, Field(min_length=1)] = key("the audience that tokens must name (`aud`)", "cloister")
    jwks_url: HttpsUrl | None = key(
        "URL of the issuer's public keys, read every ten minutes; `network.oidc_networks` must allow it",
        "https://login.acme.example/realms/acme/certs",
        default=None,
    )
    jwks: str | None = key("instead: the public keys themselves, a JSON Web Key Set", '{"keys": […]}', default=None)
    groups_claim: Annotated[str, Field(min_length=1)] = key(
        "the claim with the groups of a person", "roles", default="groups"
    )
    grants: Annotated[list[GrantSection], Field(min_length=1)] = key("what groups may do; see below", [])

    @model_validator(mode="after")
    def _check_keys(self) -> "OidcSection":
        if (self.jwks_url is None) == (self.jwks is None):
            raise ValueError("needs one of jwks_url and jwks")
        return self
