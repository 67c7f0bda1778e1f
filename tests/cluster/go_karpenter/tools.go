//go:build tools

// Package tools pins what build.py builds.
package tools

import _ "sigs.k8s.io/karpenter/kwok"
