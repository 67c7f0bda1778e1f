# Waits for a node and sets its labels, or drains and deletes it. Runs as root on a server of the cluster, read from
# standard input, after assignments of these settings: node_name, manifest.
set -eu
export LC_ALL=C

READY_S=900
DRAIN_S=600

fail() { echo "$node_name: $*" >&2; exit 1; }
kubectl() { /var/lib/rancher/rke2/bin/kubectl --kubeconfig /etc/rancher/rke2/rke2.yaml "$@"; }

ready() {
  end=$(($(date +%s) + READY_S))
  until [ "$(kubectl get node "$node_name" --output \
    'jsonpath={.status.conditions[?(@.type=="Ready")].status}' 2>/dev/null </dev/null)" = True ]; do
    [ "$(date +%s)" -lt "$end" ] || fail "the node is not Ready after $READY_S s; see journalctl -u 'rke2-*' on it"
    sleep 1
  done
  # Server-side apply also removes the labels that the stack file no longer has.
  printf '%s\n' "$manifest" |
    kubectl apply --server-side --force-conflicts --field-manager cloister-hosts --filename - >/dev/null
}

drain() {
  nodes=$(kubectl get nodes --output name </dev/null) || fail "the API server does not answer; repair it, and run again"
  printf '%s\n' "$nodes" | grep -qx "node/$node_name" || return 0
  # The last node has nowhere to move pods to.
  if [ "$nodes" != "node/$node_name" ]; then
    kubectl drain "$node_name" --ignore-daemonsets --delete-emptydir-data --timeout "${DRAIN_S}s" >&2 </dev/null ||
      fail "was not drained in $DRAIN_S s; end the pods that a PodDisruptionBudget protects, and run again"
  fi
  kubectl delete node "$node_name" >&2 </dev/null
}

main() {
  case $1 in
    ready | drain) "$1" ;;
  esac
}

main "$1"
exit
