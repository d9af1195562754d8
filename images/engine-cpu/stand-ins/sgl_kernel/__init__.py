"""Stand-in for ``sgl_kernel`` on a CPU without Intel AMX, where SGLang takes its torch-native code everywhere.

SGLang imports some of its names unconditionally when SGLANG_USE_CPU_ENGINE=1. The one that a plain server may call is
real; every other name raises when it is called, and says so.
"""

__version__ = "0.0.0+cpu.standin"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """Write each request's new cache locations into its row of the request-to-token table."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        req_to_token[row, first:last] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in: this CPU development engine cannot do that")

    missing.__name__ = name
    return missing
