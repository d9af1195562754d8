"""Delete from a Python environment what a CPU engine never loads: about 2 GB of PyPI's CUDA build of torch.

    python trim.py SITE_PACKAGES

The remaining NVIDIA libraries stay although nothing calls them: libtorch_cuda.so is linked to them.
With a CPU build of torch there is nothing to delete, and that is fine.
"""

import shutil
import sys
from pathlib import Path

_UNUSED = (
    "triton",  # the stand-in takes its place
    "torch/include",
    "torch/test",
    "nvidia/*/include",
    "nvidia/**/*.a",
    "nvidia/**/libcudnn_engines_*",
    "nvidia/**/libcudnn_adv*",
    "nvidia/**/libcudnn_heuristic*",
    "nvidia/**/libcudnn_ops*",
    "nvidia/**/libcudnn_cnn*",
    "nvidia/**/libcudnn_graph*",
    "nvidia/**/libnvrtc.alt*",
    "nvidia/**/libnvrtc-builtins.alt*",
    "nvidia/**/libcusolver*",
    "nvidia/**/libnvperf*",
    "nvidia/**/libcheckpoint*",
    "nvidia/**/libpcsamplingutil*",
    "nvidia/**/libnvshmem_device*",
)


def main(site_packages: str) -> None:
    """Delete, and print how much that was."""
    root, freed = Path(site_packages), 0
    for pattern in _UNUSED:
        for path in sorted(root.glob(pattern)):
            inside = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
            freed += sum(p.lstat().st_size for p in inside)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    print(f"trimmed {freed / 1e6:.0f} MB from {root}")


if __name__ == "__main__":
    main(sys.argv[1])
