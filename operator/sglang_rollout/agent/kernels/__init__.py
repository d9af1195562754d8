"""Compiled kernels of the engine, which new pods get from the weight store before their engines start (``engine.cache.shared``)."""
