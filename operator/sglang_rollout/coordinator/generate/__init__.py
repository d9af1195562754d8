"""The data path beside the weight update: batches, streams and the worker list of smg."""
