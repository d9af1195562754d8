"""What needs a real cluster: the lab, the demo and the end-to-end cases."""
