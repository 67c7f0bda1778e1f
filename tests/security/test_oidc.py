"""Forged, stolen and misdirected tokens, and people who sign in at a real OpenID Connect issuer."""

import base64
import hashlib
import hmac
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import jwt
import openai
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm

from service.adapters.memory_object_store import MemoryObjectStore
from service.api.app import create_app
from service.backends import Backends
from service.db import Pool
from service.oidc.section import OidcSection
from service.oidc.tokens import RETRY_S, Issuer, Keys, KeysError, TokenError
from service.projects import Project, archive_project, create_project
from tests.integration.reconciler_harness import KEYS
from tests.security.serving import served

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the package uses a module of authlib that authlib calls deprecated
    from oidc_provider_mock import User, run_server_in_thread

# The package's own use of authlib; its server runs in this process.
pytestmark = pytest.mark.filterwarnings("ignore:get_jwt_config:DeprecationWarning")

ISSUER = "https://login.acme.example/realms/acme"
KEY = generate_private_key(SECP256R1())
SIGNING_KEY = Ed25519PrivateKey.generate()
PUBLIC = {
    "keys": [
        {**json.loads(ECAlgorithm.to_jwk(KEY.public_key())), "kid": "one", "use": "sig"},
        {**json.loads(OKPAlgorithm.to_jwk(SIGNING_KEY.public_key())), "kid": "two"},
        {**json.loads(ECAlgorithm.to_jwk(KEY.public_key())), "kid": "encryption", "use": "enc"},
        {"kty": "oct", "kid": "shared", "alg": "HS256", "k": base64.urlsafe_b64encode(b"x" * 32).decode()},
    ]
}
GRANTS = [
    {"group": "ml", "project": "research"},
    {"group": "ops", "project": "research", "scopes": ["read", "admin"]},
]


def section(**changes: Any) -> OidcSection:
    given = {"issuer": ISSUER, "audience": "cloister", "jwks": json.dumps(PUBLIC), "grants": GRANTS}
    return OidcSection.model_validate({key: value for key, value in {**given, **changes}.items() if value is not None})


def token(
    key: Any = KEY, algorithm: str = "ES256", kid: str | None = "one", leave_out: str = "", **changes: Any
) -> str:
    now = int(time.time())
    claims = {"iss": ISSUER, "aud": "cloister", "sub": "alice", "iat": now, "exp": now + 300, "groups": ["ml"]}
    claims = {name: value for name, value in {**claims, **changes}.items() if name != leave_out}
    return jwt.encode(claims, key, algorithm, headers={"kid": kid} if kid else None)


def signed_with_the_public_key() -> str:
    """Sign with HMAC, with the public key as the secret: a verifier that trusts the header accepts it."""
    pem = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    header = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "typ": "JWT", "kid": "one"}).encode()).rstrip(b"=")
    content = header + b"." + token().split(".")[1].encode()
    signature = base64.urlsafe_b64encode(hmac.digest(pem, content, hashlib.sha256)).rstrip(b"=")
    return (content + b"." + signature).decode()


def with_other_claims() -> str:
    header, _, signature = token().split(".")
    return ".".join((header, token(sub="mallory", groups=["ops"]).split(".")[1], signature))


