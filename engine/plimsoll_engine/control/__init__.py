"""The gRPC control channel between the operator and one engine."""
