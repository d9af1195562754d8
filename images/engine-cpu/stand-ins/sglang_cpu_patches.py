"""Corrections of SGLang for CPUs, each only where ``SGLANG_CPU_PATCHES`` names it: ``lora``, ``expert-parallel``, ``checksum`` (0.5.20),
``paused-sleep``. One more is always applied: SGLang's processes are forked.

They change a module right after, or before, SGLang imports it. An engine that runs with one is real but for these lines.
"""

import importlib.abc
import importlib.util
import os
import sys


def apply():
    """Install what the environment asks for. Raises ValueError for a name that is none."""
    sys.meta_path.insert(0, _Hook("sglang.srt.entrypoints.engine", _nothing, _fork_processes))
    names = os.environ.get("SGLANG_CPU_PATCHES", "").split(",")
    for name in filter(None, (name.strip() for name in names)):
        if name not in _PATCHES:
            raise ValueError(f"SGLANG_CPU_PATCHES names {name!r}: there are {', '.join(_PATCHES)}")
        module, before, after = _PATCHES[name]
        sys.meta_path.insert(0, _Hook(module, before, after))


class _Hook(importlib.abc.MetaPathFinder):
    def __init__(self, module, before, after):
        self._module, self._before, self._after = module, before, after

    def find_spec(self, name, path=None, target=None):
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        self._before()
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self._after(module)

        spec.loader.exec_module = exec_module
        return spec


def _fork_processes(_):
    """SGLang spawns scheduler and detokenizer, which import all modules again: 9 s of the 14 s of processor time of a start."""
    import multiprocessing

    choose = multiprocessing.set_start_method

    def choose_fork(method, force=False):
        choose("fork" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = choose_fork


def _no_pinned_memory():
    """LoRA's buffers ask for pinned host memory, which only a CUDA driver can give."""
    import torch

    def unpinned(make):
        def made(*args, pin_memory=False, **kwargs):
            return make(*args, **kwargs)

        return made

    for name in ("tensor", "empty", "zeros", "ones"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


def _experts_of_this_rank(module):
    """The CPU's mixture of experts reads -1, the mark of an expert on another rank, as the last expert of its own."""
    import torch.nn.functional as functional

    whole = module.moe_forward_native

    def moe_forward_native(layer, x, topk_output, config):
        weights, ids, _ = topk_output
        if layer.w13_weight.shape[0] == layer.num_experts:
            return whole(layer, x, topk_output, config)
        out = x.new_zeros(x.shape).float()
        for expert in range(layer.w13_weight.shape[0]):
            hit = ids == expert
            rows = hit.any(1)
            if rows.any():
                gate, up = functional.linear(x[rows], layer.w13_weight[expert]).chunk(2, -1)
                found = functional.linear(functional.silu(gate) * up, layer.w2_weight[expert])
                out[rows] += found.float() * (weights * hit).sum(1)[rows, None].float()
        return out.to(x.dtype)

    module.moe_forward_native = moe_forward_native


def _no_device_to_wait_for(_):
    """SGLang 0.5.20 waits for the GPU before it computes a checksum, wherever the weights are."""
    import torch

    torch.cuda.synchronize = _nothing


def _sleep_while_paused(module):
    """With ``--sleep-on-idle`` an idle scheduler waits for messages, but a paused one polls for them on a whole core."""
    scheduler = module.Scheduler
    record = scheduler._record_scheduler_state_for_paused_engine

    def record_and_sleep(self):
        record(self)
        self.maybe_sleep_on_idle()

    scheduler._record_scheduler_state_for_paused_engine = record_and_sleep


def _nothing(*_):
    pass


_PATCHES = {
    "lora": ("sglang.srt.lora.layers", _no_pinned_memory, _nothing),
    "expert-parallel": ("sglang.srt.layers.moe.fused_moe_native", _nothing, _experts_of_this_rank),
    "checksum": ("sglang.srt.utils.weight_checker", _nothing, _no_device_to_wait_for),
    "paused-sleep": ("sglang.srt.managers.scheduler", _nothing, _sleep_while_paused),
}
