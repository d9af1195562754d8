"""The agent, sidecar of one engine: tracks the engine's weights, opens and closes the gate, and forwards control calls."""
