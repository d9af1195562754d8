"""Staged versions: their index, copies in a folder, and the transfer of a copy from another pod.

Agents, the weight store and the local fleet use this package. It never imports torch; ``loader`` is a file for the engine's process.
"""
