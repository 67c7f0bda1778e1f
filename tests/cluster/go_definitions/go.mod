module cloister.dev/tests/cluster/definitions

go 1.26

require (
	github.com/cilium/cilium v1.20.2
	sigs.k8s.io/gateway-api v1.4.1
)
