"""The policies: the one list that the program, previews, tests, evidence and docs/policies.md use.

The checks in ``pod_checks``, ``object_checks``, ``stack_checks`` and ``setting_checks`` yield problems under the names
of policies. Numbers of standards: CIS Kubernetes Benchmark 1.10, NIST SP 800-53 revision 5, ISO/IEC 27001:2022 Annex A,
GDPR (Regulation (EU) 2016/679), EU AI Act (Regulation (EU) 2024/1689).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Severity = Literal["mandatory", "advisory"]
Target = Literal["kubernetes", "aws"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A rule about the resources of a stack.

    Attributes:
        id: identifier that never changes, e.g. ``CLO-NET-001``.
        name: short name, under which checks report problems.
        severity: a stack that breaks a ``mandatory`` policy is refused; an ``advisory`` one is reported.
        title: what holds.
        remedy: what to do about a problem.
        references: requirements of standards and laws that the policy supports.
        proof: patterns of ``Kind:dotted.path`` of the fields that show it, for ``fnmatch``.
        targets: kinds of infrastructure that it applies to.
    """

    id: str
    name: str
    title: str
    remedy: str
    references: tuple[str, ...]
    proof: tuple[str, ...]
    severity: Severity = "mandatory"
    targets: tuple[Target, ...] = ("kubernetes",)


def _cis(*numbers: str) -> tuple[str, ...]:
    return tuple(f"CIS Kubernetes {number}" for number in numbers)


def _nist(*controls: str) -> tuple[str, ...]:
    return tuple(f"NIST SP 800-53 {control}" for control in controls)


def _iso(*controls: str) -> tuple[str, ...]:
    return tuple(f"ISO/IEC 27001 A.{control}" for control in controls)


def _gdpr(*articles: str) -> tuple[str, ...]:
    return tuple(f"GDPR Art. {article}" for article in articles)


def _ai_act(*articles: str) -> tuple[str, ...]:
    return tuple(f"EU AI Act Art. {article}" for article in articles)


_NETWORK: Final = (
    Policy(
        id="CLO-NET-001",
        name="default_deny",
        title="In every namespace of the stack, connections are denied in both directions unless another policy allows "
        "them.",
        remedy="Keep the NetworkPolicy `default-deny` of each namespace as the program creates it.",
        references=_cis("5.3.2") + _nist("SC-7(5)", "AC-4") + _iso("8.20", "8.22") + _gdpr("32"),
        proof=("NetworkPolicy:spec.policyTypes.*",),
    ),
    Policy(
        id="CLO-NET-002",
        name="no_open_flows",
        title="A network policy, also one of Cilium or Calico, names the peers that it allows, and never all of them.",
        remedy="Name the networks, hosts or pods that are meant in `network` of the stack file.",
        references=_cis("5.3.2") + _nist("SC-7", "AC-4") + _iso("8.20", "8.22"),
        proof=("NetworkPolicy:spec.*.cidr", "NetworkPolicy:spec.*.matchLabels.*", "CiliumNetworkPolicy:spec.*gress.*"),
    ),
    Policy(
        id="CLO-NET-003",
        name="services_stay_inside",
        title="No Service opens a port outside the cluster.",
        remedy="Use type ClusterIP, and api.ingress for clients outside the cluster.",
        references=_nist("SC-7") + _iso("8.20"),
        proof=("Service:spec.type", "ResourceQuota:spec.hard.services.*"),
    ),
    Policy(
        id="CLO-NET-004",
        name="limited_network_policies",
        title="A role that may write network policies is limited by an admission policy: policies add up, so "
        "each could "
        "open any connection.",
        remedy="Keep the ValidatingAdmissionPolicy and its binding to the namespace.",
        references=_nist("AC-6", "CM-5") + _iso("8.2", "8.22"),
        proof=("ValidatingAdmissionPolicyBinding:spec.*",),
    ),
    Policy(
        id="CLO-NET-005",
        name="only_the_api_is_exposed",
        title="An Ingress or HTTPRoute leads to the API below /v1 only: not to metrics, Ray's dashboard, the "
        "coordinator or data.",
        remedy="Remove the other paths and backends from the Ingress.",
        references=_nist("SC-7", "AC-3") + _iso("8.20", "8.3"),
        proof=("Ingress:spec.rules.*.path", "Ingress:spec.rules.*.service.name", "HTTPRoute:spec.rules.*"),
    ),
)

