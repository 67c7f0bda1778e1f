"""The backends as the settings of a pod name them: the database, the object store and the launcher."""

import contextlib
import hashlib
import secrets
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import psycopg

from ray_job.contract.cluster import LAUNCHER_RIGHTS, MIN_POSTGRES
from ray_job.contract.job_spec import JobSpec
from ray_job.contract.rayjobs import GROUP, PLURAL, VERSION
from service.adapters.open_launcher import open_launcher
from service.adapters.open_object_store import open_object_store
from service.adapters.rayjob_templates import load_templates, rayjob
from service.db import migrations, query
from service.db.login import connection_string
from service.doctor.findings import ClusterError, Finding
from service.errors import LauncherError, ObjectNotFoundError, ObjectStoreError, ObjectVersionsError, SettingsError
from service.model_catalogue import Catalogue
from service.ports import ObjectStore
from service.settings import Settings

if TYPE_CHECKING:
    from service.doctor.cluster_api import ClusterApi

_CONNECT_TIMEOUT_S: Final = 5
_QUERY_TIMEOUT_S: Final = 10.0

PREFIX: Final = "doctor/"
"""The object that the check writes is below this prefix."""
SIZE_BYTES: Final = (16 << 20) + 1
"""One byte more than an S3 store sends in one request, so that the check covers multipart uploads."""
_CHUNK_BYTES: Final = 1 << 20
_NO_BUCKET: Final = "the bucket does not exist: create it, or correct its name"
_NO_RIGHT: Final = "the key lacks a permission: it must list, read, write and delete below the prefix"
_NO_ANSWER: Final = "no answer: check that it runs and that a network policy allows this pod to reach it"
_ADVICE: Final = {
    "NoSuchBucket": _NO_BUCKET,
    "404": _NO_BUCKET,
    "InvalidAccessKeyId": "the store does not know this access key",
    "SignatureDoesNotMatch": "the secret key or the region is wrong",
    "AuthorizationHeaderMalformed": "the region is wrong",
    "AccessDenied": _NO_RIGHT,
    "403": _NO_RIGHT,
    "EndpointConnectionError": _NO_ANSWER,
    "ConnectTimeoutError": _NO_ANSWER,
    "SSLError": "the image trusts no issuer of its certificate (images/README.md)",
    "NoCredentialsError": "AWS_SHARED_CREDENTIALS_FILE names no file with a key",
}

REQUIRED: Final = tuple(
    (verb, f"{right.resource}.{right.group}".rstrip("."), name)
    for right in LAUNCHER_RIGHTS
    for verb in right.verbs
    for name in right.names or ("",)
)
"""Permissions of the launcher's account, as (verb, resource, name of the object; empty for all)."""
FORBIDDEN: Final = (
    ("create", "pods"),
    ("create", "pods/exec"),
    ("get", "pods/log"),
    ("get", "secrets"),
    ("list", "secrets"),
    ("create", "serviceaccounts/token"),
    ("create", "rolebindings.rbac.authorization.k8s.io"),
    ("update", "roles.rbac.authorization.k8s.io"),
    ("update", f"{PLURAL}.{GROUP}"),
)
"""With any of these, an attacker in a pod of the reconciler could take over the namespace of jobs."""


