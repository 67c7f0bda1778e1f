//go:build tools

// Package tools pins what build.py builds.
package tools

import _ "github.com/pulumi/pulumi/pkg/v3/cmd/pulumi"