_TRANSPORT: Final = (
    Policy(
        id="CLO-TLS-001",
        name="ingress_tls",
        title="An Ingress uses TLS for each of its hosts, and an HTTPRoute names its hosts and one listener "
        "of its Gateway.",
        remedy="Set api.ingress.tls, or the listener of api.gateway.",
        references=_nist("SC-8", "SC-8(1)") + _iso("8.24", "5.14") + _gdpr("32"),
        proof=("Ingress:spec.tls.*", "HTTPRoute:spec.hostnames.*", "HTTPRoute:spec.parentRefs.*"),
    ),
    Policy(
        id="CLO-TLS-002",
        name="database_tls",
        title="The service reaches its database by TLS and verifies the server's certificate and name.",
        remedy="Use database.kind cloudnative_pg, or external with sslmode=verify-full.",
        references=_nist("SC-8", "SC-8(1)") + _iso("8.24") + _gdpr("32"),
        proof=("*.env.CLOISTER_DATABASE_URL.value",),
    ),
    Policy(
        id="CLO-TLS-003",
        name="object_store_tls",
        title="The object store is reached by TLS.",
        remedy="Use object_store.kind s3 with an https:// endpoint.",
        references=_nist("SC-8", "SC-8(1)") + _iso("8.24") + _gdpr("32"),
        proof=("*.env.CLOISTER_OBJECT_STORE.value", "ObjectStore:spec.configuration.endpointURL"),
    ),
    Policy(
        id="CLO-TLS-004",
        name="chart_tls",
        title="Helm charts come from a repository by TLS.",
        remedy="Use an https:// or oci:// repository in kuberay.chart.",
        references=_nist("SC-8", "SI-7") + _iso("8.24", "5.21"),
        proof=("Chart:spec.chart", "Chart:spec.repositoryOpts.repo"),
    ),
    Policy(
        id="CLO-TLS-005",
        name="endpoint_tls",
        title="Prompts reach endpoints of the http engine by TLS.",
        remedy="Use an https:// base_url in the model.",
        references=_nist("SC-8", "SC-8(1)") + _iso("8.24", "5.14") + _gdpr("32"),
        proof=("ConfigMap:data.models.yaml",),
    ),
    Policy(
        id="CLO-TLS-006",
        name="tracing_tls",
        title="Traces reach their collector by TLS.",
        remedy="Use an https:// endpoint in tracing.",
        references=_nist("SC-8", "SC-8(1)") + _iso("8.24"),
        proof=("*.env.CLOISTER_OTLP_ENDPOINT.value",),
    ),
)

