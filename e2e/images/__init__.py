"""The project's images, built by docker or buildah into content-keyed archives; ``python3 -m e2e.images --help``."""