def check_database(settings: Settings, *, query_timeout_s: float = _QUERY_TIMEOUT_S) -> Iterator[Finding]:
    """Check the server, and whether all migrations of this version are applied.

    Args:
        settings: the settings of the service.
        query_timeout_s: the time limit of one query, in seconds.
    """
    try:
        connection = psycopg.connect(
            connection_string(settings.database_url), connect_timeout=_CONNECT_TIMEOUT_S, autocommit=True
        )
    except psycopg.Error as error:
        # libpq's message names host, port, user and database, never the password.
        yield Finding.failed(
            "database",
            f"CLOISTER_DATABASE_URL: {' '.join(str(error).split())}. Check that Postgres runs, that a network policy "
            "allows this pod to reach it, and that role, password (PGPASSFILE) and TLS are right",
        )
        return
    try:
        with connection:
            connection.execute("SELECT set_config('statement_timeout', %s, false)", [f"{query_timeout_s * 1000:.0f}"])
            info, problems = connection.info, []
            if info.server_version < MIN_POSTGRES * 10_000:
                problems.append(f"a stack needs {MIN_POSTGRES} or newer: upgrade it")
            if (encoding := info.parameter_status("server_encoding")) != "UTF8":
                problems.append(f"its encoding is {encoding}: create the database again with ENCODING 'UTF8'")
            if connection.execute("SELECT WHERE pg_is_in_recovery()").rowcount:
                problems.append("it is a standby, which accepts no writes: name the primary in CLOISTER_DATABASE_URL")
            version = f"{info.server_version // 10_000}.{info.server_version % 10_000}"
            where = f"PostgreSQL {version} at {info.host}:{info.port}"
            if problems:
                yield Finding.failed("database", f"{where}: {'; '.join(problems)}")
            else:
                yield Finding.ok("database", where)
            try:
                applied = {row[0] for row in connection.execute(query("migrations_that_ran"))}
            except psycopg.errors.UndefinedTable:
                applied = set()
            known = migrations()
            newer = sorted(applied - set(known))
            if missing := [name for name in known if name not in applied]:
                yield Finding.failed(
                    "migrations",
                    f"not applied: {', '.join(missing)}. The Job migrations-… of `pulumi up` applies them: see its log",
                )
            else:
                more = f", and {', '.join(newer)} of a newer version" if newer else ""
                yield Finding.ok("migrations", f"all {len(known)} are applied{more}")
                yield _checked_role(connection)
    except psycopg.Error as error:
        yield Finding.failed(
            "database",
            f"CLOISTER_DATABASE_URL: the login works, but a query fails: {' '.join(str(error).split())}. Check that "
            "the migrations ran with CLOISTER_DATABASE_SERVICE_ROLE set to this role, and that nobody holds a lock",
        )


def _checked_role(connection: psycopg.Connection) -> Finding:
    """Check that the service logs in with a role that cannot change the audit log."""
    row = connection.execute(query("can_change_audit_log")).fetchone()
    if row is not None and row[0]:
        return Finding.warning(
            "database role",
            f"{connection.info.user} owns the schema or has its owner's rights, so the service could change the audit "
            "log. Create a second role and name it in database.service_role: see docs/how-to/deploy.md",
        )
    return Finding.ok("database role", f"{connection.info.user} adds to the audit log and cannot change it")


def check_object_store(settings: Settings) -> Iterator[Finding]:
    """Write, list, read and delete an object of 16 MiB below the prefix ``doctor/``."""
    location = settings.object_store
    endpoint = f" at {location.endpoint_url}" if location.endpoint_url else ""
    where = location.root if location.kind == "directory" else f"s3://{location.bucket}/{location.prefix}{endpoint}"
    try:
        problems = try_object(open_object_store(location), f"{PREFIX}{secrets.token_hex(8)}")
    except ObjectVersionsError as error:
        problems = [str(error)]
    except ObjectStoreError as error:
        advice = next((text for code, text in _ADVICE.items() if str(error).endswith(code)), "see the store's log")
        problems = [f"{error}; {advice}"]
    except ValueError as error:  # boto3 refuses an address or a name
        problems = [str(error)]
    if problems:
        yield Finding.failed("object store", f"CLOISTER_OBJECT_STORE, {where}: {'; '.join(problems)}")
    else:
        yield Finding.ok(
            "object store", f"{where}: an object of {SIZE_BYTES >> 20} MiB was written, listed, read and deleted"
        )