_PODS: Final = (
    Policy(
        id="CLO-POD-001",
        name="unprivileged",
        title="No container is privileged.",
        remedy="Remove securityContext.privileged.",
        references=_cis("5.2.2") + _nist("AC-6", "CM-7") + _iso("8.2", "8.9"),
        proof=("*.securityContext.privileged",),
    ),
    Policy(
        id="CLO-POD-002",
        name="no_new_privileges",
        title="No process of a container can get more privileges than its parent.",
        remedy="Set securityContext.allowPrivilegeEscalation to false.",
        references=_cis("5.2.6") + _nist("AC-6") + _iso("8.2"),
        proof=("*.securityContext.allowPrivilegeEscalation",),
    ),
    Policy(
        id="CLO-POD-003",
        name="no_root",
        title="No container runs as root.",
        remedy="Set runAsNonRoot to true, and a runAsUser other than 0.",
        references=_cis("5.2.7") + _nist("AC-6") + _iso("8.2"),
        proof=("*.securityContext.runAsNonRoot", "*.securityContext.runAsUser"),
    ),
    Policy(
        id="CLO-POD-004",
        name="no_capabilities",
        title="Containers drop all Linux capabilities.",
        remedy="Set securityContext.capabilities to drop ALL and add nothing.",
        references=_cis("5.2.9") + _nist("AC-6", "CM-7") + _iso("8.2"),
        proof=("*.securityContext.capabilities.drop.*",),
    ),
    Policy(
        id="CLO-POD-005",
        name="seccomp",
        title="Every container has the runtime's seccomp profile or a local one.",
        remedy="Set seccompProfile.type to RuntimeDefault.",
        references=_cis("5.7.2") + _nist("CM-7", "SC-39") + _iso("8.9"),
        proof=("*.seccompProfile.type",),
    ),
    Policy(
        id="CLO-POD-006",
        name="read_only_root_file_system",
        title="No container can change its own programs; it writes to volumes only.",
        remedy="Set securityContext.readOnlyRootFilesystem to true.",
        references=_nist("CM-5", "SI-7") + _iso("8.9", "8.19"),
        proof=("*.securityContext.readOnlyRootFilesystem",),
    ),
    Policy(
        id="CLO-POD-007",
        name="nothing_of_the_host",
        title="No pod has access to its node's files, network, ports or processes.",
        remedy="Remove hostPath, hostPort, hostNetwork, hostPID and hostIPC.",
        references=_cis("5.2.3", "5.2.4", "5.2.5") + _nist("AC-6", "SC-39") + _iso("8.22"),
        proof=("*.volumes.*.name",),
    ),
    Policy(
        id="CLO-POD-008",
        name="requests_and_limits",
        title="Every container has requests and limits of CPU and memory.",
        remedy="Set resources.requests and resources.limits.",
        references=_nist("SC-5", "SC-6") + _iso("8.6"),
        proof=("*.resources.limits.*", "*.resources.requests.*"),
    ),
    Policy(
        id="CLO-POD-009",
        name="restricted_namespaces",
        title="Namespaces admit pods of the restricted pod security standard only.",
        remedy="Label the namespace pod-security.kubernetes.io/enforce: restricted.",
        references=_cis("5.2.1", "5.7.3") + _nist("CM-6", "CM-7") + _iso("8.9"),
        proof=("Namespace:metadata.labels.pod-security.kubernetes.io/enforce",),
    ),
    Policy(
        id="CLO-POD-010",
        name="gpus_on_request_only",
        title="A container of a Ray cluster that requests no GPU exposes none, whatever its image says.",
        remedy="Set NVIDIA_VISIBLE_DEVICES to void in the container.",
        references=_nist("AC-6", "SC-4") + _iso("8.3"),
        proof=("*.env.NVIDIA_VISIBLE_DEVICES.value", "*.resources.limits.nvidia.com/*"),
    ),
    Policy(
        id="CLO-POD-011",
        name="core_dumps_off",
        title="Jobs start with the program that turns core dumps off: a dump holds prompts.",
        remedy="Set the RayJob's entrypoint to python -m ray_job.",
        references=_nist("SC-4") + _iso("8.12") + _gdpr("32"),
        proof=("RayJob:spec.entrypoint",),
    ),
    Policy(
        id="CLO-POD-012",
        name="probes_on_servers",
        title="Every container that listens on a port has a readiness and a liveness probe.",
        remedy="Add readinessProbe and livenessProbe.",
        references=_nist("CP-10") + _iso("8.14"),
        proof=("*.readinessProbe.periodSeconds", "*.livenessProbe.periodSeconds"),
    ),
    Policy(
        id="CLO-POD-013",
        name="disruption_budgets",
        title="A workload with several replicas keeps at least one of them while nodes are drained, and allows the "
        "drain.",
        remedy="Add a PodDisruptionBudget with maxUnavailable 1.",
        references=_nist("CP-10") + _iso("8.14"),
        proof=("PodDisruptionBudget:spec.maxUnavailable",),
    ),
)

_IMAGES: Final = (
    Policy(
        id="CLO-IMG-001",
        name="images_by_digest",
        title="Every image has a digest: a tag can move to other content.",
        remedy="Name images with @sha256:… in `images`.",
        references=_cis("5.5.1") + _nist("SI-7") + _iso("8.19", "5.21"),
        proof=("*.image", "Chart:spec.values.*image.*"),
    ),
    Policy(
        id="CLO-IMG-002",
        name="approved_registries",
        title="Images come from the registries that the stack file approves.",
        remedy="Add the registry to policy.registries, or pull the image from an approved one by images.mirror.",
        references=_cis("5.5.1") + _nist("CM-7(5)", "SR-11") + _iso("5.21", "8.19"),
        proof=("StackFacts:registries.*", "*.image"),
    ),
    Policy(
        id="CLO-IMG-003",
        name="registries_are_approved",
        severity="advisory",
        title="The stack file approves registries.",
        remedy="List the registries that images may come from in policy.registries, or set images.mirror.",
        references=_cis("5.5.1") + _nist("CM-7(5)") + _iso("5.21"),
        proof=("StackFacts:registries.*",),
    ),
    Policy(
        id="CLO-IMG-004",
        name="images_are_pulled",
        title="No container runs whatever image a node happens to have.",
        remedy="Set imagePullPolicy to IfNotPresent or Always.",
        references=_cis("5.5.1") + _nist("SI-7") + _iso("8.19"),
        proof=("*.imagePullPolicy",),
    ),
)

