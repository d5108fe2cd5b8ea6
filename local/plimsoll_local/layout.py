"""Names that both sides of a cluster's namespace use: addresses inside, files of its folder."""

from __future__ import annotations

NODE_NAME = "plimsoll-local"
# The node's address on the pods' bridge, where the API server listens too.
NODE_ADDRESS = "10.244.0.1"
API_PORT = 6443

# Files in the folder of a running cluster.
SUPERVISOR_RECORD = "supervisor.json"
SUPERVISOR_LOG = "supervisor.log"
# The pid namespace, as /proc/PID/ns/pid names it, and when its pid 1 started.
NAMESPACE_RECORD = "namespace.json"
KUBECONFIG = "kubeconfig"
IMAGES = "images.json"
RELAY_SOCKET = "relay.sock"
