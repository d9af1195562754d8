"""``sglang-rollout status``: a fleet on one screen, from its SGLangRollout and its two ConfigMaps. It calls only the API server."""
