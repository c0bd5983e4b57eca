// Command kubernetes is the upstream control plane in one binary.
//
// The part to run is the name the binary is called by (a symbolic link such as
// kube-apiserver) or the first argument. Each part runs in a process of its
// own: constructing two of them in one process fails in upstream code.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

// The constructors have side effects on the whole process: call only one.
var parts = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-proxy":              proxy.NewProxyCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
}

func main() {
	name := filepath.Base(os.Args[0])
	if name == "kubernetes" && len(os.Args) > 1 {
		name = os.Args[1]
		os.Args = append([]string{name}, os.Args[2:]...)
	}
	switch construct, known := parts[name]; {
	case name == "etcd":
		etcdmain.Main(os.Args)
	case name == "kubectl":
		// As upstream's own main: errors reach the user through kubectl's words.
		if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
			kubectlutil.CheckErr(err)
		}
	case known:
		os.Exit(cli.Run(construct()))
	default:
		fmt.Fprintf(os.Stderr, "kubernetes: unknown part %q: use etcd, kubectl, %s\n", name, strings.Join(names(), ", "))
		os.Exit(2)
	}
}

func names() (all []string) {
	for name := range parts {
		all = append(all, name)
	}
	return all
}
