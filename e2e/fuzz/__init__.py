"""A fuzzer for the bodies of data requests: no request may end or hang an engine."""
