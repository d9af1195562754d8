"""The fault matrix: every part killed, stopped or cut off in every phase of a weight update; ``python -m e2e.chaos --help``."""
