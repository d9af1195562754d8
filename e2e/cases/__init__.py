"""End-to-end cases: they need a cluster and know nothing but kubectl, helm and the URL."""