ATTACKS: dict[str, Callable[[], str]] = {
    "another issuer": lambda: token(iss="https://login.evil.example"),
    "another audience": lambda: token(aud="another-service"),
    "no audience": lambda: token(leave_out="aud"),
    "no issuer": lambda: token(leave_out="iss"),
    "no expiry": lambda: token(leave_out="exp"),
    "no subject": lambda: token(leave_out="sub"),
    "an empty subject": lambda: token(sub=""),
    "a subject with a line break": lambda: token(sub="alice\noperator"),
    "expired": lambda: token(exp=int(time.time()) - 60),
    "not valid yet": lambda: token(nbf=int(time.time()) + 600),
    "issued in the future": lambda: token(iat=int(time.time()) + 600),
    "no signature": lambda: token(key=None, algorithm="none"),
    "an empty signature": lambda: token().rpartition(".")[0] + ".",
    "the public key as a secret": signed_with_the_public_key,
    "a symmetric key of the public set": lambda: token(key=b"x" * 32, algorithm="HS256", kid="shared"),
    "a key for encryption": lambda: token(kid="encryption"),
    "the key of someone else": lambda: token(key=generate_private_key(SECP256R1())),
    "a known id with another algorithm": lambda: token(key=SIGNING_KEY, algorithm="EdDSA", kid="one"),
    "an unknown key": lambda: token(kid="three"),
    "no key": lambda: token(kid=None),
    "other claims under a signature": with_other_claims,
    "no token": lambda: "a.b.c",
    "broken encoding": lambda: "ä.ö.ü",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_forged_token_is_refused(attack: Callable[[], str]) -> None:
    with pytest.raises(TokenError) as raised:
        Issuer(section()).verify(attack())
    assert "alice" not in str(raised.value)


@pytest.mark.parametrize(("key", "algorithm", "kid"), [(KEY, "ES256", "one"), (SIGNING_KEY, "EdDSA", "two")])
def test_token_of_the_issuer_is_accepted(key: Any, algorithm: str, kid: str) -> None:
    person = Issuer(section()).verify(token(key, algorithm, kid, aud=["another", "cloister"]))
    assert (person.subject, person.scopes) == ("alice", {"research": {"read", "submit"}})


@pytest.mark.parametrize("groups", [["strangers"], [], None, {"ml": True}, [["ml"]], "mlx", 1])
def test_unknown_group_grants_nothing(groups: Any) -> None:
    assert Issuer(section()).verify(token(groups=groups)).scopes == {}


def test_groups_of_a_person_add_up() -> None:
    person = Issuer(section(groups_claim="roles")).verify(token(roles=["ml", "ops", "strangers"], groups=[]))
    assert person.scopes == {"research": {"read", "submit", "admin"}}


@pytest.mark.parametrize("jwks", ["", "[]", "{}", '{"keys": []}', json.dumps({"keys": PUBLIC["keys"][2:]})])
def test_key_set_without_a_usable_key_is_an_error(jwks: str) -> None:
    with pytest.raises(KeysError):
        Issuer(section(jwks=jwks))


@pytest.mark.parametrize(
    "changes",
    [{"issuer": "http://login.acme.example"}, {"jwks_url": "https://login.acme.example/certs"}, {"jwks": None}],
)
def test_unsafe_or_ambiguous_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"https://|jwks_url"):
        section(**changes)


@contextmanager
def issuer(**settings: Any) -> Iterator[str]:
    users = [User(sub="alice", claims={"groups": ["ml"]}), User(sub="bob", claims={"groups": ["ml", "ops"]})]
    with run_server_in_thread(user_claims=users, **settings) as server:
        yield f"http://localhost:{server.server_port}"


def sign_in(issuer_url: str, person: str, audience: str = "cloister") -> str:
    """Sign in as a browser and a client do, by the flow with an authorization code; return the token."""
    redirect = "https://app.example/signed-in"
    query = {"client_id": audience, "redirect_uri": redirect, "response_type": "code", "scope": "openid"}
    answer = httpx.post(f"{issuer_url}/oauth2/authorize", params=query, data={"sub": person})
    (code,) = parse_qs(urlsplit(answer.headers["location"]).query)["code"]
    form = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect}
    answer = httpx.post(f"{issuer_url}/oauth2/token", data=form, auth=(audience, "secret"))
    return str(answer.json()["id_token"])


@pytest.fixture(scope="module")
def issuer_url() -> Iterator[str]:
    with issuer() as opened:
        yield opened


def settings_of(issuer_url: str, *grants: dict[str, Any]) -> OidcSection:
    return section(issuer=issuer_url, jwks=None, jwks_url=f"{issuer_url}/jwks", grants=list(grants))


@contextmanager
def api(pool: Pool, oidc: OidcSection) -> Iterator[str]:
    backends = Backends(pool=pool, store=MemoryObjectStore(), oidc=Issuer(oidc), encryption_keys=KEYS)
    with served(create_app(backends)) as url:
        yield f"{url}/v1"


def test_person_who_signed_in_reads_and_submits_in_the_project_of_their_group(
    issuer_url: str, api_pool: Pool, project: Project, api_key: str
) -> None:
    oidc = settings_of(issuer_url, {"group": "ml", "project": project.name})
    with api(api_pool, oidc) as url, openai.OpenAI(base_url=url, api_key=sign_in(issuer_url, "alice")) as client:
        client.batches.create(input_file_id="file-none", endpoint="/v1/completions", completion_window="24h")
        assert len(openai.OpenAI(base_url=url, api_key=api_key).batches.list().data) == 1
        with pytest.raises(openai.PermissionDeniedError, match="Missing scopes: admin"):
            client.webhooks.list()


