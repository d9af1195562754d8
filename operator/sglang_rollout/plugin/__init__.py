"""Everything of this project that runs inside SGLang: the plug-in.

Agents copy this package as the folder ``sglang_rollout_plugin`` into the engine's container, where SGLang's plug-in interface loads it.
So its modules import each other relatively, and at import time nothing but the standard library of Python 3.10.
"""
