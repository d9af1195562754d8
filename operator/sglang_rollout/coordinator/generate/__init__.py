"""The data path beside the transaction: batches, requests that bypass smg, and smg's list of workers."""
