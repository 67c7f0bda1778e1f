//go:build tools

// Package tools pins what build.py builds.
package tools

import (
	_ "github.com/versity/versitygw/cmd/versitygw"
	_ "sigs.k8s.io/kwok/cmd/kwok"
)
