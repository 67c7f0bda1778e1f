"""The part of the doctor that runs in a pod of the stack, or wherever its settings are in the environment."""

from collections.abc import Iterator, Mapping

from service.cli.doctor import database, network, object_store
from service.cli.doctor.findings import Finding, failed, not_checked, ok, told
from service.cli.doctor.launcher import launcher
from service.errors import SettingsError
from service.model_catalogue import load_catalogue
from service.settings import read_settings


def inside_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Every check that takes the service's settings, one after the other."""
    try:
        settings = read_settings(environment)
    except SettingsError as error:
        yield failed("settings", "; ".join(each.strip() for each in str(error).splitlines()))
        yield not_checked("everything else in a pod", "it takes the settings")
        return
    yield from told("DNS", lambda: network.names(settings, environment))
    yield from told("database", lambda: database.database(settings))
    yield from told("object store", lambda: object_store.object_store(settings))
    try:
        catalogue = load_catalogue(settings.models_path)
    except SettingsError as error:
        yield failed("models", f"CLOISTER_MODELS: {error}")
    else:
        yield ok("models", ", ".join(catalogue.models))
        yield from told("launcher", lambda: launcher(settings, catalogue, environment))
    yield from told("network policies", lambda: network.policies(network.shut(environment)))