_RIGHTS: Final = (
    Policy(
        id="CLO-RBAC-001",
        name="no_wildcard_rights",
        title="A role lists its rights without wildcards.",
        remedy="Name the groups, resources and verbs.",
        references=_cis("5.1.3") + _nist("AC-6") + _iso("5.15", "8.2"),
        proof=("Role:rules.*", "ClusterRole:rules.*"),
    ),
    Policy(
        id="CLO-RBAC-002",
        name="no_administrators",
        title="No account of the stack is an administrator of the cluster or of a namespace.",
        remedy="Bind a role of the stack instead of cluster-admin, admin or edit.",
        references=_cis("5.1.1") + _nist("AC-6(5)") + _iso("8.2"),
        proof=("RoleBinding:roleRef.name", "ClusterRoleBinding:roleRef.name"),
    ),
    Policy(
        id="CLO-RBAC-003",
        name="no_escalation",
        title="No role can grant itself more rights.",
        remedy="Remove the verbs escalate, bind and impersonate.",
        references=_cis("5.1.8") + _nist("AC-6") + _iso("8.2"),
        proof=("Role:rules.*.verbs.*", "ClusterRole:rules.*.verbs.*"),
    ),
    Policy(
        id="CLO-RBAC-004",
        name="no_reading_of_secrets",
        title="No role can read Secrets by the Kubernetes API.",
        remedy="Remove get, list and watch of secrets; pods mount the Secrets that they need.",
        references=_cis("5.1.2") + _nist("AC-3", "AC-6") + _iso("5.15", "8.3"),
        proof=("Role:rules.*", "ClusterRole:rules.*"),
    ),
    Policy(
        id="CLO-RBAC-005",
        name="tokens_only_with_rights",
        title="A pod has a token of the Kubernetes API only if its service account is bound to a role of the stack.",
        remedy="Set automountServiceAccountToken to false.",
        references=_cis("5.1.5", "5.1.6") + _nist("AC-6", "IA-5") + _iso("8.2"),
        proof=("*.automountServiceAccountToken",),
    ),
    Policy(
        id="CLO-RBAC-006",
        name="own_service_accounts",
        title="Each workload with a token of the Kubernetes API has its own service account.",
        remedy="Give each workload its own serviceAccountName.",
        references=_cis("5.1.5") + _nist("AC-6", "IA-9") + _iso("5.16"),
        proof=("*.serviceAccountName",),
    ),
    Policy(
        id="CLO-RBAC-007",
        name="operator_in_named_namespaces",
        title="KubeRay's operator has roles in the namespaces that it watches, and no cluster role: that of its chart "
        "reads all Secrets.",
        remedy="Set watchNamespace, singleNamespaceInstall, rbacEnable and crNamespacedRbacEnable in the chart's "
        "values.",
        references=_cis("5.1.2", "5.1.3") + _nist("AC-6") + _iso("8.2"),
        proof=("Chart:spec.values.watchNamespace.*", "Chart:spec.values.*Enable", "Chart:spec.values.single*"),
    ),
    Policy(
        id="CLO-RBAC-008",
        name="admission_policies_deny",
        title="Every admission policy of the stack refuses what breaks it.",
        remedy="Set validationActions of the binding to Deny.",
        references=_nist("AC-3", "CM-5") + _iso("8.3", "8.9"),
        proof=("ValidatingAdmissionPolicyBinding:spec.validationActions.*",),
    ),
)

