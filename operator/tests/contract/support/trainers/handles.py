"""Serialize tensors as trainers on the engine's GPUs do, with torch and SGLang. Run by the engine's Python.

Prints one line of JSON: the items of ``serialized_named_tensors`` by format. There is no GPU here: handles of CUDA memory are those
of an object that torch's own function names.
"""

import base64
import io
import json
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing
from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor
from sglang.srt.utils import patch_torch
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from torch.multiprocessing import reductions

torch.multiprocessing.set_sharing_strategy("file_system")
named = [("model.norm.weight", torch.zeros(4, 2)), ("lm_head.weight", torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))]


class OnGpu:
    """A tensor in CUDA memory, as ``reduce_tensor`` writes it: function, then arguments."""

    def __init__(self, tensor: torch.Tensor, rebuild: object, device: object) -> None:
        storage = (torch.storage.TypedStorage, tensor.dtype, device, b"h" * 64, 32, 0)
        event = (False, b"/torch_1_2_0", 0, b"e" * 64, True)
        self.reduced = (rebuild, (type(tensor), tensor.size(), tensor.stride(), 0, *storage, *event))

    def __reduce__(self) -> tuple[object, ...]:
        return self.reduced


def dump(value: object, protocol: int | None = None) -> bytes:
    out = io.BytesIO()
    ForkingPickler(out, protocol).dump(value)
    return out.getvalue()


def on_gpu(tensor: torch.Tensor) -> OnGpu:
    return OnGpu(tensor, patch_torch._rebuild_cuda_tensor_modified, "GPU-1b2c")


bucket = FlattenedTensorBucket(named_tensors=[(name, tensor.detach()) for name, tensor in named])
metadata = bucket.get_metadata()
payloads = {
    "tensors in shared memory": dump(named),
    "tensors on a GPU": dump([(name, on_gpu(tensor)) for name, tensor in named]),
    "tensors on a GPU, with torch alone": dump([(name, OnGpu(tensor, reductions.rebuild_cuda_tensor, 0)) for name, tensor in named]),
    "a bucket in shared memory": dump({"flattened_tensor": bucket.get_flattened_tensor(), "metadata": metadata}),
    "a bucket on a GPU": dump({"flattened_tensor": on_gpu(bucket.get_flattened_tensor()), "metadata": metadata}),
    "one pickle for each rank": dump([(name, LocalSerializedTensor(values=[dump(on_gpu(tensor))] * 2)) for name, tensor in named]),
    "base64 for each rank": dump(
        [(name, LocalSerializedTensor(values=[base64.b64encode(dump(tensor)).decode()] * 2)) for name, tensor in named]
    ),
    "the newest protocol": dump({"flattened_tensor": on_gpu(bucket.get_flattened_tensor()), "metadata": metadata}, 5),
    "an empty tensor": dump([("empty", torch.zeros(0))]),
}
print(json.dumps({name: base64.b64encode(payload).decode() for name, payload in payloads.items()}))
