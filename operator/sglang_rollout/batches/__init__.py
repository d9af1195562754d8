"""The batch server: splits batches into requests with one prompt, and forwards requests that smg would refuse or change.

It is a process of its own, so that parsing a large body never delays the coordinator, and it holds no credentials.
"""
