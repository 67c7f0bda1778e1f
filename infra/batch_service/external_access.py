"""Access to the API from outside the cluster: an Ingress for one of the common controllers, or an HTTPRoute.

Both route the paths of OpenAI's API only, not probes and metrics. A file of 200 MB may take an hour on a slow line, and
an answer may take minutes. No test runs with a real controller or gateway.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from infra.stack_file.sections import GatewaySection, IngressSection
from ray_job.contract.cluster import API, API_SERVICE_PORT, INGRESS_CONTROLLERS

_PATHS: Final = "/v1"
# The largest file that the API accepts, and its multipart form.
_MAX_BODY: Final = "210m"
_UPLOAD_S: Final = "3600"
_UPLOAD: Final = "1h"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Settings that an ingress controller needs for the API.

    Attributes:
        annotations: annotations of an Ingress for TLS, large uploads and slow answers.
        advice: settings that only the controller's own configuration can change; empty for none.
    """

    annotations: Mapping[str, str] = field(default_factory=dict)
    advice: str = ""


CONTROLLERS: Final[Mapping[str, Requirements]] = {
    # https://doc.traefik.io/traefik/reference/routing-configuration/kubernetes/ingress/ has the annotations. Bodies are
    # unlimited. The default of readTimeout is 60 s since 2.11.2: https://github.com/traefik/traefik/pull/10602
    "traefik": Requirements(
        annotations={
            "traefik.ingress.kubernetes.io/router.entrypoints": "websecure",
            "traefik.ingress.kubernetes.io/router.tls": "true",
        },
        advice=(
            "Traefik ends uploads that take longer than 60 s, unless its own configuration raises "
            "entryPoints.websecure.transport.respondingTimeouts.readTimeout; set it to 3600s"
        ),
    ),
    # https://github.com/haproxytech/kubernetes-ingress/blob/master/documentation/annotations.md (3.2). Bodies are
    # unlimited, and its timeout of clients counts idle time only.
    "haproxy": Requirements(
        annotations={"haproxy.org/timeout-server": _UPLOAD, "haproxy.org/ssl-redirect": "true"},
    ),
    # https://kubernetes.github.io/ingress-nginx/user-guide/nginx-configuration/annotations/
    "nginx": Requirements(
        annotations={
            "nginx.ingress.kubernetes.io/proxy-body-size": _MAX_BODY,
            # Uploads stream to the API instead of filling the controller's disk first.
            "nginx.ingress.kubernetes.io/proxy-request-buffering": "off",
            "nginx.ingress.kubernetes.io/proxy-buffering": "off",
            "nginx.ingress.kubernetes.io/proxy-read-timeout": _UPLOAD_S,
            "nginx.ingress.kubernetes.io/proxy-send-timeout": _UPLOAD_S,
            "nginx.ingress.kubernetes.io/force-ssl-redirect": "true",
        },
        advice="ingress-nginx was retired in March 2026 and gets no security fixes; choose another controller",
    ),
    # https://projectcontour.io/docs/main/config/annotations/. Bodies are unlimited.
    "contour": Requirements(
        annotations={
            "projectcontour.io/response-timeout": _UPLOAD,
            "ingress.kubernetes.io/force-ssl-redirect": "true",
        },
    ),
    "custom": Requirements(),
}
"""Settings by the value of ``api.ingress.controller``."""


def controller_namespace(section: IngressSection | GatewaySection) -> str:
    """Return the namespace whose pods may call the API; empty if no namespace selects the controller's pods."""
    default = INGRESS_CONTROLLERS[section.controller].namespace if isinstance(section, IngressSection) else ""
    return section.controller_namespace or ("" if section.controller_networks else default)


def ingress(section: IngressSection) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the annotations and the ``spec`` of the Ingress."""
    annotations = {
        **CONTROLLERS[section.controller].annotations,
        **({"cert-manager.io/cluster-issuer": section.tls.cluster_issuer} if section.tls.cluster_issuer else {}),
        # On-premises controllers often write no address into the status, which Pulumi would wait for.
        "pulumi.com/skipAwait": "true",
        **section.annotations,
    }
    backend = {"service": {"name": API, "port": {"name": "http"}}}
    path = {"path": _PATHS, "pathType": "Prefix", "backend": backend}
    spec = {
        "ingressClassName": section.class_name or INGRESS_CONTROLLERS[section.controller].class_name,
        "tls": [{"hosts": [section.host], "secretName": section.tls.secret_name or "api-tls"}],
        "rules": [{"host": section.host, "http": {"paths": [path]}}],
    }
    return annotations, spec


def http_route(section: GatewaySection) -> dict[str, Any]:
    """Return the ``spec`` of the HTTPRoute (https://gateway-api.sigs.k8s.io/reference/spec/#httproute, 1.4).

    Without a timeout, gateways have their own, such as 15 s.
    """
    namespace, _, name = section.gateway.partition("/")
    gateway = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "namespace": namespace, "name": name}
    return {
        "parentRefs": [{**gateway, "sectionName": section.section_name}],
        "hostnames": [section.host],
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": _PATHS}}],
                "backendRefs": [{"group": "", "kind": "Service", "name": API, "port": API_SERVICE_PORT}],
                "timeouts": {"request": _UPLOAD, "backendRequest": _UPLOAD},
            }
        ],
    }