_SECRETS: Final = (
    Policy(
        id="CLO-SEC-001",
        name="secrets_only_in_secrets",
        title="Secret values are in Secrets only.",
        remedy="Move the value to a Secret that the pod mounts.",
        references=_nist("IA-5(7)", "SC-28") + _iso("5.17", "8.24"),
        proof=("Secret:stringData", "Secret:stringData.*", "Secret:data", "Secret:data.*"),
    ),
    Policy(
        id="CLO-SEC-002",
        name="secrets_encrypted_in_state",
        title="Values of Secrets are encrypted in Pulumi's state.",
        remedy="Set the value with `pulumi config set --secret`, and pass it on as a secret output.",
        references=_nist("SC-28", "SC-28(1)") + _iso("5.17", "8.24"),
        proof=("Secret:stringData", "Secret:stringData.*", "Secret:data", "Secret:data.*"),
    ),
    Policy(
        id="CLO-SEC-003",
        name="no_secret_in_an_environment",
        title="Secrets reach containers as files: pod descriptions, crash reports and child processes show an "
        "environment.",
        remedy="Mount the Secret as a volume.",
        references=_cis("5.4.1") + _nist("IA-5(7)") + _iso("5.17"),
        proof=("*.volumes.*.secret.secretName",),
    ),
    Policy(
        id="CLO-SEC-004",
        name="no_credentials_in_ray_pods",
        title="A container that runs Ray mounts no credential other than its job's token (head only) and the "
        "key of the "
        "http engine's endpoints; the program that copies weights ends before and has its own.",
        remedy="Remove the volume from the pods of jobs.",
        references=_nist("AC-6", "IA-5") + _iso("8.2", "5.17"),
        proof=("RayJob:*.volumes.*.secret.secretName",),
    ),
    Policy(
        id="CLO-SEC-005",
        name="short_lived_tokens",
        title="Tokens of the Kubernetes API live an hour at most, and no Secret holds one that never expires.",
        remedy="Project the token with expirationSeconds of at most 3600.",
        references=_cis("5.1.6") + _nist("IA-5") + _iso("5.17"),
        proof=("*.serviceAccountToken.expirationSeconds", "Secret:type"),
    ),
    Policy(
        id="CLO-SEC-006",
        name="stored_secrets_encrypted",
        title="API and reconciler encrypt the secrets that the database holds, and sign receipts of deletions.",
        remedy="Mount the encryption keys and the receipt key.",
        references=_nist("SC-28(1)", "AU-10") + _iso("8.24", "8.10") + _gdpr("17", "32"),
        proof=("*.env.CLOISTER_ENCRYPTION_KEYS_FILE.value", "*.env.CLOISTER_RECEIPT_KEY_FILE.value"),
    ),
    Policy(
        id="CLO-SEC-007",
        name="secrets_encrypted_at_rest",
        severity="advisory",
        title="The cluster encrypts Secrets at rest: the stack made the cluster so, or its operator confirms it.",
        remedy="Configure encryption at rest of the API server, then set policy.secrets_encrypted_at_rest.",
        references=_nist("SC-28(1)") + _iso("8.24") + _gdpr("32"),
        proof=("StackFacts:secrets_encrypted_at_rest", "StackFacts:makes_the_cluster"),
    ),
)

