"""The agent: sidecar of one engine. It knows what the engine holds, keeps its gate shut or open, and passes control calls on."""
