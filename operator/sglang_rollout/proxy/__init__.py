"""The proxies around our own processes: haproxy as gate and as front, and smg as the request router."""