_JOBS: Final = (
    Policy(
        id="CLO-RAY-001",
        name="ray_token",
        title="Ray's dashboard, its Jobs API and its other ports ask for a token.",
        remedy="Set authOptions.mode of the Ray cluster to token.",
        references=_nist("IA-2", "AC-3") + _iso("8.5"),
        proof=("RayJob:spec.rayClusterSpec.authOptions.mode",),
    ),
    Policy(
        id="CLO-RAY-002",
        name="ray_stays_inside",
        title="The head of a Ray cluster is reached inside the cluster only.",
        remedy="Set headGroupSpec.serviceType to ClusterIP, and enableIngress to false.",
        references=_nist("SC-7") + _iso("8.20"),
        proof=("RayJob:spec.rayClusterSpec.headGroupSpec.serviceType",),
    ),
    Policy(
        id="CLO-RAY-003",
        name="telemetry_off",
        title="Ray, vLLM and the libraries of Hugging Face report no usage.",
        remedy="Set RAY_USAGE_STATS_ENABLED=0, VLLM_NO_USAGE_STATS, DO_NOT_TRACK and HF_HUB_DISABLE_TELEMETRY=1.",
        references=_nist("CM-7", "SC-7(10)") + _iso("8.12") + _gdpr("25"),
        proof=(
            "RayJob:*.env.RAY_USAGE_STATS_ENABLED.value",
            "RayJob:*.env.VLLM_NO_USAGE_STATS.value",
            "RayJob:*.env.DO_NOT_TRACK.value",
        ),
    ),
    Policy(
        id="CLO-RAY-004",
        name="no_downloads",
        title="Jobs load no model, code or data from a hub.",
        remedy="Set HF_HUB_OFFLINE=1 and TRANSFORMERS_OFFLINE=1.",
        references=_nist("CM-7", "SI-7") + _iso("8.19", "5.21"),
        proof=("RayJob:*.env.HF_HUB_OFFLINE.value", "RayJob:*.env.TRANSFORMERS_OFFLINE.value"),
    ),
    Policy(
        id="CLO-MOD-001",
        name="models_are_pinned",
        title="A model is a directory that the operator put into an image, a volume or the object store, or a "
        "hub's model "
        "at a commit.",
        remedy="Use a directory as source, or add the commit as engine_args.revision.",
        references=_nist("CM-2", "SI-7") + _iso("8.9", "5.21"),
        proof=("ConfigMap:data.models.yaml",),
    ),
    Policy(
        id="CLO-MOD-002",
        name="unsafe_arguments_are_acknowledged",
        title="Engine arguments that run code, open connections or deserialize data are acknowledged, and none logs "
        "prompts.",
        remedy="Remove the argument, or name it in the model's unsafe_engine_args.",
        references=_nist("CM-6", "CM-7") + _iso("8.9", "8.12"),
        proof=("ConfigMap:data.models.yaml",),
    ),
    Policy(
        id="CLO-MOD-003",
        name="no_unsafe_arguments",
        severity="advisory",
        title="No model has an engine argument that runs code, opens connections or deserializes data.",
        remedy="Remove the argument, or record the decision as an exception.",
        references=_nist("CM-6", "CM-7") + _iso("8.9"),
        proof=("ConfigMap:data.models.yaml",),
    ),
)

_DATA: Final = (
    Policy(
        id="CLO-DATA-001",
        name="data_is_kept",
        title="Objects that hold data are protected from deletion, and stay in the cluster after a destroy.",
        remedy="Set keep_data to true.",
        references=_nist("CP-9", "SI-12") + _iso("8.13") + _gdpr("32"),
        proof=("PersistentVolumeClaim:protected", "PersistentVolumeClaim:kept", "Cluster:protected", "Cluster:kept"),
    ),
    Policy(
        id="CLO-DATA-002",
        name="several_copies",
        title="Outside the environment dev, data has more than one copy.",
        remedy="Use database.kind cloudnative_pg or external, and object_store.kind s3.",
        references=_nist("CP-9") + _iso("8.13", "8.14") + _gdpr("32"),
        proof=("Cluster:spec.instances", "*.env.CLOISTER_DATABASE_URL.value", "*.env.CLOISTER_OBJECT_STORE.value"),
    ),
    Policy(
        id="CLO-DATA-003",
        name="database_backups",
        severity="advisory",
        title="A database of CloudNativePG has base backups, a write-ahead log archive, and a limit of their age.",
        remedy="Add database.backup.",
        references=_nist("CP-9", "CP-10") + _iso("8.13") + _gdpr("32"),
        proof=("ScheduledBackup:spec.schedule", "ObjectStore:spec.retentionPolicy"),
    ),
    Policy(
        id="CLO-DATA-004",
        name="separate_database_roles",
        severity="advisory",
        title="The service logs in to the database with another role than the migrations, which own it: it "
        "cannot change "
        "the audit log.",
        remedy="Set database.service_role.",
        references=_nist("AC-6", "AU-9") + _iso("5.3", "8.15") + _ai_act("19"),
        proof=("*.env.CLOISTER_DATABASE_URL.value",),
    ),
    Policy(
        id="CLO-DATA-005",
        name="limited_retention",
        title="Files and finished batches are kept no longer than policy.max_retention_days.",
        remedy="Lower retention_days, or agree on a higher policy.max_retention_days.",
        references=_nist("SI-12") + _iso("8.10") + _gdpr("5(1)(e)", "17"),
        proof=("*.env.CLOISTER_RETENTION_DAYS.value", "StackFacts:max_retention_days"),
    ),
    Policy(
        id="CLO-AUD-001",
        name="audit_export",
        severity="advisory",
        title="Entries of the audit log leave the stack regularly.",
        remedy="Set audit_export.",
        references=_nist("AU-4(1)", "AU-9(2)") + _iso("8.15") + _ai_act("12", "19"),
        proof=("CronJob:spec.schedule",),
    ),
    Policy(
        id="CLO-AUD-002",
        name="keys_expire",
        severity="advisory",
        title="API keys expire after a year at the latest.",
        remedy="Set api.max_key_days to at most 365.",
        references=_nist("IA-5", "AC-2") + _iso("5.16", "5.17"),
        proof=("*.env.CLOISTER_MAX_KEY_DAYS.value",),
    ),
)