def try_object(store: ObjectStore, key: str) -> list[str]:
    """Write, list, read and delete an object, and return the problems. The object is always deleted.

    Raises:
        ObjectStoreError: the store refuses a request or does not answer.
    """
    store.check()
    chunks = (bytes(min(_CHUNK_BYTES, SIZE_BYTES - start)) for start in range(0, SIZE_BYTES, _CHUNK_BYTES))
    try:
        stored = store.put(key, chunks)
        problems = [] if key in store.keys(PREFIX) else ["a new object is missing in the listing"]
        digest = hashlib.sha256()
        for chunk in store.read(key, start=1):
            digest.update(chunk)
    except BaseException:
        # The object may exist even if the answer was lost. The first error is the one to report.
        with contextlib.suppress(ObjectStoreError):
            store.delete(key)
        raise
    store.delete(key)
    if digest.digest() != hashlib.sha256(bytes(SIZE_BYTES - 1)).digest() or stored.size_bytes != SIZE_BYTES:
        problems.append("a read from byte 1 on returns other content than was written")
    with contextlib.suppress(ObjectNotFoundError):
        next(store.read(key), None)
        problems.append("a deleted object can still be read: is there a cache in between?")
    return problems


def check_launcher(settings: Settings, catalogue: Catalogue, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the launcher that the settings name, without starting a job.

    Args:
        settings: the settings of the service.
        catalogue: the model catalogue.
        environment: the variables that the settings come from.
    """
    if not environment.get("CLOISTER_LAUNCHER"):
        yield Finding.not_checked(
            "launcher", "CLOISTER_LAUNCHER is not set here, as in pods of the API: only the reconciler starts jobs"
        )
        return
    if settings.launcher != "kuberay":
        try:
            with open_launcher(settings, catalogue, environment) as launcher:
                launcher.status("doctor")
        except LauncherError as error:
            yield Finding.failed("launcher", f"CLOISTER_RAY_ADDRESS: {error}")
        else:
            yield Finding.ok("launcher", f"the Ray Jobs API at {settings.ray_address} answers")
        return
    try:
        from service.adapters.rayjobs_api import open_client
        from service.doctor.cluster_api import ClusterApi
    except ModuleNotFoundError as error:
        raise SettingsError(f"CLOISTER_LAUNCHER: kuberay needs the package {error.name}: cloister[cluster]") from error
    api, namespace = ClusterApi(open_client(settings.kubeconfig)), settings.kubernetes_namespace
    yield from check_rights(api, namespace)
    with contextlib.redirect_stdout(sys.stderr):  # its log is not part of the report
        templates = load_templates(settings.ray_job_templates, catalogue, namespace=namespace)
    for model in catalogue.values():
        check = f"RayJob of the model {model.id}"
        if model.id not in templates:
            yield Finding.failed(
                check, "CLOISTER_RAY_JOB_TEMPLATES has no template for it: `pulumi up --refresh` restores it"
            )
            continue
        spec = JobSpec(
            job_id="job_doctor",
            coordinator_url=settings.coordinator_url,
            model=model.spec,
        )
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"
        try:
            api.dry_run_create(path, rayjob(templates[model.id], spec))
        except ClusterError as error:
            yield Finding.failed(check, f"the cluster refuses it (dry run): {error}")
        else:
            yield Finding.ok(check, f"its template fits the catalogue, and {namespace} accepts it (dry run)")


def check_rights(api: "ClusterApi", namespace: str) -> Iterator[Finding]:
    """Check that the launcher's account has every permission that it needs, and none that is dangerous."""
    check = "launcher's rights"
    missing = [
        f"{verb} {resource} {name}".rstrip()
        for verb, resource, name in REQUIRED
        if not api.may(verb, resource, namespace, name=name)
    ]
    excess = [f"{verb} {resource}" for verb, resource in FORBIDDEN if api.may(verb, resource, namespace)]
    if missing:
        yield Finding.failed(
            check,
            f"CLOISTER_LAUNCHER: its account may not {', '.join(missing)} in {namespace}: `pulumi up --refresh` "
            "restores role and binding",
        )
    elif excess:
        yield Finding.failed(
            check, f"its account may {', '.join(excess)} in {namespace}, which it does not need: remove the binding"
        )
    else:
        yield Finding.ok(check, f"may run RayJobs in {namespace}; may not read secrets, change roles or use other pods")
