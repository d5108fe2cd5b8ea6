"""A Kubernetes in local processes: a pinned control plane and a node agent, without root."""

__version__ = "0.1.0"