def test_person_in_several_projects_selects_one(issuer_url: str, api_pool: Pool, project: Project) -> None:
    second, hidden = (create_project(api_pool, f"{name} of {project.name}") for name in ("second", "hidden"))
    grants = [{"group": "ml", "project": project.name}, {"group": "ops", "project": second.name}]
    bob = sign_in(issuer_url, "bob")

    def answer(selected: str) -> httpx.Response:
        return httpx.get(
            f"{url}/batches", headers={"authorization": f"Bearer {bob}", "openai-project": selected}, timeout=20
        )

    with api(api_pool, settings_of(issuer_url, *grants)) as url:
        assert [answer(each).status_code for each in (project.id, second.name)] == [200, 200]
        assert answer("").json()["error"]["code"] == "project_required"
        for each in (hidden.id, hidden.name, "none"):
            assert (answer(each).status_code, answer(each).json()["error"]["code"]) == (403, "project_not_allowed")
        archive_project(api_pool, second)
        assert answer(second.id).status_code == 403


def test_token_for_another_client_of_the_issuer_gets_401(issuer_url: str, api_pool: Pool, project: Project) -> None:
    oidc = settings_of(issuer_url, {"group": "ml", "project": project.name})
    stolen = sign_in(issuer_url, "alice", audience="another-service")
    with api(api_pool, oidc) as url, openai.OpenAI(base_url=url, api_key=stolen, max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="another audience") as raised:
            client.batches.list()
        assert raised.value.code == "invalid_api_key"
        for _ in range(20):
            refused = httpx.get(f"{url}/batches", headers={"authorization": f"Bearer {stolen}"})
        assert refused.status_code == 429


def test_audit_log_names_the_person(issuer_url: str, api_pool: Pool, project: Project) -> None:
    oidc = settings_of(issuer_url, {"group": "ops", "project": project.name, "scopes": ["admin"]})
    with api(api_pool, oidc) as url, openai.OpenAI(base_url=url, api_key=sign_in(issuer_url, "bob")) as client:
        client.webhooks.create(url="https://host.example/hook", name="", event_types=["batch.failed"])
        newest = client.get("/organization/audit_logs", cast_to=httpx.Response).json()["data"][0]
    assert newest["type"].startswith("webhook")
    session = {"ip_address": "127.0.0.1", "user": {"id": "bob"}}
    assert (newest["actor"]["type"], newest["actor"]["session"]) == ("session", session)


def test_unknown_keys_cause_one_request_in_an_interval_and_known_ones_survive_the_issuer(issuer_url: str) -> None:
    now, requests = 0.0, 0
    oidc = settings_of(issuer_url, {"group": "ml", "project": "research"})

    class Counted(Keys):
        def _read(self) -> None:
            nonlocal requests
            requests += 1
            super()._read()

    keys = Counted(oidc, clock=lambda: now)
    valid = sign_in(issuer_url, "alice")
    accepting = Issuer(oidc, keys=keys)
    accepting.verify(valid)
    for number in range(20):
        with pytest.raises(TokenError):
            accepting.verify(token(kid=f"unknown-{number}"))
    assert requests == 1
    now = RETRY_S
    for number in range(20):
        with pytest.raises(TokenError):
            accepting.verify(token(kid=f"unknown-{number}"))
    assert requests == 2
    keys._url, now = "http://localhost:9/jwks", 10_000.0
    with pytest.raises(TokenError):
        accepting.verify(token(kid="unknown"))
    assert accepting.verify(valid).subject == "alice"


@pytest.mark.slow
def test_stream_ends_with_the_token(api_pool: Pool, project: Project) -> None:
    with issuer(access_token_max_age=timedelta(seconds=3)) as url:
        oidc = settings_of(url, {"group": "ml", "project": project.name})
        with api(api_pool, oidc) as base_url:
            held = sign_in(url, "alice")
            client = openai.OpenAI(base_url=base_url, api_key=held)
            batch = client.batches.create(
                input_file_id="file-none", endpoint="/v1/completions", completion_window="24h"
            )
            headers, began = {"authorization": f"Bearer {held}"}, time.monotonic()
            with httpx.stream("GET", f"{base_url}/batches/{batch.id}/events", headers=headers, timeout=20) as answer:
                assert answer.status_code == 200
                list(answer.iter_lines())
            assert time.monotonic() - began < 6
