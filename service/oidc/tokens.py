"""Verification of the tokens of an OpenID Connect issuer, and what they grant.

Sources: https://openid.net/specs/openid-connect-core-1_0.html#IDTokenValidation and, for the attacks,
https://www.rfc-editor.org/rfc/rfc8725 (best practices for JSON Web Tokens).
"""

import math
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock, Thread
from typing import Any, Final

import httpx
import jwt
import structlog

from service.errors import CloisterError
from service.oidc.section import OidcSection
from service.scopes import Scope

logger = structlog.get_logger(__name__)

_ALGORITHMS: Final = ("RS256", "ES256", "EdDSA")
_LEEWAY_S: Final = 30
REFRESH_S: Final = 600.0
"""Seconds after which the issuer's keys are read again in the background."""
RETRY_S: Final = 30.0
"""The shortest interval between two reads, however many tokens name an unknown key."""
_TIMEOUT_S: Final = 5.0
_MAX_SUBJECT_LENGTH: Final = 255


class TokenError(CloisterError):
    """A token that is refused. The message has the reason, and no value of the token."""


class KeysError(CloisterError):
    """A key set that cannot be used. The message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """The holder of a valid token.

    Attributes:
        subject: the issuer's id of the person, which it never gives to another one.
        expires_at: when the token expires; aware.
        scopes: permissions by the name of the project; empty if no group of the person has a grant.
    """

    subject: str
    expires_at: datetime
    scopes: Mapping[str, frozenset[Scope]]


class Keys:
    """The public keys of an issuer. It is safe to use from several threads.

    Keys that were read once stay valid while the issuer is unreachable.

    Args:
        section: names the URL, or holds the keys.
        clock: returns monotonic seconds.

    Raises:
        KeysError: the keys in ``section`` cannot be used.
    """

    def __init__(self, section: OidcSection, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = section.jwks_url
        self._clock = clock
        self._keys: dict[str, jwt.PyJWK] = {} if section.jwks is None else _parse_keys(section.jwks)
        self._tried_at = -math.inf
        self._lock = Lock()
        self._reading = Lock()

    def find(self, key_id: str | None) -> jwt.PyJWK | None:
        """Return the key of an id; read the keys if it is unknown, and in the background if they are old.

        A token without an id is of the issuer's only key.
        """
        if (found := self._known(key_id)) is not None:
            if self._is_due(REFRESH_S):
                Thread(target=self._read, name="oidc-keys", daemon=True).start()
            return found
        # One thread reads; others with an unknown key wait for it. Known keys do not.
        with self._reading:
            if self._known(key_id) is None and self._is_due(RETRY_S):
                self._read()
        return self._known(key_id)

    def _known(self, key_id: str | None) -> jwt.PyJWK | None:
        keys = self._keys
        if key_id is None:
            return next(iter(keys.values())) if len(keys) == 1 else None
        return keys.get(key_id)

    def _is_due(self, interval_s: float) -> bool:
        """Return whether the last read began so long ago; then another one begins now."""
        with self._lock:
            if self._url is None or self._clock() - self._tried_at < interval_s:
                return False
            self._tried_at = self._clock()
            return True

    def _read(self) -> None:
        try:
            # The system's certificates, or those in SSL_CERT_FILE: a private issuer often has its own authority.
            trust = ssl.create_default_context()
            with httpx.Client(verify=trust, trust_env=False, follow_redirects=False, timeout=_TIMEOUT_S) as client:
                self._keys = _parse_keys(client.get(str(self._url)).raise_for_status().text)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, KeysError) as error:
            logger.warning("oidc.keys_not_read", url=self._url, error=type(error).__name__, known=len(self._keys))


def _parse_keys(text: str) -> dict[str, jwt.PyJWK]:
    """Return the keys for signatures by their ids. Symmetric keys in a public set are left out: everyone has them.

    Raises:
        KeysError: the text is no key set, or has no such key.
    """
    try:
        found = jwt.PyJWKSet.from_json(text)
    except (jwt.PyJWTError, ValueError, AttributeError, TypeError) as error:
        raise KeysError("the issuer's keys are no JSON Web Key Set with a key that can be used") from error
    keys = {
        key.key_id: key
        for key in found.keys
        if key.key_id and key.algorithm_name in _ALGORITHMS and key.public_key_use in {None, "sig"}
    }
    if not keys:
        raise KeysError(f"the issuer's key set has no key with an id for {', '.join(_ALGORITHMS)}")
    return keys


class Issuer:
    """The issuer whose tokens a stack accepts.

    Args:
        section: its settings.
        keys: its public keys; by default those that the section names.

    Raises:
        KeysError: see ``Keys``.
    """

    def __init__(self, section: OidcSection, *, keys: Keys | None = None) -> None:
        self._section = section
        self._keys = keys or Keys(section)

    def verify(self, token: str) -> Person:
        """Return the holder of a token.

        Raises:
            TokenError: the token is invalid.
        """
        section = self._section
        try:
            header = jwt.get_unverified_header(token)
            key = self._keys.find(header.get("kid"))
            # The key decides on the algorithm. A token that names another one is an attack or a mistake.
            if key is None or header.get("alg") != key.algorithm_name:
                raise TokenError("it is not signed with a key of the issuer")
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=section.audience,
                issuer=section.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iat", "iss", "aud", "sub"]},
            )
        except jwt.ExpiredSignatureError as error:
            raise TokenError("it has expired; sign in again") from error
        except jwt.InvalidIssuerError as error:
            raise TokenError("it is of another issuer") from error
        except jwt.InvalidAudienceError as error:
            raise TokenError("it is for another audience") from error
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise TokenError("it is malformed, not valid yet, or its signature is wrong") from error
        return self._person(claims)

    def _person(self, claims: Mapping[str, Any]) -> Person:
        subject = claims["sub"]
        if not (subject and len(subject) <= _MAX_SUBJECT_LENGTH and subject.isprintable()):
            raise TokenError("its subject is empty, too long or not printable")
        given = claims.get(self._section.groups_claim)
        groups = {given} if isinstance(given, str) else set(filter(_is_text, given)) if isinstance(given, list) else ()
        scopes: dict[str, frozenset[Scope]] = {}
        for grant in self._section.grants:
            if grant.group in groups:
                scopes[grant.project] = scopes.get(grant.project, frozenset()) | frozenset(grant.scopes)
        return Person(subject=subject, expires_at=datetime.fromtimestamp(claims["exp"], UTC), scopes=scopes)


def _is_text(value: object) -> bool:
    return isinstance(value, str)