_TENANTS: Final = (
    Policy(
        id="CLO-TEN-001",
        name="owner_labels",
        title="Labels of every object and every pod name their stack and component.",
        remedy="Add the labels of the stack.",
        references=_nist("CM-8") + _iso("5.9"),
        proof=("*:metadata.labels.cloister.dev/*",),
    ),
    Policy(
        id="CLO-TEN-002",
        name="explicit_names",
        title="Every object has a name and, unless it is cluster-scoped, a namespace other than `default`.",
        remedy="Set metadata.name and metadata.namespace.",
        references=_cis("5.7.4") + _nist("CM-8") + _iso("5.9"),
        proof=("*:metadata.namespace",),
    ),
    Policy(
        id="CLO-TEN-003",
        name="quotas",
        title="Each namespace of a customer has a quota that admits no LoadBalancer and no NodePort, and default "
        "limits.",
        remedy="Keep the ResourceQuota and the LimitRange of the namespace.",
        references=_cis("5.7.1") + _nist("SC-5", "SC-6") + _iso("8.6", "8.22"),
        proof=("ResourceQuota:spec.hard.*", "LimitRange:spec.limits.*.type"),
    ),
    Policy(
        id="CLO-TEN-004",
        name="own_prefix",
        title="The stack's objects have a prefix of their own, or a bucket of their own.",
        remedy="Set object_store.prefix.",
        references=_nist("AC-4", "SC-4") + _iso("8.22", "8.3"),
        proof=("*.env.CLOISTER_OBJECT_STORE.value",),
    ),
    Policy(
        id="CLO-TEN-005",
        name="own_nodes",
        title="With `isolation: nodes`, pods run on nodes of their customer only.",
        remedy="Give the customer nodes in the platform's stack, and select them in each pod.",
        references=_nist("SC-39", "SC-4") + _iso("8.22"),
        proof=("StackFacts:isolation", "*.nodeSelector.cloister.dev/customer"),
    ),
    Policy(
        id="CLO-TEN-006",
        name="own_namespaces",
        title="Objects of a customer's stack are in namespaces of this customer and environment.",
        remedy="Set the namespace of the stack.",
        references=_cis("5.7.1") + _nist("AC-4", "SC-39") + _iso("8.22"),
        proof=("*:metadata.namespace",),
    ),
    Policy(
        id="CLO-TEN-007",
        name="unique_objects",
        title="No two resources of a program are the same object.",
        remedy="Report it: this is a bug in the program.",
        references=_nist("CM-2") + _iso("8.9"),
        proof=("*:metadata.name",),
    ),
    Policy(
        id="CLO-HOST-001",
        name="host_keys",
        title="Each connection to a host requires the host's key.",
        remedy="Set host_key of the machine.",
        references=_nist("IA-3", "SC-8") + _iso("8.5", "8.20"),
        proof=("Command:connection.hostKey",),
    ),
)

CATALOGUE: Final[tuple[Policy, ...]] = (
    *_NETWORK,
    *_TRANSPORT,
    *_PODS,
    *_IMAGES,
    *_RIGHTS,
    *_SECRETS,
    *_JOBS,
    *_DATA,
    *_TENANTS,
)
"""All policies in the order of their page."""

BY_NAME: Final[Mapping[str, Policy]] = {policy.name: policy for policy in CATALOGUE}
BY_ID: Final[Mapping[str, Policy]] = {policy.id: policy for policy in CATALOGUE}
