//go:build tools

// Package cluster pins the versions of the programs that are built from their own main packages.
package cluster

import (
	_ "go.etcd.io/etcd/server/v3"
	_ "helm.sh/helm/v3/cmd/helm"
)
