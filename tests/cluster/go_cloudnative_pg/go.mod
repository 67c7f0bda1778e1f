module cloister.dev/tests/cluster/cloudnative-pg

go 1.26

// Only their custom resource definitions are used.
require (
	github.com/cloudnative-pg/cloudnative-pg v1.30.0
	github.com/cloudnative-pg/plugin-barman-cloud v0.15.0
)
