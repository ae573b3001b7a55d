//go:build tools

// Package kube pins the programs of the Kubernetes that the tests run: the harness builds them as modules, because no
// package index has them as files. `replace` stands for the local replacements of the upstream repository, which do not
// reach a dependent module.
package kube

import (
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
	_ "k8s.io/kubernetes/cmd/kube-scheduler"
	_ "k8s.io/kubernetes/cmd/kubelet"
)
