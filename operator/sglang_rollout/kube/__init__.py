"""The HTTP client of the Kubernetes API server. The operator and the coordinator use it; it decides nothing."""
