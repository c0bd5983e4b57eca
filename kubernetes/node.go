package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// nodePlugin is the name by which kube-proxy's kubeconfig asks for hostNode.
const nodePlugin = "monopod-host-node"

// hostNode tells kube-proxy of a node that the API server does not have: a host is none. Without one kube-proxy waits
// for 30 seconds before it makes its first rule (NewNodeManager in pkg/proxy/node.go), and knows no zone.
type hostNode struct {
	zone string
	next http.RoundTripper
}

func init() {
	construct := func(_ string, config map[string]string, _ rest.AuthProviderConfigPersister) (rest.AuthProvider, error) {
		return hostNode{zone: config["zone"]}, nil
	}
	if err := rest.RegisterAuthProviderPlugin(nodePlugin, construct); err != nil {
		panic(err)
	}
}

func (hostNode) Login() error { return nil }

func (h hostNode) WrapTransport(next http.RoundTripper) http.RoundTripper {
	return hostNode{zone: h.zone, next: next}
}

// RoundTrip answers lists and watches of the one node by itself, and keeps events about it to itself.
func (h hostNode) RoundTrip(request *http.Request) (*http.Response, error) {
	if request.Method == http.MethodPost && strings.HasSuffix(request.URL.Path, "/events") {
		event, err := io.ReadAll(request.Body)
		if err = errors.Join(err, request.Body.Close()); err != nil {
			return nil, fmt.Errorf("read an event: %w", err)
		}
		return answer(request, http.StatusCreated, request.Header.Get("Content-Type"), io.NopCloser(bytes.NewReader(event))), nil
	}
	query := request.URL.Query()
	name, one := strings.CutPrefix(query.Get("fieldSelector"), "metadata.name=")
	if request.URL.Path != "/api/v1/nodes" || request.Method != http.MethodGet || !one {
		return h.next.RoundTrip(request)
	}
	node := core.Node{
		TypeMeta: meta.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: meta.ObjectMeta{
			Name: name, ResourceVersion: "1",
			Labels: map[string]string{core.LabelTopologyZone: h.zone},
		},
		// What kube-proxy takes where it finds none.
		Status: core.NodeStatus{Addresses: []core.NodeAddress{{Type: core.NodeInternalIP, Address: "127.0.0.1"}}},
	}
	reader, writer := io.Pipe()
	go func() {
		var err error
		if query.Get("watch") == "" {
			err = json.NewEncoder(writer).Encode(core.NodeList{
				TypeMeta: meta.TypeMeta{APIVersion: "v1", Kind: "NodeList"},
				ListMeta: meta.ListMeta{ResourceVersion: "1"},
				Items:    []core.Node{node},
			})
		} else {
			if query.Get("sendInitialEvents") == "true" {
				err = sendInitialEvents(writer, node)
			}
			if err == nil {
				// It never changes.
				<-request.Context().Done()
			}
		}
		writer.CloseWithError(err)
	}()
	return answer(request, http.StatusOK, "application/json", reader), nil
}

func answer(request *http.Request, status int, kind string, body io.ReadCloser) *http.Response {
	return &http.Response{
		Status: fmt.Sprintf("%d %s", status, http.StatusText(status)), StatusCode: status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Content-Type": {kind}}, Body: body, ContentLength: -1, Request: request,
	}
}

// sendInitialEvents writes what a watch list begins with: the node, and the word that this was all.
func sendInitialEvents(writer io.Writer, node core.Node) error {
	event := func(kind string, object core.Node) error {
		return json.NewEncoder(writer).Encode(map[string]any{"type": kind, "object": object})
	}
	if err := event("ADDED", node); err != nil {
		return fmt.Errorf("tell of the node: %w", err)
	}
	end := core.Node{TypeMeta: node.TypeMeta, ObjectMeta: meta.ObjectMeta{
		ResourceVersion: node.ResourceVersion,
		Annotations:     map[string]string{meta.InitialEventsAnnotationKey: "true"},
	}}
	return event("BOOKMARK", end)
}
